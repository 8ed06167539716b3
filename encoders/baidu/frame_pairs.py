"""The pairs of cells (squares of merged patches) at one place of two consecutive frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data import Grid


def frame_pairs(grids: Sequence[Grid], merge: int, rows: int) -> Tensor:
    """Return the two cells of each token, which lie at one place of two consecutive frames.

    A cell is a square of ``merge`` x ``merge`` patches, and cells are numbered frame by frame. A
    clip of three frames of two cells each, and then an image of one cell::

        frame 0: 0 1    frame 1: 2 3    frame 2: 4 5    image: 6
        pairs (0, 2) (1, 3) of frames 0 and 1, (4, 4) (5, 5) of frame 2, (6, 6) of the image

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        merge: side of a cell in patches.
        rows: rows of the result, at least the number of tokens.

    Returns:
        int64 [rows, 2]; a row beyond the tokens has its own number twice.
    """
    pairs = torch.arange(rows, device="cpu")[:, None].repeat(1, 2)
    cell = token = 0
    for t, h, w in grids:
        size = t * h * w // merge**2
        cells = torch.arange(cell, cell + size, device="cpu").view(t, -1)
        second = torch.cat((cells[1::2], cells[t - t % 2 :]))  # an odd last frame is its own pair
        item_pairs = torch.stack((cells[::2], second), -1).flatten(0, 1)
        pairs[token : token + len(item_pairs)] = item_pairs
        cell, token = cell + size, token + len(item_pairs)
    return pairs
