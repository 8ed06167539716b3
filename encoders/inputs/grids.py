"""``grid_thw`` on the host: reading it, and the orders of patches that follow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ..contract import Grid, GridLike
from .checks import plain_values, require_features

_RULE = "each item needs three positive integers (t, h, w) in patches"


def read_grid(grid_thw: GridLike, merge: int = 1, merge_name: str = "merge size") -> list[Grid]:
    """Read ``grid_thw`` on the host as a list of ``(t, h, w)``, checked.

    Args:
        grid_thw: [items, 3], a tensor, an array or nested; one flat ``(t, h, w)`` is one item.
        merge: h and w must be multiples of it.
        merge_name: the config field that ``merge`` comes from, for the message.

    Raises:
        ValueError: not three positive integers an item, or h or w not a multiple of ``merge``.
    """
    plain = plain_values(grid_thw)
    if not isinstance(plain, Iterable):
        raise ValueError(f"grid_thw is {plain!r}: {_RULE}")
    raw = list(plain)
    if len(raw) == 3 and all(isinstance(value, int) for value in raw):
        raw = [raw]
    return [_read_item(row, merge, merge_name) for row in raw]


def _read_item(row: Any, merge: int, merge_name: str) -> Grid:
    if type(row) in (list, tuple) and len(row) == 3:  # read before: no need to look closer
        t, h, w = row
        whole = type(t) is type(h) is type(w) is int and t > 0 and h > 0 and w > 0
        if whole and not h % merge and not w % merge:
            return t, h, w
    values = plain_values(row)
    values = [plain_values(v) for v in values] if isinstance(values, Sequence) else [values]
    if len(values) != 3 or not all(_is_whole(v) and v > 0 for v in values):
        raise ValueError(f"grid_thw row {values}: {_RULE}")
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


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


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
        ValueError: no tensor, or one that has neither a row a patch nor a row a token.
    """
    require_features(features)
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


def squarest(tokens: int) -> tuple[int, int]:
    """The two factors of ``tokens`` nearest to each other, the smaller first."""
    side = next(n for n in range(math.isqrt(max(tokens, 1)), 0, -1) if max(tokens, 1) % n == 0)
    return side, max(tokens, 1) // side


def split_rows(tensor: Tensor | None, sizes: Sequence[int]) -> list[Tensor | None]:
    """Cut a tensor by the rows of each item; rows beyond the last item are padding.

    Raises:
        ValueError: fewer rows than the items have.
    """
    if tensor is None:
        return [None] * len(sizes)
    if len(tensor) < sum(sizes):
        raise ValueError(
            f"the output has {len(tensor)} rows, the items of the grid {sum(sizes)}: pass the "
            "grid_thw that belongs to this output"
        )
    return list(tensor[: sum(sizes)].split(list(sizes)))


def merge_order_positions(grids: Sequence[Grid], merge: int, rows: int) -> Tensor:
    """(row, column) of every patch in merge-block order, int64 [rows, 2]; pad rows are (0, 0)."""
    positions = torch.zeros(rows, 2, dtype=torch.int64, device="cpu")
    start = 0
    for t, h, w in grids:
        cells = torch.cartesian_prod(_count(h), _count(w))
        cells = cells.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
        positions[start : start + t * h * w] = cells.repeat(t, 1)
        start += t * h * w
    return positions


def window_order(
    grids: Sequence[Grid], merge: int, side: int, tokens: int
) -> tuple[Tensor, list[int]]:
    """Merged tokens listed window by window, and the patches of each window.

    Windows of ``side`` x ``side`` tokens run in raster order over each frame, and tokens in raster
    order inside a window; those at the right and bottom edge are smaller. A frame of 3x6 tokens
    with side 4::

        0  1  2  3 |  4  5
        6  7  8  9 | 10 11      order 0-3, 6-9, 12-15 | 4, 5, 10, 11, 16, 17
       12 13 14 15 | 16 17      windows of 12 and 6 tokens
    """
    order, windows, start = [], [], 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        frame = _count(rows * columns).view(rows, columns)
        tiles = [tile for band in frame.split(side) for tile in band.split(side, dim=1)]
        frame_order = torch.cat([tile.flatten() for tile in tiles])
        starts = start + _count(t)[:, None] * rows * columns
        order.append((starts + frame_order).flatten())
        windows += [tile.numel() * merge**2 for tile in tiles] * t
        start += t * rows * columns
    return torch.cat([*order, _count(tokens)[start:]]), windows


def _count(end: int) -> Tensor:
    """0 to ``end`` - 1 on the host, whatever the default device."""
    return torch.arange(end, device="cpu")
