"""Resizing of uint8 images along one axis in integer arithmetic (Triton).

An output pixel is a sum of input pixels times integer weights, plus one half, shifted to the right
and clamped to 0..255. torch and Pillow resize uint8 images this way on the CPU, so the kernel's
pixels are theirs to the bit if the weights are.

This module imports Triton, so it is imported when an image is resized on a GPU, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import cache

from ..triton_build import keep_build_hash

keep_build_hash(cache)

KERNEL_ERRORS = (RuntimeError, OSError, AssertionError, TypeError, ValueError, triton.TritonError)
"""The exceptions that mean that the kernel cannot be compiled or run."""


class AxisJob(NamedTuple):
    """One axis of the images [N, H, W, C] of one tensor, to be resized; sizes are of numbers."""

    pixels: int
    """The address of the pixels, uint8, contiguous."""
    out: int
    """The address of the result, uint8, contiguous."""
    table: int
    """The address of the table, int32 [1 + taps, out_length]: per output row or column the number
    of the first input row or column, and the weights of that and the next ones."""
    outer: int
    """The product of the sizes before the axis: N for the height, N*H for the width."""
    in_length: int
    out_length: int
    inner: int
    """The product of the sizes after the axis: W*C for the height, C for the width."""
    taps: int
    shift: int
    """The number of bits after the point in the weights."""


@triton.jit
def _resize_kernel(
    jobs: tl.tensor,
    FIELDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    INDEX: tl.constexpr,
) -> None:
    job = jobs + tl.program_id(1) * FIELDS
    pixels = tl.load(job).to(tl.pointer_type(tl.uint8))
    out = tl.load(job + 1).to(tl.pointer_type(tl.uint8))
    table = tl.load(job + 2).to(tl.pointer_type(tl.int32))
    outer_length = tl.load(job + 3)
    in_length = tl.load(job + 4)
    out_length = tl.load(job + 5)
    inner = tl.load(job + 6)
    taps = tl.load(job + 7).to(tl.int32)
    shift = tl.load(job + 8).to(tl.int32)
    out_blocks = tl.cdiv(out_length, BLOCK_OUT)
    inner_blocks = tl.cdiv(inner, BLOCK_INNER)
    program = tl.program_id(0)
    outer = program // (out_blocks * inner_blocks)
    if outer < outer_length:  # another job of the launch may need more programs
        block = program % (out_blocks * inner_blocks)
        source, target = pixels + outer * in_length * inner, out + outer * out_length * inner
        old, new, step = in_length.to(INDEX), out_length.to(INDEX), inner.to(INDEX)
        place = ((block // inner_blocks) * BLOCK_OUT).to(INDEX) + tl.arange(0, BLOCK_OUT)
        column = ((block % inner_blocks) * BLOCK_INNER).to(INDEX) + tl.arange(0, BLOCK_INNER)
        in_range = (place < new)[:, None] & (column < step)[None, :]
        # What is outside reads the last place or column instead: masks would take longer.
        at, column = tl.minimum(place, new - 1), tl.minimum(column, step - 1)
        last = (old - 1) * step + column[None, :]
        read = tl.load(table + at)[:, None] * step + column[None, :]
        total = tl.zeros([BLOCK_OUT, BLOCK_INNER], tl.int32) + (1 << (shift - 1))
        for _tap in range(taps):
            at += new
            weight = tl.load(table + at)
            total += weight[:, None] * tl.load(source + read).to(tl.int32)
            # A window that is shorter than the longest one ends in weights of zero.
            read = tl.minimum(read + step, last)
        level = tl.minimum(tl.maximum(total >> shift, 0), 255).to(tl.uint8)
        tl.store(target + place[:, None] * step + column[None, :], level, mask=in_range)


def resize_axis(jobs: Sequence[AxisJob], axis: int, device: torch.device) -> None:
    """Resize one axis of several images in one launch.

    Args:
        jobs: at least one job. Its tensors lie on ``device``, and live until the launch has ended.
        axis: 1 for the height, 2 for the width.
        device: the device of the images.
    """
    rows = np.array(jobs, np.int64)
    _, _, _, outer, in_length, out_length, inner, _, _ = rows.T
    block_out, block_inner = (2, 256)
    if axis == 2:
        block_out, block_inner = 128, triton.next_power_of_2(int(inner.max()))
    programs = int((outer * -(-out_length // block_out) * -(-inner // block_inner)).max())
    most = int((np.maximum(in_length, out_length) * inner).max())
    table = torch.from_numpy(rows)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    _resize_kernel[(programs, len(jobs))](
        table,
        FIELDS=len(AxisJob._fields),
        BLOCK_OUT=block_out,
        BLOCK_INNER=block_inner,
        INDEX=tl.int32 if most < 1 << 30 else tl.int64,
        num_warps=2,
    )
