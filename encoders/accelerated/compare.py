"""Compares weights with their copies on the GPU, and copies again what differs (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32
"""Rows that one program compares, and copies again where one of them differs."""


@triton.jit
def _compare_kernel(table, WIDE: tl.constexpr, CHUNK: tl.constexpr):
    kind: tl.constexpr = tl.int32 if WIDE else tl.int16
    row = table + tl.program_id(0) * 5
    source = tl.load(row).to(tl.pointer_type(kind))
    copy = tl.load(row + 1).to(tl.pointer_type(kind))
    rows, columns, stride = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    at = (tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)[:, None]
    start = (at * 7919 % tl.maximum(columns // 16, 1)) * 16  # another stretch in every row
    column = start + tl.arange(0, 16)[None, :]
    inside = (at < rows) & (column < columns)
    mine = tl.load(source + at * columns + column, mask=inside, other=0)
    theirs = tl.load(copy + at * stride + column, mask=inside, other=0)
    if tl.max(tl.max((mine != theirs).to(tl.int32), 1), 0) > 0:
        for first in range(0, columns, 128):
            place = first + tl.arange(0, 128)[None, :]
            there = (at < rows) & (place < columns)
            values = tl.load(source + at * columns + place, mask=there, other=0)
            tl.store(copy + at * stride + place, values, mask=there)


def copy_differences(table: Tensor, rows: int, size: int) -> None:
    """Compare 16 entries of every row with the copy; copy the 32 rows around a difference.

    Args:
        table: int64 [pairs, 5]: addresses of source and copy, rows, columns, the copy's row stride.
        rows: the most rows of any pair.
        size: bytes of one entry, 2 or 4.
    """
    _compare_kernel[(len(table), triton.cdiv(rows, CHUNK))](
        table, WIDE=size == 4, CHUNK=CHUNK, num_warps=4
    )
