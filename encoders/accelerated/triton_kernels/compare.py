"""Compares weights with derived copies on the GPU and updates copies that differ (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

STEP, SAMPLED = 8, 32
"""Every ``STEP``-th row is compared, and one program compares ``SAMPLED`` of these rows."""


@triton.jit
def _compare_kernel(
    table: tl.tensor, WIDE: tl.constexpr, STEP: tl.constexpr, SAMPLED: tl.constexpr
) -> None:
    kind: tl.constexpr = tl.int32 if WIDE else tl.int16
    row = table + tl.program_id(0) * 8
    source = tl.load(row).to(tl.pointer_type(kind))
    copy = tl.load(row + 1).to(tl.pointer_type(kind))
    rows, columns, stride = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    row_stride, column_stride = tl.load(row + 5), tl.load(row + 6)
    begin = tl.program_id(1).to(tl.int64) * (SAMPLED * STEP)
    if begin >= rows:
        return
    sampled_row = (begin + tl.arange(0, SAMPLED) * STEP)[:, None]
    # Rows compare different groups of 16 columns, so that few rows cover all columns.
    start = (sampled_row * 7919 % tl.maximum(columns // 16, 1)) * 16
    column = start + tl.arange(0, 16)[None, :]
    mask = (sampled_row < rows) & (column < columns)
    source_values = tl.load(
        source + sampled_row * row_stride + column * column_stride, mask=mask, other=0
    )
    copy_values = tl.load(copy + sampled_row * stride + column, mask=mask, other=0)
    if tl.max(tl.max((source_values != copy_values).to(tl.int32), 1), 0) > 0:
        for part in range(STEP):
            line = (begin + part * SAMPLED + tl.arange(0, SAMPLED))[:, None]
            for first in range(0, columns, 128):
                copied_column = first + tl.arange(0, 128)[None, :]
                copied_mask = (line < rows) & (copied_column < columns)
                values = tl.load(
                    source + line * row_stride + copied_column * column_stride,
                    mask=copied_mask,
                    other=0,
                )
                tl.store(copy + line * stride + copied_column, values, mask=copied_mask)


def copy_differences(table: Tensor, rows: int, size: int) -> None:
    """Compare 16 entries in every eighth row of weights with copies; copy 256 rows at a difference.

    Args:
        table: int64 [pairs, 8]: addresses of source and copy, rows, columns, the copy's row stride,
            the source's strides from row to row and from column to column, and 0.
        rows: the largest number of rows of any pair.
        size: bytes of one entry, 2 or 4.
    """
    _compare_kernel[(len(table), triton.cdiv(rows, STEP * SAMPLED))](
        table, WIDE=size == 4, STEP=STEP, SAMPLED=SAMPLED, num_warps=4
    )
