"""Resizing of uint8 images along one axis in integer arithmetic (Triton).

An output pixel is a sum of input pixels times integer weights, plus one half, shifted to the right
and clamped to 0..255. torch and Pillow resize uint8 images this way on the CPU, so the kernel's
pixels are theirs to the bit if the weights are.

This module imports Triton, so it is imported when an image is resized on a GPU, and not before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_SIZES = ["in_length", "out_length", "inner", "taps", "shift"]
"""Arguments for whose values, which differ from image to image, no kernel is compiled anew."""

KERNEL_ERRORS = (RuntimeError, OSError, AssertionError, TypeError, ValueError, triton.TritonError)
"""The exceptions that mean that the kernel cannot be compiled or run."""


@triton.jit(do_not_specialize=_SIZES)
def _resize_kernel(
    pixels: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    in_length: tl.tensor,
    out_length: tl.tensor,
    inner: tl.tensor,
    taps: tl.tensor,
    shift: tl.tensor,
    BLOCK_OUT: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
) -> None:
    out_blocks = tl.cdiv(out_length, BLOCK_OUT)
    inner_blocks = tl.cdiv(inner, BLOCK_INNER)
    program = tl.program_id(0)
    outer = (program // (out_blocks * inner_blocks)).to(tl.int64)
    block = program % (out_blocks * inner_blocks)
    place = (block // inner_blocks) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = (block % inner_blocks) * BLOCK_INNER + tl.arange(0, BLOCK_INNER)
    in_range = place < out_length
    mask = in_range[:, None] & (column < inner)[None, :]
    row = table + place.to(tl.int64) * (taps + 1)
    first = tl.load(row, mask=in_range, other=0)
    total = tl.zeros([BLOCK_OUT, BLOCK_INNER], tl.int32) + (1 << (shift - 1))
    for tap in range(taps):
        weight = tl.load(row + 1 + tap, mask=in_range, other=0)
        # A window that is shorter than the longest one ends in weights of zero.
        source = outer * in_length + tl.minimum(first + tap, in_length - 1)
        level = tl.load(pixels + source[:, None] * inner + column[None, :], mask=mask, other=0)
        total += weight[:, None] * level.to(tl.int32)
    level = tl.minimum(tl.maximum(total >> shift, 0), 255).to(tl.uint8)
    target = (outer * out_length + place)[:, None] * inner + column[None, :]
    tl.store(out + target, level, mask=mask)


def resize_axis(pixels: Tensor, table: Tensor, shift: int, axis: int) -> Tensor:
    """Resize images along one axis.

    Args:
        pixels: uint8 [N, H, W, C], contiguous.
        table: int32 [size, 1 + taps]: per output row or column the number of the first input row
            or column, and the weights of that and the next ones.
        shift: the number of bits after the point in the weights.
        axis: 1 for the height, 2 for the width.

    Returns:
        uint8 like ``pixels``, with ``size`` rows or columns.
    """
    size, taps = len(table), table.shape[1] - 1
    shape = [*pixels.shape]
    outer = shape[0] if axis == 1 else shape[0] * shape[1]
    inner = shape[2] * shape[3] if axis == 1 else shape[3]
    in_length, shape[axis] = shape[axis], size
    out = pixels.new_empty(shape)
    block_out, block_inner = (4, 256) if axis == 1 else (256, triton.next_power_of_2(inner))
    programs = outer * triton.cdiv(size, block_out) * triton.cdiv(inner, block_inner)
    _resize_kernel[(programs,)](
        pixels,
        table,
        out,
        in_length,
        size,
        inner,
        taps,
        shift,
        BLOCK_OUT=block_out,
        BLOCK_INNER=block_inner,
        num_warps=4,
    )
    return out
