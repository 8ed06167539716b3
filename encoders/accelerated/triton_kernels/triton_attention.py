"""Attention over packed segments for head sizes that are not a power of two (Triton).

Query, key and value rows are read in place from the fused projection. A head of 72 is computed as
products of 64 and 16 columns (the last eight are zeros) where flash-2 computes 96.
Rows beyond a segment's end are never read, so that padding cannot leak; rows at or beyond the
last offset are not written.

Shapes: T packed rows, H heads, K head size, S segments.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _step(
    q: tl.tensor,
    q_rest: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    rest_column: tl.tensor,
    scale: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
    result_rest: tl.tensor,
    REST: tl.constexpr,
    RAGGED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    row = n
    if RAGGED:
        # Rows beyond the end read the segment's last row, and are masked out below.
        row = tl.minimum(n, end - 1)
    keys, values = key + row[None, :] * stride, value + row[:, None] * stride
    scores = tl.dot(q, tl.load(keys + column[:, None]))
    if REST:
        scores = tl.dot(q_rest, tl.load(keys + rest_column[:, None]), scores)
    if RAGGED:
        scores = tl.where(n[None, :] < end, scores, -float("inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - higher[:, None])
    rescale = tl.exp2(highest - higher)
    total = total * rescale + tl.sum(p, 1)
    p = p.to(value.dtype.element_ty)
    result = tl.dot(p, tl.load(values + column[None, :]), result * rescale[:, None])
    if REST:
        result_rest = tl.dot(
            p, tl.load(values + rest_column[None, :]), result_rest * rescale[:, None]
        )
    return higher, total, result, result_rest


# Without this, Triton would compile again if `segments` is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["segments"])
def _attention_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    offsets: tl.tensor,
    segments: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    head, tile, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if SEARCH:  # `tile` counts through all segments, see `attend`
        number = tl.arange(0, SEARCH)
        begin = tl.load(offsets + number, mask=number < segments, other=2147483647)
        segment = tl.sum((begin // BLOCK_M + number <= tile).to(tl.int32), 0) - 1
        tile -= tl.load(offsets + segment) // BLOCK_M + segment
    start = tl.load(offsets + segment)
    end = tl.load(offsets + segment + 1)
    first = start + tile * BLOCK_M
    if first >= end:
        return
    stride = row_stride.to(tl.int64)
    m = first + tl.arange(0, BLOCK_M)
    column = tl.arange(0, MAIN)
    # The last REST columns may overlap the main columns.
    rest_column = SIZE - REST + tl.arange(0, REST if REST else 16)
    query += head * SIZE
    key += head // GROUP * SIZE
    value += head // GROUP * SIZE
    query_mask = m[:, None] < end
    q = tl.load(query + m[:, None] * stride + column[None, :], mask=query_mask, other=0.0)
    q_rest = q
    if REST:
        rest_mask = query_mask & (rest_column[None, :] >= MAIN)
        q_rest = tl.load(
            query + m[:, None] * stride + rest_column[None, :], mask=rest_mask, other=0.0
        )
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, MAIN], tl.float32)
    result_rest = tl.zeros([BLOCK_M, REST if REST else 16], tl.float32)
    whole_tiles_end = start + (end - start) // BLOCK_N * BLOCK_N
    for key_row in tl.range(start, whole_tiles_end, BLOCK_N):
        n = key_row + tl.arange(0, BLOCK_N)
        highest, total, result, result_rest = _step(
            q,
            q_rest,
            key,
            value,
            n,
            end,
            stride,
            column,
            rest_column,
            scale,
            highest,
            total,
            result,
            result_rest,
            REST,
            False,
        )
    if whole_tiles_end < end:
        n = whole_tiles_end + tl.arange(0, BLOCK_N)
        highest, total, result, result_rest = _step(
            q,
            q_rest,
            key,
            value,
            n,
            end,
            stride,
            column,
            rest_column,
            scale,
            highest,
            total,
            result,
            result_rest,
            REST,
            True,
        )
    inverse_total = 1.0 / total
    pointer = out + head * SIZE + m[:, None].to(tl.int64) * out_stride
    tl.store(
        pointer + column[None, :],
        (result * inverse_total[:, None]).to(out.dtype.element_ty),
        mask=query_mask,
    )
    if REST:
        tl.store(
            pointer + rest_column[None, :],
            (result_rest * inverse_total[:, None]).to(out.dtype.element_ty),
            mask=query_mask & (rest_column[None, :] >= MAIN),
        )


class Tile(NamedTuple):
    """The sizes of one attention program: query rows, keys per step, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile_for(size: int, longest: int) -> Tile:
    """Return the tiling for a head size and a longest segment, by measurement on an H200.

    Head sizes that are not a power of two take key steps of 32 rows: with 64 and the narrow second
    product, Triton 3.6 makes code that is wrong (errors of 7 % and more) or reads out of bounds.
    """
    keys = 64 if size & (size - 1) == 0 else 32
    return Tile(128, keys, 8, 3) if longest >= LONG else Tile(64, keys, 4, 3)


LONG = 2048
"""Segments of at least this many rows are faster with 128 query rows per program."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    offsets: Tensor,
    longest: int,
    tile: Tile,
    searched: int,
) -> None:
    """Compute softmax attention inside each segment, scaled by ``K ** -0.5``.

    A CUDA graph is captured for many long segments, most of which are empty in a call. With a
    program for every possible tile, programs without rows would take 5 % of a tower's time. So
    where a segment may have several tiles, there are T // queries + S programs per head, and each
    program searches for its segment. The programs of segment s begin at ``offsets[s] // queries +
    s``, which leaves room for all of its tiles. At most one program per segment then has no rows,
    and the programs beyond the last segment come last, so that programs with rows are spread evenly
    over the GPU.

    Args:
        q, k, v: [T, H, K] of one row stride, heads contiguous; k and v may have fewer heads, each
            shared by as many neighbouring heads of q.
        out: [T, H, K], contiguous; rows at or beyond ``offsets[-1]`` are left alone.
        offsets: cumulative segment lengths, int32 [S+1].
        longest: an upper bound of the longest segment, in rows.
        tile: the tiling.
        searched: a power of two, the most segments among which programs search for their own.
    """
    size = q.shape[2]
    main = 1 << (size.bit_length() - 1)
    rest = max(triton.next_power_of_2(size - main), 16) if size > main else 0
    heads, segments = q.shape[1], len(offsets) - 1
    tiles, search = triton.cdiv(longest, tile.queries), 0
    grid = (heads, tiles, segments)
    if tiles > 1 and segments <= searched:
        grid, search = (heads, len(q) // tile.queries + segments, 1), searched
    if longest and segments:
        _attention_kernel[grid](
            q,
            k,
            v,
            out,
            offsets,
            segments,
            q.stride(0),
            out.stride(0),
            size**-0.5 * LOG2_E,
            SIZE=size,
            GROUP=q.shape[1] // k.shape[1],
            MAIN=main,
            REST=rest,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            SEARCH=search,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


LOG2_E = 1.4426950408889634
"""log2(e): the kernel computes powers of two instead of powers of e."""
