"""Random sizes to resize, images of them, and a resize by nothing but a table of weights."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from encoders.inputs.exact_resize import Library, axes_in_order, make_weights, resize_on_cpu
from encoders.inputs.processor_files import Resample

FILTERS: tuple[Resample, ...] = ("bicubic", "bilinear", "lanczos")
"""The filters, each of which torch and Pillow have, but for torch's older versions."""
_OF_PIL = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}


def take_cpu_for_gpu(monkeypatch: pytest.MonkeyPatch, is_exact: bool = True) -> None:
    """Have pixels on the CPU resized and normalised by the code for a GPU, or by that for a CPU."""
    for module in ("resizing", "staging", "normalizing"):
        monkeypatch.setattr(f"encoders.inputs.{module}.is_exact_on", lambda device: is_exact)


class Case(NamedTuple):
    """An image and the size to resize it to."""

    pixels: Tensor
    """uint8 [H, W, 3]"""
    height: int
    width: int

    def __str__(self) -> str:
        return f"{tuple(self.pixels.shape)} to {self.height}x{self.width}"


def cases(count: int, longest: int, seed: int = 0) -> Iterator[Case]:
    """Yield images of noise or of black and white, and sizes: up, down, one pixel, unchanged."""
    rng, noise = Random(seed), np.random.default_rng(seed)

    def side() -> int:
        return rng.choice((1, rng.randint(1, 8), rng.randint(1, longest), rng.randint(1, longest)))

    for _ in range(count):
        height, width = side(), side()
        new_height, new_width = (rng.choice((old, side(), side())) for old in (height, width))
        pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if rng.random() < 0.3:  # sums go below 0 and beyond 255
            pixels = (pixels > 127).astype(np.uint8) * np.uint8(255)
        yield Case(torch.from_numpy(pixels), new_height, new_width)


def by_library(case: Case, mode: Resample, library: Library) -> Tensor:
    """Return uint8 [height, width, 3], resized by torch or by Pillow on the CPU."""
    if library == "torch":
        batch = case.pixels.permute(2, 0, 1)[None]
        return resize_on_cpu(batch, case.height, case.width, mode)[0].permute(1, 2, 0)
    image = Image.fromarray(case.pixels.numpy())
    return torch.from_numpy(np.array(image.resize((case.width, case.height), _OF_PIL[mode])))


def by_weights(case: Case, mode: Resample, library: Library) -> Tensor:
    """Return uint8 [height, width, 3], resized by matrix products with tables of weights."""
    pixels, new = case.pixels.numpy(), (case.height, case.width)
    old = pixels.shape[0], pixels.shape[1]
    for axis in axes_in_order(old, new, library):
        weights = make_weights(old[axis], new[axis], mode, library)
        first, table = weights.table.numpy()[:1].T, weights.table.numpy()[1:].T
        columns = first + np.arange(table.shape[1])
        matrix = np.zeros((new[axis], max(old[axis], int(columns.max()) + 1)))
        np.put_along_axis(matrix, columns, table, 1)
        # float64 holds these sums of integers exactly
        total = np.tensordot(matrix[:, : old[axis]], pixels.astype(np.float64), (1, axis))
        levels = (total.astype(np.int64) + (1 << (weights.shift - 1))) >> weights.shift
        pixels = np.moveaxis(levels.clip(0, 255).astype(np.uint8), 0, axis)
    return torch.from_numpy(np.ascontiguousarray(pixels))
