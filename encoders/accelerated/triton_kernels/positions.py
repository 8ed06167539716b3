"""Interpolated position embeddings: a weighted sum of table rows added to each row (Triton).

Shapes: T rows, D columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _positions_kernel(
    rows: tl.tensor,
    table: tl.tensor,
    index: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        entry = tl.load(index + row * TAPS + tap)
        tap_weight = tl.load(weight + row * TAPS + tap)
        values = tl.load(table + entry * columns + column, mask=mask, other=0.0)
        total += tap_weight * values.to(tl.float32)
    x = tl.load(rows + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (x + total).to(out.dtype.element_ty), mask=mask)


def add_table_rows(rows: Tensor, table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Return each row plus a weighted sum of table rows, computed in float32 and rounded once.

    Args:
        rows: [T, D], contiguous.
        table: [entries, D], contiguous.
        index: numbers of the table rows to add to each row, int64 [T, taps], contiguous.
        weight: their factors, float32 [T, taps], contiguous.
    """
    out = rows.new_empty(rows.shape)
    count, columns = rows.shape
    _positions_kernel[(count,)](
        rows,
        table,
        index,
        weight,
        out,
        columns,
        TAPS=index.shape[1],
        BLOCK=triton.next_power_of_2(columns),
        num_warps=4,
    )
    return out
