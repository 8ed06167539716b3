"""Checkpoints: find one by repo id or path, take its vision tower, strictly and safely.

Encoders, and with them torch, are imported at their first use: fetching a tower and managing the
cache need neither. Other packages import the names in ``__all__`` of this package and of ``files``
and ``published``; all other modules are private. These are the modules, in the order in which a
load uses them:

- ``opening``: a checkpoint opened by repo id, folder or file
- ``files``: the files of a checkpoint: read, checked and written
- ``hub``: a repo of the Hub, read by byte ranges or fetched as whole files
- ``cache``: fetched towers and configs on this disk: stored, listed and removed
- ``strict_json``: the JSON of a checkpoint, parsed only if it is sound
- ``families``, ``published``: the record of each family, and the checkpoints that are known to load
- ``layouts``: the names that published checkpoints give the tensors of a tower
- ``match``: which tower a checkpoint holds: its family, layout and prefix
- ``configs``: the sizes in a published config, completed by the shapes of tensors
- ``tower``: the tensors of the tower, read from headers; ``fit``: their comparison with an
  encoder's, before data are read
- ``adapters``: LoRA adapters beside the weights, merged into the tower
- ``load``: :func:`load_encoder`, which fills an encoder strictly or not at all
- ``text_half``: the text half of a CLIP or SigLIP checkpoint, which transformers runs
- ``inspection``: :func:`inspect_checkpoint`, which says what a checkpoint holds
- ``extraction``: :func:`extract_encoder`, which writes a folder with only the tower
- ``threads``: tasks in parallel threads, which stop at an error
- ``errors``: :class:`CheckpointError`, and how messages show the names of tensors and files
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointError as CheckpointError

if TYPE_CHECKING:
    from .cache.listing import CachedTower as CachedTower
    from .cache.listing import list_cached as list_cached
    from .cache.listing import remove_cached as remove_cached
    from .configs import build_config as build_config
    from .extraction import extract_encoder as extract_encoder
    from .families import FAMILIES as FAMILIES
    from .families.family import Family as Family
    from .families.family import FamilyConfig as FamilyConfig
    from .hub.repo import Fetch as Fetch
    from .hub.repo import HubOptions as HubOptions
    from .inspection import CheckpointInfo as CheckpointInfo
    from .inspection import inspect_checkpoint as inspect_checkpoint
    from .layouts import Layout as Layout
    from .layouts import Prefix as Prefix
    from .layouts import Slot as Slot
    from .load import DtypeName as DtypeName
    from .load import describe_encoder as describe_encoder
    from .load import load_encoder as load_encoder
    from .opening import open_checkpoint as open_checkpoint
    from .opening import resolve_commit as resolve_commit
    from .strict_json import JsonDict as JsonDict
    from .strict_json import JsonObject as JsonObject
    from .text_half import WITH_TEXT as WITH_TEXT
    from .text_half import TextHalf as TextHalf
    from .text_half import read_text_half as read_text_half

_MODULES = {
    alias.name: f"{'.' * node.level}{node.module}"
    for block in ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    if isinstance(block, ast.If)
    for node in block.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The public names that the imports for type checkers above list -> the module of each."""
__all__ = sorted(("CheckpointError", *_MODULES))


if not TYPE_CHECKING:  # else a type checker would accept any misspelt name

    def __getattr__(name: str) -> object:
        """Import a name of another module when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
