"""The forward of flash-attn-4, which is a private function of that package.

The public ``flash_attn_varlen_func`` takes neither the buffer that the result is written to nor a
tiling, without which one image of 784 rows takes 1.25 to 1.42 times as long on an H200
(``candidates.flash4_tile``). The extra ``flash`` admits 4.0 alone, and the keywords that
are passed are compared with the function's own before its first call.

Source: ``flash_attn/cute/interface.py`` and ``flash_attn/cute/cache_utils.py`` of 4.0.0b36.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Protocol

from torch import Tensor

KEYWORDS = frozenset(
    (
        *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "out"),
        *("tile_mn", "mma_pv_is_rs"),
    )
)
"""The keywords with which the forward is called."""


class Flash4(Protocol):
    """The type of flash-attn-4's forward function, whose package has no type annotations."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> object: ...


@cache
def flash4_forward() -> Flash4:
    """Return flash-attn-4's forward with an output buffer; its compiled kernels are kept on disk.

    The package compiles for some two seconds per head size and tiling. Its cache is off by default
    and lies in the shared temporary folder; here it is on and lies in the user's own cache. The
    package reads the two variables of its cache once, when it is imported, so they are in the
    environment during the import alone. Variables that the user has set keep their values, and a
    package that was imported before keeps the cache that it has.

    Raises:
        ImportError: the package is missing, or its forward lacks one of :data:`KEYWORDS`.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    settings = {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache_home / "vitgraph" / "flash-attn-4"),
    }
    new_settings = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(new_settings)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from flash_attn.cute.interface import _flash_attn_fwd
    finally:
        for name in new_settings:
            os.environ.pop(name, None)
    forward: Flash4 = _flash_attn_fwd
    if missing := sorted(KEYWORDS - signature(forward).parameters.keys()):
        raise ImportError(
            f"the forward of this flash-attn-4 takes no {', '.join(missing)}: install 4.0.0b36"
        )
    return forward
