"""Pixels are normalised as on a GPU to the bits of the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from encoders.inputs.normalizing import fold_mean_std, normalize
from tests.support.accelerated.cases import needs_interpreter, needs_triton


@needs_triton
@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    from encoders.inputs.normalize_kernel import normalize_rows

    dice, generator = random.Random(0), torch.Generator().manual_seed(0)
    for shape, axis in (((5, 3, 16), 1), ((4, 16, 3), 2), ((2, 3, 7, 9), 1), ((0, 3, 4), 1)):
        levels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        interleaved = levels.movedim(axis, -1).contiguous().movedim(-1, axis)
        for pixels in (levels, interleaved, levels + 0.37, interleaved.flip(0)):
            mean, std = [(dice.random(), dice.random(), dice.random() + 0.01) for _ in range(2)]
            out = torch.empty(shape, dtype=dtype)
            low, scale = (one.tolist() for one in fold_mean_std(mean, std))
            normalize_rows(pixels, out, low, scale, axis)
            assert torch.equal(out, normalize(pixels, mean, std, axis, dtype)), (shape, axis)
