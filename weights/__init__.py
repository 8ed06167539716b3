"""Checkpoints: find one by repo id or path, take its vision tower, strictly and safely.

Encoders, and with them torch, are imported at their first use: fetching a tower and managing the
cache need neither. The names in ``__all__`` are public, all other modules are internal. These are
the modules, in the order in which a load uses them:

- ``opening``: a checkpoint opened by repo id, folder or file
- ``files``: the files of a checkpoint: read, checked and written
- ``hub``: a repo of the Hub, read by byte ranges or fetched as whole files
- ``cache``: what was fetched, kept on this disk, listed and removed
- ``strict_json``: the JSON of a checkpoint, parsed only if it is sound
- ``families``, ``published``: the record of each family, and the checkpoints that are known to load
- ``layouts``: the names that published checkpoints give the tensors of a tower
- ``match``: tensors matched with those of an encoder, before a byte of them is read
- ``load``: :func:`load_encoder`, which fills an encoder strictly or not at all
- ``inspection``: :func:`inspect_checkpoint`, which says what a checkpoint holds
- ``extraction``: :func:`extract_encoder`, which writes a folder with the tower alone
- ``threads``: tasks in parallel threads, which stop at an error
- ``errors``: :class:`CheckpointError`, and names as messages show them
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import CheckpointError

if TYPE_CHECKING:
    from .extraction import extract_encoder
    from .families import FAMILIES, LAYOUTS
    from .families.family import Family
    from .inspection import CheckpointInfo, inspect_checkpoint
    from .layouts import Layout
    from .load import load_encoder
    from .opening import resolve_commit
    from .published import PUBLISHED, PublishedModel

__all__ = [
    "FAMILIES",
    "LAYOUTS",
    "PUBLISHED",
    "CheckpointError",
    "CheckpointInfo",
    "Family",
    "Layout",
    "PublishedModel",
    "extract_encoder",
    "inspect_checkpoint",
    "load_encoder",
    "resolve_commit",
]

_MODULES = {
    **dict.fromkeys(("FAMILIES", "LAYOUTS", "Family"), ".families"),
    **dict.fromkeys(("PUBLISHED", "PublishedModel"), ".published"),
    **dict.fromkeys(("CheckpointInfo", "inspect_checkpoint"), ".inspection"),
    "Layout": ".layouts",
    "extract_encoder": ".extraction",
    "load_encoder": ".load",
    "resolve_commit": ".opening",
}
"""Per public name, the module that defines it; it is imported when the name is first used."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
