"""Rows of activations: the outputs of blocks at the patches of an image, all or a sample of them.

Class tokens and other rows before the patches are all written, in arrays of their own.

Shapes: n rows of one image (its patches or a sample of them), D tower width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from encoders import VisionEncoder

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


def images_of(arrays: Mapping[str, Array], image: int) -> dict[str, Array]:
    """Return the arrays that have the number of an image in each row, one per array of positions.

    Args:
        arrays: the other arrays of the image by name.
        image: its number among all of the job.
    """
    return {
        f"{IMAGE}{name.removeprefix(POSITION)}": np.full(len(array), image, np.int32)
        for name, array in arrays.items()
        if name.startswith(POSITION)
    }


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
