"""Rows of activations: the outputs of blocks at the patches of an image, all or a sample of them.

Class tokens and other rows before the patches are all written, in arrays of their own.

Shapes: n rows of one image (its patches or a sample of them), D tower width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from encoders import VisionEncoder

from .block_fields import PREFIX, is_block, stack_of
from .parquet_files import Array

Activations: TypeAlias = dict[str, Tensor]
"""Tensors by name: one or more rows of activations per block, ``"image"`` and ``"position"``."""


def outputs_of(paths: Mapping[str, VisionEncoder], fields: Sequence[str]) -> tuple[str, ...]:
    """Return the outputs that an encoder gives if a job writes ``fields``.

    These are the fields and, of outputs of blocks in towers that have them, the rows before the
    patches: "blocks.6.prefix". ``paths`` are the input paths of the encoder.
    """
    blocks = [field for field in fields if is_block(field)]
    if not blocks:
        return tuple(fields)
    stack = stack_of(blocks)
    path = path_of(paths, stack)
    is_inner = stack.removeprefix(f"{path}.") != ""
    if is_inner or not paths[path].prefix_rows:
        return tuple(fields)
    return (*fields, *(f"{field}{PREFIX}" for field in fields))


@lru_cache(maxsize=256)
def places_of_prefix(shape: torch.Size) -> Array:
    """Return (frame or tile, -1, number) of all rows before patches, int32 [segments * r, 3].

    ``shape`` is [segments, r]. The array is shared: do not write to it.
    """
    segments, rows = (torch.arange(size) for size in shape)
    return torch.cartesian_prod(segments, torch.tensor([-1]), rows).numpy().astype(np.int32)


def places_of_patches(
    tower: VisionEncoder, shape: Sequence[int], grid: Sequence[int]
) -> tuple[Array, Array]:
    """Return where the patches of one image lie among the rows of a block, and their positions.

    Rows before the patches, such as class tokens, are left out.

    Args:
        tower: the tower of the blocks.
        shape: the shape of the output of a block without its last axis. Three axes [views, h, w]
            are those of an inner stack, as of SAM, and a map already.
        grid: (t, h, w) of the image in the input path of the tower.

    Returns:
        int64 [patches], and (frame or tile, row, column) int32 [patches, 3] in raster order.
    """
    numbers = torch.arange(prod(shape)).view(*shape, 1)
    if len(shape) < 3:
        numbers = tower.feature_maps(numbers, torch.tensor([grid]))[0]
    axes = [torch.arange(size) for size in numbers.shape[:3]]
    positions = torch.cartesian_prod(*axes)
    return numbers.flatten().numpy(), positions.numpy().astype(np.int32)


def path_of(paths: Mapping[str, VisionEncoder], stack: str) -> str:
    """Return the input path that a stack of blocks, "", "tiles." or "tiles.sam.", belongs to."""
    return next((name for name in paths if stack.startswith(f"{name}.")), "image")
