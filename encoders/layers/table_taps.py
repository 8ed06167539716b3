"""Which rows of a square table of positions make up the position of a patch, and their weights.

A table for one size of image is interpolated to the grid of another on the host, so that CUDA
graphs of any grid read the same table: each patch has row numbers and weights.

Shapes: n patches of one frame.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bicubic_taps(places: Tensor, height: int, width: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the sixteen rows of a table around each patch, and their bicubic weights.

    The outer edges of the grid map to those of the table (``align_corners=False``). Taps beyond the
    table are those at its edge, and a table that shrinks is not smoothed first.

    Args:
        places: row and column of each patch, int64 [n, 2].
        height: rows of the grid.
        width: columns of the grid.
        side: rows and columns of the table.

    Returns:
        Row numbers int64 [n, 16], four rows of four columns each, and weights, float64 [n, 16].
    """
    sides = torch.tensor([height, width], dtype=torch.float64, device="cpu")
    at = (places.to(torch.float64) + 0.5) * side / sides - 0.5
    near = at.floor()[:, :, None] + torch.arange(-1, 3, device="cpu")
    r, c = near.clamp(0, side - 1).to(torch.int64).unbind(1)
    down, across = _cubic((at[:, :, None] - near).abs()).unbind(1)
    index = (r * side)[:, :, None] + c[:, None]
    weight = down[:, :, None] * across[:, None]
    return index.flatten(1), weight.flatten(1)


def _cubic(distance: Tensor) -> Tensor:
    """Return the weights of cubic convolution (a = -0.75, as torch's) at distances from 0 to 2."""
    near = (1.25 * distance - 2.25) * distance**2 + 1
    far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, far)
