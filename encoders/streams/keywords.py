"""Types of the keywords of ``encode`` and ``encode_many``, for type checkers.

Each method lists its keywords in full. Its overloads, one per kind of result, annotate ``**how``
with the classes below.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, TypedDict, TypeVar

from ..inputs.intake import ItemLike
from .pooling import VectorPool

Key = TypeVar("Key")
Pairs: TypeAlias = Iterable[tuple[Key, ItemLike]]
"""Pairs (key, item), which ``encode_many`` returns as (key, result)."""
Raise: TypeAlias = Literal["raise"]
Keep: TypeAlias = Literal["keep"]


class SizeKeywords(TypedDict, total=False):
    """The keywords of ``preprocess``."""

    min_pixels: int | None
    max_pixels: int | None
    max_tiles: int | None
    max_soft_tokens: int | None
    fps: float | None
    num_frames: int | None


class SharedKeywords(SizeKeywords, total=False):
    """The keywords of ``encode`` that do not change the type of a result."""

    normalize: bool
    max_tokens_per_call: int | None


class Whole(SharedKeywords, total=False):
    """The keywords of a call of ``encode`` whose results are whole outputs."""

    pool: Literal["none"]


class MakesVectors(TypedDict):
    """The keyword that a call of ``encode`` must have for its results to be vectors."""

    pool: VectorPool


class Pooled(MakesVectors, SharedKeywords):
    """The keywords of a call of ``encode`` whose results are vectors."""


class StreamKeywords(TypedDict, total=False):
    """The keywords that ``encode_many`` has besides those of ``encode`` and ``on_error``."""

    batch_tokens: int | None
    workers: int | None
    progress: bool


class WholeStream(Whole, StreamKeywords):
    """The keywords of a call of ``encode_many`` whose results are whole outputs."""


class PooledStream(Pooled, StreamKeywords):
    """The keywords of a call of ``encode_many`` whose results are vectors."""
