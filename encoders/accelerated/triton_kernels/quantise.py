"""Rows and weights in fp8 (e4m3), each row with a float32 scale of its own (Triton).

The largest number of a row is stored as 448, the largest of e4m3. Numbers down to 1/28,000 of it
keep four significant bits, so that a few large entries do not cost the others their precision.

Shapes: T rows, D columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import KINDS, activated

E4M3 = torch.float8_e4m3fn
STEP, SAMPLED = 8, 32
"""Every ``STEP``-th row of a weight is compared, and one program compares ``SAMPLED`` of them."""


class Rows8(NamedTuple):
    """Rows quantised to fp8 (e4m3); row t stands for ``values[t] * scales[t]``."""

    values: Tensor
    """The quantised values [T, D] in e4m3."""
    scales: Tensor
    """The factor of each row, float32 [T, 1]."""


@triton.jit
def row_scale(largest: tl.tensor) -> tl.tensor:
    """Return the scale of a row, with which its ``largest`` magnitude is stored as 448 in e4m3."""
    return tl.maximum(largest, 1e-12) / 448.0


@triton.jit
def _rows_kernel(
    x: tl.tensor,
    up: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    up_stride: tl.tensor,
    limit: tl.tensor,
    LIMITED: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    up += row * up_stride
    values += row * columns
    column = tl.arange(0, FIRST)
    no_ranges = (None, None, None)
    a = activated(x, up, column, column < columns, limit, LIMITED, GATED, KIND, no_ranges)
    a = tl.where(column < columns, a, 0.0)
    largest = tl.max(tl.abs(a), axis=0)
    if REST:
        rest_column = FIRST + tl.arange(0, REST)
        b = activated(
            x, up, rest_column, rest_column < columns, limit, LIMITED, GATED, KIND, no_ranges
        )
        b = tl.where(rest_column < columns, b, 0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(b), axis=0))
    scale = row_scale(largest)
    tl.store(scales + row, scale)
    inverse = 1.0 / scale
    tl.store(values + column, (a * inverse).to(values.dtype.element_ty), mask=column < columns)
    if REST:
        tl.store(
            values + rest_column,
            (b * inverse).to(values.dtype.element_ty),
            mask=rest_column < columns,
        )


def quantise(
    x: Tensor, kind: str | None = None, up: Tensor | None = None, *, limit: float | None = None
) -> Rows8:
    """Apply an activation, multiply by ``up`` if it is given, and quantise each row.

    A kernel reads a row in two pieces whose widths are powers of two (4,304 columns as 4,096 and
    256), which wastes less work beyond the end of the row than one piece.

    Args:
        x, up: [T, D], any row stride.
        kind: a key of ``KINDS`` in ``activations``, or None for no activation.
        limit: upper bound that ``x`` is clamped to, and bound of ``up`` on both sides; or None.
    """
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    first = 1 << (columns.bit_length() - 1)
    if rows:
        _rows_kernel[(rows,)](
            x,
            x if up is None else up,
            values,
            scales,
            columns,
            x.stride(0),
            0 if up is None else up.stride(0),
            0.0 if limit is None else limit,
            LIMITED=limit is not None,
            GATED=up is not None,
            KIND=-1 if kind is None else KINDS[kind],
            FIRST=first,
            REST=triton.next_power_of_2(columns - first) if columns > first else 0,
            num_warps=4 if columns <= 2048 else 8 if columns <= 8192 else 16,
        )
    return Rows8(values, scales)


@triton.jit
def _weights_kernel(
    table: tl.tensor,
    FORCE: tl.constexpr,
    SOURCE: tl.constexpr,
    STEP: tl.constexpr,
    SAMPLED: tl.constexpr,
) -> None:
    row = table + tl.program_id(0) * 8
    source = tl.load(row).to(tl.pointer_type(SOURCE))
    copy = tl.load(row + 1).to(tl.pointer_type(tl.float8e4nv))
    rows, columns, stride = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    row_stride, column_stride = tl.load(row + 5), tl.load(row + 6)
    scales = tl.load(row + 7).to(tl.pointer_type(tl.float32))
    begin = tl.program_id(1).to(tl.int64) * (SAMPLED * STEP)
    if begin >= rows:
        return
    differ = 1
    if not FORCE:
        sampled_row = begin + tl.arange(0, SAMPLED) * STEP
        start = (sampled_row * 7919 % tl.maximum(columns // 16, 1)) * 16
        column = start[:, None] + tl.arange(0, 16)[None, :]
        mask = (sampled_row < rows)[:, None] & (column < columns)
        source_values = tl.load(
            source + sampled_row[:, None] * row_stride + column * column_stride,
            mask=mask,
            other=0.0,
        )
        stored_scales = tl.load(scales + sampled_row, mask=sampled_row < rows, other=1.0)[:, None]
        source_bits = (
            (source_values.to(tl.float32) / stored_scales)
            .to(tl.float8e4nv)
            .to(tl.uint8, bitcast=True)
        )
        copy_values = tl.load(copy + sampled_row[:, None] * stride + column, mask=mask, other=0.0)
        copy_bits = copy_values.to(tl.uint8, bitcast=True)
        differ = tl.max(tl.max(((source_bits != copy_bits) & mask).to(tl.int32), 1), 0)
    if differ > 0:
        for part in range(STEP):
            line = begin + part * SAMPLED + tl.arange(0, SAMPLED)
            largest = tl.zeros([SAMPLED], tl.float32)
            for first in range(0, columns, 128):
                copied_column = first + tl.arange(0, 128)[None, :]
                copied_mask = (line < rows)[:, None] & (copied_column < columns)
                x = tl.load(
                    source + line[:, None] * row_stride + copied_column * column_stride,
                    mask=copied_mask,
                    other=0.0,
                )
                largest = tl.maximum(largest, tl.max(tl.abs(x.to(tl.float32)), 1))
            scale = tl.maximum(largest, 1e-12) / 448.0
            tl.store(scales + line, scale, mask=line < rows)
            for first in range(0, columns, 128):
                copied_column = first + tl.arange(0, 128)[None, :]
                copied_mask = (line < rows)[:, None] & (copied_column < columns)
                x = tl.load(
                    source + line[:, None] * row_stride + copied_column * column_stride,
                    mask=copied_mask,
                    other=0.0,
                )
                q = (x.to(tl.float32) / scale[:, None]).to(tl.float8e4nv)
                tl.store(copy + line[:, None] * stride + copied_column, q, mask=copied_mask)


def quantise_weights(table: Tensor, rows: int, dtype: torch.dtype, *, force: bool) -> None:
    """Compare 16 entries in every eighth row of weights with fp8 copies; quantise changed rows.

    Args:
        table: int64 [pairs, 8]: addresses of source and copy, rows, columns, the copy's row stride,
            the source's strides from row to row and from column to column, and the address of the
            scales of the copy.
        rows: the largest number of rows of any pair.
        dtype: dtype of the sources, bfloat16 or float16.
        force: quantise every row without comparing.
    """
    source = tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
    _weights_kernel[(len(table), triton.cdiv(rows, STEP * SAMPLED))](
        table, FORCE=force, SOURCE=source, STEP=STEP, SAMPLED=SAMPLED, num_warps=4
    )
