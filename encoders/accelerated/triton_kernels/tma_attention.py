"""Attention over packed segments for heads of 65 to 80 columns, on Hopper and newer (Triton).

As in ``triton_attention``, a head is computed as products of 64 and 16 columns, the last of which
may be zeros. Here the tensor memory accelerator copies the tiles of queries, keys and values, and a
small kernel lists the tiles beforehand, those of the longest segments first, so that no long tile
begins when other processors have run out of work. It is slower than ``triton_attention`` for
windows of up to 64 rows.

A step reads up to ``Tile.keys - 1`` rows beyond its segment. Their scores are masked, but their
values are multiplied by 0, so NaN in them spreads: rows beyond the last offset have to be cleared
(``AttentionKernel.reads_beyond``).

Measured on an H200 beside ``triton_attention``: 1.11 to 1.28 times as fast for heads of 72 columns,
1.24 to 1.33 for heads of 80.

Shapes: T packed rows, H heads, K head size, S segments, Q tiles of queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .triton_attention import LOG2_E

MAIN, REST = 64, 16
"""The columns of a head in the two products; those beyond the head size are zeros."""


# Without this, Triton would compile again if one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["segments", "tiles"])
def _plan_kernel(
    offsets: tl.tensor,
    plan: tl.tensor,
    segments: tl.tensor,
    tiles: tl.tensor,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    own_segment, step = tl.program_id(0), tl.arange(0, STEP)
    begin = tl.load(offsets + own_segment, mask=own_segment < segments, other=0)
    end = tl.load(offsets + own_segment + 1, mask=own_segment < segments, other=0)
    first_tile = 0
    for chunk in range(0, segments, STEP):
        other_segment = chunk + step
        other_begin = tl.load(offsets + other_segment, mask=other_segment < segments, other=0)
        length = (
            tl.load(offsets + other_segment + 1, mask=other_segment < segments, other=0)
            - other_begin
        )
        longer = (length > end - begin) | ((length == end - begin) & (other_segment < own_segment))
        first_tile += tl.sum(tl.where(longer, tl.cdiv(length, BLOCK_M), 0), 0)
    count = tl.cdiv(end - begin, BLOCK_M)
    if own_segment == segments:  # the last program writes zeros for all tiles that are not used
        count = tiles - first_tile
    for chunk in range(0, count, STEP):
        tile = chunk + step
        row = plan + (first_tile + tile) * 4
        tl.store(row, begin + tile * BLOCK_M * (end > begin), mask=tile < count)
        tl.store(row + 1, begin + tile * 0, mask=tile < count)
        tl.store(row + 2, end + tile * 0, mask=tile < count)


@triton.jit
def _attention_kernel(
    query: tl.tensor_descriptor,
    query_rest: tl.tensor_descriptor,
    key: tl.tensor_descriptor,
    key_rest: tl.tensor_descriptor,
    value: tl.tensor_descriptor,
    value_rest: tl.tensor_descriptor,
    out: tl.tensor,
    plan: tl.tensor,
    out_stride: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    head, row = tl.program_id(0), plan + tl.program_id(1) * 4
    first, start, end = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    shared = head // GROUP
    q = query.load([head, first, 0]).reshape(BLOCK_M, MAIN)
    q_rest = query_rest.load([head, first, MAIN]).reshape(BLOCK_M, REST)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, MAIN], tl.float32)
    result_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    for key_row in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        n = key_row + tl.arange(0, BLOCK_N)
        k = key.load([shared, key_row, 0]).reshape(BLOCK_N, MAIN)
        k_rest = key_rest.load([shared, key_row, MAIN]).reshape(BLOCK_N, REST)
        scores = tl.dot(q_rest, k_rest.T, tl.dot(q, k.T))
        if key_row + BLOCK_N > end:
            scores = tl.where(n[None, :] < end, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - higher[:, None])
        rescale = tl.exp2(highest - higher)
        total = total * rescale + tl.sum(p, 1)
        highest = higher
        p = p.to(out.dtype.element_ty)
        v = value.load([shared, key_row, 0]).reshape(BLOCK_N, MAIN)
        v_rest = value_rest.load([shared, key_row, MAIN]).reshape(BLOCK_N, REST)
        result = tl.dot(p, v, result * rescale[:, None])
        result_rest = tl.dot(p, v_rest, result_rest * rescale[:, None])
    inverse_total = (
        1.0 / tl.where(total > 0, total, 1.0)[:, None]
    )  # tiles without rows have a sum of 0
    m = first + tl.arange(0, BLOCK_M)[:, None]
    pointer = out + head * SIZE + m.to(tl.int64) * out_stride
    column, rest_column = tl.arange(0, MAIN)[None, :], MAIN + tl.arange(0, REST)[None, :]
    tl.store(pointer + column, (result * inverse_total).to(out.dtype.element_ty), mask=m < end)
    rest_mask = (m < end) & (rest_column < SIZE)
    tl.store(
        pointer + rest_column,
        (result_rest * inverse_total).to(out.dtype.element_ty),
        mask=rest_mask,
    )


class Tile(NamedTuple):
    """The sizes of one attention program: query rows, keys per step, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile_for(size: int) -> Tile:
    """Return the tiling for a head size, by measurement on an H200.

    Every head of 80 columns begins at a multiple of 32 bytes, a sector of memory, so that small
    tiles are copied fast enough; every second head of 72 columns begins inside a sector.
    """
    return Tile(64, 64, 4, 2) if size == MAIN + REST else Tile(128, 64, 8, 3)


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, tile: Tile) -> None:
    """Compute softmax attention inside each segment, scaled by ``K ** -0.5``.

    Args:
        q, k, v: [T, H, K] with 64 < K <= 80 and K a multiple of 8; the rows of a head are
            contiguous. k and v may have fewer heads, each shared by as many neighbouring heads
            of q.
        out: [T, H, K], contiguous; rows at or beyond ``offsets[-1]`` are left alone.
        offsets: cumulative segment lengths, int32 [S+1].
        tile: the tiling.
    """
    rows, heads, size = q.shape
    if not rows or len(offsets) == 1:
        return
    plan = make_plan(offsets, rows, tile.queries)
    blocks = [
        describe(x, step, columns)
        for x, step in ((q, tile.queries), (k, tile.keys), (v, tile.keys))
        for columns in (MAIN, REST)
    ]
    _attention_kernel[(heads, len(plan))](
        *blocks,
        out,
        plan,
        out.stride(0),
        size**-0.5 * LOG2_E,
        SIZE=size,
        GROUP=heads // k.shape[1],
        MAIN=MAIN,
        REST=REST,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def make_plan(offsets: Tensor, rows: int, queries: int) -> Tensor:
    """Return the tiles of all segments: first row, begin and end of the segment, longest first.

    Args:
        offsets: cumulative segment lengths, int32 [S+1].
        rows: T, at least ``offsets[-1]``.
        queries: query rows per tile.

    Returns:
        int32 [Q, 4] with Q = T // queries + S, as many as T rows can need. Tiles that are not used
        have zeros. The fourth column is unused.
    """
    segments = len(offsets) - 1
    plan = torch.empty(rows // queries + segments, 4, dtype=torch.int32, device=offsets.device)
    sizes = {"BLOCK_M": queries, "STEP": 128}
    _plan_kernel[(segments + 1,)](offsets, plan, segments, len(plan), **sizes, num_warps=4)
    return plan


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the descriptor by which the tensor memory accelerator copies blocks of one head.

    Args:
        x: queries, keys or values [T, H, K], the K columns of a head contiguous.
        rows: rows per block.
        columns: columns per block; those beyond K are copied as zeros.
    """
    sizes, strides = [x.shape[1], x.shape[0], x.shape[2]], [x.stride(1), x.stride(0), 1]
    return TensorDescriptor(x, sizes, strides, [1, rows, columns])
