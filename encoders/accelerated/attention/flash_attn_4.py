"""The attention forward of flash-attn-4, which is a private function of that package.

The public ``flash_attn_varlen_func`` accepts neither a buffer for the result nor tile sizes. With
its own tile sizes one image of 784 rows takes 1.25 to 1.42 times as long on an H200
(``candidates.flash4_tile``). This library's extra ``flash`` installs version 4.0 only, and the
keywords passed are compared with the function's signature before its first call.

Source: ``flash_attn/cute/interface.py`` and ``flash_attn/cute/cache_utils.py`` of 4.0.0b36.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
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
"""The keyword arguments that are passed to flash-attn-4's forward."""
WARNING_MODULES = r"(flash_attn|cutlass|quack)(\.|$)"
"""The modules of flash-attn-4, and of the compiler and the kernels that it is built on."""


class Flash4(Protocol):
    """The type of flash-attn-4's forward function, whose package has no type annotations."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> object: ...


@cache
def flash4_forward() -> Flash4:
    """Return flash-attn-4's forward with an output buffer; its compiled kernels are kept on disk.

    The package compiles for some two seconds per head size and tiling. Unless the user has set
    ``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED``, the forward gets a cache on disk, in the folder
    ``FLASH_ATTENTION_CUTE_DSL_CACHE_DIR`` or else in the user's cache folder. Where that cannot be
    written, compiled kernels are kept in memory, as by the package's default.

    Its compiler warns of argument types and old names that the package itself uses. Warnings from
    its modules are ignored from here on: a filter set only during a call would apply to all threads
    of the process, and two calls that overlap could leave it set for good.

    Raises:
        ImportError: the package is missing, or its forward lacks one of :data:`KEYWORDS`.
    """
    warnings.filterwarnings("ignore", module=WARNING_MODULES)
    from flash_attn.cute.cache_utils import JITPersistentCache, _compute_source_fingerprint
    from flash_attn.cute.interface import _flash_attn_fwd

    forward: Flash4 = _flash_attn_fwd
    if missing := sorted(KEYWORDS - signature(forward).parameters.keys()):
        raise ImportError(
            f"the forward of this flash-attn-4 takes no {', '.join(missing)}: install 4.0.0b36"
        )
    if "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" not in os.environ:
        # Setting the variable during the import could crash C code of a thread that reads another.
        cache_home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        own_folder = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
        folder = Path(own_folder or cache_home / "vitgraph" / "flash-attn-4")
        with suppress(OSError):
            _flash_attn_fwd.compile_cache = JITPersistentCache(
                folder / _compute_source_fingerprint() / "fwd"
            )
    return forward
