"""``grid_thw`` on the host: reading it, and the orders of patches that follow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from einops import rearrange
from torch import Tensor

from .contract import Grid, GridLike, VisionInputs

LONGEST_ROW = 60
"""Characters of a wrong row that a message shows: pixels in its place would make megabytes."""
_RULE = "each item needs three positive integers (t, h, w) in patches"


@runtime_checkable
class _Array(Protocol):
    """An array or scalar of numpy's or another library's, which need not be installed."""

    def tolist(self) -> Any: ...


def plain_values(values: Any) -> Any:
    """Return the values of a tensor or an array as Python's numbers, and anything else as it is.

    Raises:
        ValueError: a tensor without values (meta), or in another layout than a dense one.
    """
    if isinstance(values, list | tuple | int | str):  # the usual types, which are quick to tell
        return values
    if isinstance(values, Tensor) and (values.is_meta or values.layout != torch.strided):
        kind = "on the meta device" if values.is_meta else f"of layout {values.layout}"
        raise ValueError(f"a tensor {kind} has no values to read: pass a dense tensor or a list")
    return values.tolist() if isinstance(values, Tensor | _Array) else values


def read_grid(grid_thw: GridLike, merge: int = 1, merge_name: str = "merge size") -> list[Grid]:
    """Read ``grid_thw`` on the host and check it.

    Args:
        grid_thw: [items, 3], a tensor, an array or nested lists; a flat ``(t, h, w)`` is one item.
        merge: h and w must be multiples of it.
        merge_name: the config field that ``merge`` comes from, for the message.

    Returns:
        ``(t, h, w)`` per item.

    Raises:
        ValueError: a row other than three positive integers, h or w that is no multiple of
            ``merge``, or a tensor without values.
    """
    raw: Any = grid_thw
    if type(raw) is not list:  # a list is the common case, without further calls
        if isinstance(raw, VisionInputs):
            raise ValueError(
                "grid_thw is the whole result of preprocess: pass inputs.grid_thw of it"
            )
        plain = plain_values(raw)
        if not isinstance(plain, Iterable):
            raise ValueError(f"grid_thw is {plain!r}: {_RULE}")
        raw = list(plain)
    if len(raw) == 3 and all(isinstance(value, int) for value in raw):
        raw = [raw]
    return [_read_item(row, merge, merge_name) for row in raw]


def _read_item(row: Any, merge: int, merge_name: str) -> Grid:
    if type(row) in (list, tuple) and len(row) == 3:  # the common case, without further calls
        t, h, w = row
        whole = type(t) is type(h) is type(w) is int and t > 0 and h > 0 and w > 0
        if whole and not h % merge and not w % merge:
            return t, h, w
    values = plain_values(row)
    values = [plain_values(v) for v in values] if isinstance(values, Sequence) else [values]
    if len(values) != 3 or not all(_is_whole(v) and v > 0 for v in values):
        text = repr(values)
        shown = text if len(text) <= LONGEST_ROW else f"{text[:LONGEST_ROW]}..."
        raise ValueError(f"grid_thw row {shown}: {_RULE}")
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
    """Undo the merge-block order.

    Rows of a tower that merges 2x2 patches run block by block, so that 4 neighbours in memory make
    one token. For a grid of 4x4 patches::

        0  1 |  4  5
        2  3 |  6  7        rows 0..3 are the top left block, 4..7 the top right one
        ------------
        8  9 | 12 13
       10 11 | 14 15

    Merged tokens (one row per block) are in raster order already, on a grid of h/2 x w/2.

    Args:
        features: [P, D], one row per patch, or [N, D], one row per token.
        grids: ``(t, h, w)`` per item, in patches.
        merge: side of a block in patches.

    Returns:
        [t, h, w, D] per item in raster order, of patches or of tokens as ``features`` are.

    Raises:
        ValueError: no tensor, or one with neither a row per patch nor a row per token.
    """
    patches = [t * h * w for t, h, w in grids]
    tokens = [count // merge**2 for count in patches]
    if features.shape[0] == sum(patches):
        return [
            rearrange(part, "(t h w a b) d -> t (h a) (w b) d", t=t, h=h // merge, a=merge, b=merge)
            for part, (t, h, _) in zip(features.split(patches), grids, strict=True)
        ]
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
    """Join the tiles of an image to one map.

    Args:
        maps: [t, h, w, D], one map per tile, the thumbnail last.
        layout: (columns, rows, thumbnail) of the image; (1, 1, False) for a video.

    Returns:
        [1, rows*h, columns*w, D] without the thumbnail; for a video ``maps`` itself.

    Raises:
        ValueError: another number of tiles than the layout makes.
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
    """Return the two factors of ``tokens`` that are nearest to each other, the smaller first."""
    side = next(n for n in range(math.isqrt(max(tokens, 1)), 0, -1) if max(tokens, 1) % n == 0)
    return side, max(tokens, 1) // side


def split_rows(tensor: Tensor | None, sizes: Sequence[int]) -> list[Tensor | None]:
    """Cut a tensor into the rows of each item; rows beyond those of the last item are padding.

    Args:
        tensor: [rows, ..], or None for an output that was left out.
        sizes: rows per item.

    Returns:
        One view per item; None per item if ``tensor`` is None.

    Raises:
        ValueError: the tensor has fewer rows than the items.
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
    """Return the position of every patch in merge-block order.

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        merge: side of a block in patches.
        rows: rows of the result, at least the number of patches.

    Returns:
        (row, column) per patch, int64 [rows, 2]; (0, 0) for rows beyond the patches.
    """
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
    """Return the order of merged tokens window by window, and the size of each window.

    Windows of ``side`` x ``side`` tokens run in raster order over each frame, and tokens in raster
    order inside a window; windows at the right and bottom edge are smaller. A frame of 3x6 tokens
    with side 4::

        0  1  2  3 |  4  5
        6  7  8  9 | 10 11      order 0-3, 6-9, 12-15 | 4, 5, 10, 11, 16, 17
       12 13 14 15 | 16 17      windows of 12 and 6 tokens

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        merge: side of a merge block in patches.
        side: side of a window in tokens.
        tokens: length of the order, at least the number of tokens.

    Returns:
        Token numbers, int64 [tokens], those beyond the last window in their own order; and the
        number of patches per window.
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
    """Return 0 to ``end`` - 1 on the CPU, independent of torch's default device."""
    return torch.arange(end, device="cpu")
