"""The arguments of the method ``attention_maps`` of encoders and of their wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

Queries: TypeAlias = Sequence[tuple[int, int, int]] | Literal["cls"] | None
"""The queries of attention maps: points (frame, row, column) from 0, "cls" for the class token of
each tile, or None for all patches."""
Heads: TypeAlias = Literal["mean", "all"]
"""Whether attention is shown as the mean over the heads or for each of them."""


class MapSettings(NamedTuple):
    """The arguments of the method ``attention_maps`` besides images and videos."""

    blocks: int | Sequence[int] | None
    queries: Queries
    heads: Heads
    path: str
