"""Rows of activations: the outputs of blocks at the patches of an image, all or a sample of them.

Shapes: n rows of one image (its patches or a sample of them), D tower width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from encoders import VisionEncoder
from encoders.contract import VisionInputs

from .parquet_files import Array

Activations: TypeAlias = dict[str, Tensor]
"""Tensors by name: one or more rows of activations per block, ``"image"`` and ``"position"``."""
IMAGE, POSITION = "image", "position"
"""The names of the arrays beside the activations: the number of the image [n], counted from 0 over
all images of the job, and (frame or tile, row, column) of the patch [n, 3]."""
BESIDE: Mapping[str, Array] = {
    IMAGE: np.zeros(0, np.int32),
    POSITION: np.zeros((0, 3), np.int32),
}
"""These arrays without rows."""


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
    path = next((name for name in paths if stack.startswith(f"{name}.")), "image")
    numbers = torch.arange(shape.numel()).view(*shape, 1)
    if len(shape) < 3:  # rows [views, h, w] of an inner stack, as of SAM, are a map already
        numbers = paths[path].feature_maps(numbers, layout.paths[path].grid_thw)[0]
    axes = [torch.arange(size) for size in numbers.shape[:3]]
    return numbers.flatten(), torch.cartesian_prod(*axes)
