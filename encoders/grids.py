"""``grid_thw`` on the host: reading it, checking it against pixels, laying features out by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from einops import rearrange
from torch import Tensor

Grid: TypeAlias = tuple[int, int, int]
GridLike: TypeAlias = Tensor | Sequence[Sequence[int]] | Sequence[int]


def read_grid(grid_thw: GridLike, merge: int = 1, merge_name: str = "merge size") -> list[Grid]:
    """Read ``grid_thw`` on the host as a list of ``(t, h, w)``, checked.

    Args:
        grid_thw: [items, 3] as a tensor or nested sequence; one flat ``(t, h, w)`` is one item.
        merge: h and w must be multiples of it.
        merge_name: the config field that ``merge`` comes from, for the message.

    Raises:
        ValueError: not three positive integers an item, or h or w not a multiple of ``merge``.
    """
    raw = grid_thw.tolist() if isinstance(grid_thw, Tensor) else list(grid_thw)
    if len(raw) == 3 and all(isinstance(value, int) for value in raw):
        raw = [raw]
    return [_read_item(row, merge, merge_name) for row in raw]


def _read_item(row: Any, merge: int, merge_name: str) -> Grid:
    values = (
        row.tolist()
        if isinstance(row, Tensor)
        else list(row)
        if isinstance(row, Sequence)
        else [row]
    )
    if len(values) != 3 or any(int(v) != v or v < 1 for v in values):
        raise ValueError(
            f"grid_thw row {values}: each item needs three positive integers (t, h, w) in patches"
        )
    t, h, w = (int(v) for v in values)
    for name, size in (("height", h), ("width", w)):
        if size % merge:
            below, above = size // merge * merge, (size // merge + 1) * merge
            fix = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"grid {h}x{w}: {name} {size} must be a multiple of {merge_name}={merge}; "
                f"resize to {fix} patches"
            )
    return t, h, w


def check_input_size(rows: int, max_input_size: int | None, group: int = 1) -> int:
    """Rows that per-patch metadata shall have: ``max_input_size`` if given, else ``rows``.

    Raises:
        ValueError: more rows than that, or a size that cuts a token's ``group`` of patches.
    """
    if max_input_size is None:
        return rows
    if max_input_size % group:
        raise ValueError(
            f"max_input_size={max_input_size} must be a multiple of {group}, the patches of a token"
        )
    if rows > max_input_size:
        raise ValueError(
            f"the grid has {rows} rows, more than max_input_size={max_input_size}: raise it or "
            "pass fewer items"
        )
    return max_input_size


def check_rows(rows: int, expected: int, what: str) -> None:
    """Raise unless ``pixel_values`` has the number of rows that the grid or metadata speaks of."""
    if rows != expected:
        raise ValueError(
            f"pixel_values has {rows} rows but {what} {expected}: pass the grid_thw that belongs "
            "to these pixels (one row t, h, w an item)"
        )


def raster_maps(features: Tensor, grids: Sequence[Grid], merge: int) -> list[Tensor]:
    """Undo the merge-block order: a list of [t, h, w, D], one an item.

    Rows of a 2x2-merge tower run block by block, so that 4 neighbours in memory make one token; for
    a 4x4 grid of patches::

        0  1 |  4  5
        2  3 |  6  7        rows 0..3 are the top left block, 4..7 the top right one
        ------------
        8  9 | 12 13
       10 11 | 14 15

    Merged tokens (a row a block) are in raster order already, on a grid of h/2 x w/2.

    Args:
        features: [P, D] a row a patch, or [N, D] a row a token.
        grids: ``(t, h, w)`` in patches, one an item.
        merge: side of a block in patches.

    Raises:
        ValueError: ``features`` has neither a row a patch nor a row a token.
    """
    patches = [t * h * w for t, h, w in grids]
    tokens = [count // merge**2 for count in patches]
    if features.shape[0] == sum(patches):
        return [
            rearrange(
                part, "(t h w a b) d -> t (h a) (w b) d",
                t=t, h=h // merge, w=w // merge, a=merge, b=merge,
            )
            for part, (t, h, w) in zip(features.split(patches), grids, strict=True)
        ]  # fmt: skip
    if features.shape[0] == sum(tokens):
        return [
            part.unflatten(0, (t, h // merge, w // merge))
            for part, (t, h, w) in zip(features.split(tokens), grids, strict=True)
        ]
    raise ValueError(
        f"features have {features.shape[0]} rows: the grid makes {sum(patches)} patches "
        f"or {sum(tokens)} tokens"
    )


def squarest(tokens: int) -> tuple[int, int]:
    """The two factors of ``tokens`` nearest to each other, the smaller first."""
    side = next(n for n in range(math.isqrt(max(tokens, 1)), 0, -1) if max(tokens, 1) % n == 0)
    return side, max(tokens, 1) // side


def stitch_tiles(maps: Tensor, layout: tuple[int, int, bool]) -> Tensor:
    """Join the tiles [t, h, w, D] of an image to [1, rows*h, columns*w, D]; a video stays [t, h,
    w, D].

    Raises:
        ValueError: the layout does not make this many tiles.
    """
    columns, rows, thumbnail = layout
    if (columns, rows, thumbnail) == (1, 1, False):
        return maps
    if maps.shape[0] != columns * rows + thumbnail:
        raise ValueError(
            f"{columns}x{rows} tiles{' and a thumbnail' if thumbnail else ''} are "
            f"{columns * rows + thumbnail}, the features have {maps.shape[0]}"
        )
    return rearrange(maps[: columns * rows], "(r c) h w d -> 1 (r h) (c w) d", r=rows)
