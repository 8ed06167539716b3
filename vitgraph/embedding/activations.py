"""Rows of activations: the outputs of blocks at the patches of an image, all or a sample of them.

Class tokens and other rows before the patches are all written, in arrays of their own.

Shapes: n rows of one image (its patches or a sample of them), D tower width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from encoders import VisionEncoder
from encoders.contract import VisionInputs

from .block_fields import PREFIX, is_block, stack_of
from .parquet_files import Array

Activations: TypeAlias = dict[str, Tensor]
"""Tensors by name: one or more rows of activations per block, ``"image"`` and ``"position"``."""
IMAGE, POSITION = "image", "position"
"""The names of the arrays beside the activations: the number of the image [n], counted from 0 over
all images of the job, and (frame or tile, row, column) of the patch [n, 3]. A row before the
patches is at (frame or tile, -1, its number). Of these rows, the names end in :data:`PREFIX`."""


class Sampling(NamedTuple):
    """The patches of an image whose activations are written."""

    most: int | None = None
    """The most patches of an image; None for all."""
    seed: int = 0

    def choose(self, key: str, patches: int) -> Array:
        """Return the patches of an image that only its key and the seed choose, in ascending order.

        Args:
            key: the key of the image.
            patches: the number of its patches.
        """
        if self.most is None or self.most >= patches:
            return np.arange(patches)
        digest = hashlib.sha256(f"{self.seed}:{key}".encode("utf-8", "surrogateescape")).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
        return np.sort(generator.choice(patches, self.most, replace=False))


def outputs_of(paths: Mapping[str, VisionEncoder], fields: Sequence[str]) -> tuple[str, ...]:
    """Return the outputs that an encoder gives if a job writes ``fields``.

    These are the fields and, of outputs of blocks in towers that have them, the rows before the
    patches: "blocks.6.prefix". ``paths`` are the input paths of the encoder.
    """
    blocks = [field for field in fields if is_block(field)]
    if not blocks:
        return tuple(fields)
    stack = stack_of(blocks)
    path = _path_of(paths, stack)
    is_inner = stack.removeprefix(f"{path}.") != ""
    if is_inner or not paths[path].prefix_rows:
        return tuple(fields)
    return (*fields, *(f"{field}{PREFIX}" for field in fields))


def beside(image: int, positions: Tensor, end: str = "") -> dict[str, Array]:
    """Return the arrays beside the activations of one image, with ``end`` after their names.

    Args:
        image: the number of the image in the job.
        positions: (frame or tile, row, column) of its rows, int64 [n, 3].
        end: :data:`PREFIX` for rows before the patches.
    """
    return {
        f"{IMAGE}{end}": np.full(len(positions), image, np.int32),
        f"{POSITION}{end}": positions.numpy().astype(np.int32),
    }


def positions_of_prefix(shape: torch.Size) -> Tensor:
    """Return (frame or tile, -1, number) of all rows before patches, int64 [segments * r, 3].

    ``shape`` is [segments, r].
    """
    segments, rows = (torch.arange(size) for size in shape)
    return torch.cartesian_prod(segments, torch.tensor([-1]), rows)


def _path_of(paths: Mapping[str, VisionEncoder], stack: str) -> str:
    """Return the input path that a stack of blocks, "", "tiles." or "tiles.sam.", belongs to."""
    return next((name for name in paths if stack.startswith(f"{name}.")), "image")


def rows_of_patches(
    paths: Mapping[str, VisionEncoder], stack: str, layout: VisionInputs, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Return where the patches of one image lie among the rows of a block, and their positions.

    Rows before the patches, such as class tokens, are left out.

    Args:
        paths: the input paths of the encoder.
        stack: the stack of the blocks, "", "tiles." or "tiles.sam.".
        layout: the grids of the image.
        shape: the shape of the output of a block without its last axis.

    Returns:
        int64 [patches], and (frame or tile, row, column) int64 [patches, 3] in raster order.
    """
    path = _path_of(paths, stack)
    numbers = torch.arange(shape.numel()).view(*shape, 1)
    if len(shape) < 3:  # rows [views, h, w] of an inner stack, as of SAM, are a map already
        numbers = paths[path].feature_maps(numbers, layout.paths[path].grid_thw)[0]
    axes = [torch.arange(size) for size in numbers.shape[:3]]
    return numbers.flatten(), torch.cartesian_prod(*axes)
