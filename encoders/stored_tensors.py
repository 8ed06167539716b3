"""How a checkpoint stores a tower: the dtypes of its tensors, and the order of rotary rows.

Shapes: H heads, K head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

STORED_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes in which towers are saved and loaded, by their names in a safetensors header."""


def in_halves(rows: Tensor, heads: int) -> Tensor:
    """Put the first rows of all rotary pairs of a head before the second rows.

    transformers stores queries and keys in this order where the tower rotates columns 2i and
    2i + 1 together.

    Args:
        rows: [H*K, ..], rows of the weight of queries or keys, pair by pair.
        heads: number of heads.
    """
    return torch.unflatten(rows, 0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Put the two rows of each rotary pair of a head side by side: undo :func:`in_halves`.

    Args:
        rows: [H*K, ..], rows of the weight of queries or keys, half by half.
        heads: number of heads.
    """
    return torch.unflatten(rows, 0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
