"""Checkpoints: find one by repo id or path, take its vision tower, strictly and safely.

Encoders, and with them torch, are imported at their first use: fetching a tower and managing the
cache need neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError

if TYPE_CHECKING:
    from .extraction import extract_encoder
    from .families import FAMILIES, LAYOUTS
    from .families.family import Family
    from .inspection import CheckpointInfo, inspect_checkpoint
    from .layouts import Layout
    from .load import load_encoder
    from .published import PUBLISHED, PublishedModel
    from .source import resolve_commit

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

_HOMES = {
    **dict.fromkeys(("FAMILIES", "LAYOUTS", "Family"), "families"),
    **dict.fromkeys(("PUBLISHED", "PublishedModel"), "published"),
    **dict.fromkeys(("CheckpointInfo", "inspect_checkpoint"), "inspection"),
    "Layout": "layouts",
    "extract_encoder": "extraction",
    "load_encoder": "load",
    "resolve_commit": "source",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
