"""Rotary positions: the angles of patches in two dimensions, and how queries and keys turn by them.

Shapes: P patches, T packed rows, H heads, K head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary_cos_sin(
    positions: Tensor, head_size: int, theta: float, dtype: torch.dtype, side: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [P, K/2] of the 2D rotary angles of ``positions`` [P, 2], (row, column).

    Half the angles are by row, then half by column; K is ``head_size``, ``theta`` the base. If all
    positions are integers below ``side``, they are looked up, which takes a fifth of the time.
    """
    exponents = torch.arange(0, head_size // 2, 2, dtype=dtype, device=positions.device)
    turns = theta ** (exponents / (head_size // 2))
    if side is None:
        angles = (positions[:, :, None].to(dtype) / turns).flatten(1)
        return angles.cos(), angles.sin()
    angles = torch.arange(side, dtype=dtype, device=positions.device)[:, None] / turns
    cos, sin = F.embedding(positions, angles.cos()), F.embedding(positions, angles.sin())
    return cos.flatten(1), sin.flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate columns i and i + K/2 of queries and keys ``x`` [T, ..., K] by the same angle.

    ``cos`` and ``sin`` are [T, 1, 1, K] in float32 or wider: ``RotarySegments.of`` has repeated
    the values of the K/2 angles and negated the first half of ``sin``.
    """
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate columns 2i and 2i + 1 of queries and keys ``x`` [..., K] by a row's angle i.

    ``cos`` and ``sin`` have the rows of ``x`` and K/2 columns, in float32 or wider.
    """
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return pairs.flatten(-2).to(x.dtype)
