"""Normalising of pixels in one pass over them (Triton), in the arithmetic of the CPU.

This module imports Triton, so it is imported when pixels are normalised on a GPU, and not before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import cache

from ..triton_build import keep_build_hash

keep_build_hash(cache)

_BLOCK = 2048


@triton.jit
def _normalize_kernel(
    pixels: tl.tensor,
    out: tl.tensor,
    numbers: tl.tensor,
    red: tl.tensor,
    green: tl.tensor,
    blue: tl.tensor,
    red_scale: tl.tensor,
    green_scale: tl.tensor,
    blue_scale: tl.tensor,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    channel = place // INNER % 3
    source = place
    if INTERLEAVED:
        source = place // (3 * INNER) * (3 * INNER) + place % INNER * 3 + channel
    low = tl.where(channel == 0, red, tl.where(channel == 1, green, blue))
    scale = tl.where(channel == 0, red_scale, tl.where(channel == 1, green_scale, blue_scale))
    level = tl.load(pixels + source, mask=place < numbers, other=0).to(tl.float32)
    # A plain division is approximate in Triton.
    value = tl.div_rn(level - low, scale)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=place < numbers)


def normalize_rows(
    pixels: Tensor, out: Tensor, mean: Sequence[float], std: Sequence[float], axis: int
) -> None:
    """Write (pixels - mean) / std, computed in float32, to ``out``.

    Args:
        pixels: uint8 or float32 with the three channels on ``axis``, on a CUDA device, or on the
            CPU in Triton's interpreter.
        out: shaped as ``pixels``, contiguous, float32 or a narrower dtype, on that device.
        mean: the mean of each channel, numbers of float32.
        std: the standard deviation of each channel, numbers of float32.
        axis: the axis of the channels.
    """
    numbers, is_interleaved = pixels.numel(), False
    if not pixels.is_contiguous():
        last = pixels.movedim(axis, -1)
        is_interleaved = last.is_contiguous() and axis == 1
        pixels = last if is_interleaved else pixels.contiguous()
    if numbers:
        _normalize_kernel[(triton.cdiv(numbers, _BLOCK),)](
            *(pixels, out, numbers, *mean, *std),
            INNER=math.prod(pixels.shape[1:-1] if is_interleaved else pixels.shape[axis + 1 :]),
            INTERLEAVED=is_interleaved,
            INDEX=tl.int32 if numbers < (1 << 31) - _BLOCK else tl.int64,
            BLOCK=_BLOCK,
            num_warps=4,
        )
