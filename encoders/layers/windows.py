"""The order of tokens in which all tokens of an attention window follow one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data import Grid


def window_order(
    grids: Sequence[Grid], merge: int, side: int, tokens: int
) -> tuple[Tensor, list[int]]:
    """Return the order of merged tokens window by window, and the size of each window.

    Windows of ``side`` x ``side`` tokens lie in raster order over each frame, and tokens in raster
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
        Token numbers, int64 [tokens], where every entry beyond the last window is its own index;
        and the number of patches per window.
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
    """Return the numbers 0 to ``end`` - 1 on the CPU, whatever torch's default device is."""
    return torch.arange(end, device="cpu")
