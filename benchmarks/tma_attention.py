"""Attention for heads of 65 to 80 columns through tensor descriptors (Triton): a candidate.

Like the library's kernel in ``triton_attention``, it computes a head as products of 64 and 16
columns. Unlike it, tiles are copied by the tensor memory accelerator (Hopper and newer), one loop
runs over whole and ragged steps, and a kernel of its own plans the tiles, those of the longest
segments first, so that no long tile begins while other processors have run out of work.

A step reads up to ``Tile.keys - 1`` rows beyond its segment. Their scores are masked, but their
values are multiplied by 0, so NaN in them spreads: rows beyond the last offset have to be cleared,
as for flash-attn-4 (``AttentionKernel.reads_beyond``).

Shapes: T packed rows, H heads, K head size, S segments, P tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from encoders.accelerated.attention_kernels import AttentionShape
from encoders.accelerated.kernels.triton_attention import LOG2_E

MAIN, REST = 64, 16
"""The columns of both products. Those beyond the head size are zeros."""


# Triton would compile the kernel again for one segment, and for multiples of 16.
@triton.jit(do_not_specialize=["segments", "tiles"])
def _plan_kernel(offsets, plan, segments, tiles, BLOCK_M: tl.constexpr, STEP: tl.constexpr):
    mine, step = tl.program_id(0), tl.arange(0, STEP)
    begin = tl.load(offsets + mine, mask=mine < segments, other=0)
    end = tl.load(offsets + mine + 1, mask=mine < segments, other=0)
    before = 0
    for at in range(0, segments, STEP):
        other = at + step
        left = tl.load(offsets + other, mask=other < segments, other=0)
        length = tl.load(offsets + other + 1, mask=other < segments, other=0) - left
        longer = (length > end - begin) | ((length == end - begin) & (other < mine))
        before += tl.sum(tl.where(longer, tl.cdiv(length, BLOCK_M), 0), 0)
    count = tl.cdiv(end - begin, BLOCK_M)
    if mine == segments:  # the last program writes zeros for all tiles that are not used
        count = tiles - before
    for at in range(0, count, STEP):
        tile = at + step
        row = plan + (before + tile) * 4
        tl.store(row, begin + tile * BLOCK_M * (end > begin), mask=tile < count)
        tl.store(row + 1, begin + tile * 0, mask=tile < count)
        tl.store(row + 2, end + tile * 0, mask=tile < count)


@triton.jit
def _attention_kernel(
    query,
    query_rest,
    key,
    key_rest,
    value,
    value_rest,
    out,
    plan,
    out_stride,
    scale,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPECIALISED: tl.constexpr,
):
    head, row = tl.program_id(0), plan + tl.program_id(1) * 4
    first, start, end = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    shared = head // GROUP
    q = query.load([head, first, 0]).reshape(BLOCK_M, MAIN)
    q_rest = query_rest.load([head, first, MAIN]).reshape(BLOCK_M, REST)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, MAIN], tl.float32)
    result_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    for at in tl.range(start, end, BLOCK_N, num_stages=STAGES, warp_specialize=SPECIALISED):
        n = at + tl.arange(0, BLOCK_N)
        k = key.load([shared, at, 0]).reshape(BLOCK_N, MAIN)
        k_rest = key_rest.load([shared, at, MAIN]).reshape(BLOCK_N, REST)
        scores = tl.dot(q_rest, k_rest.T, tl.dot(q, k.T))
        if SPECIALISED:  # without a branch, see `Tile`
            scores = tl.where(n[None, :] < end, scores, -float("inf"))
        else:
            if at + BLOCK_N > end:
                scores = tl.where(n[None, :] < end, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(p, 1)
        highest = higher
        p = p.to(out.dtype.element_ty)
        v = value.load([shared, at, 0]).reshape(BLOCK_N, MAIN)
        v_rest = value_rest.load([shared, at, MAIN]).reshape(BLOCK_N, REST)
        result = tl.dot(p, v, result * fade[:, None])
        result_rest = tl.dot(p, v_rest, result_rest * fade[:, None])
    share = 1.0 / tl.where(total > 0, total, 1.0)[:, None]  # tiles without rows have a sum of 0
    m = first + tl.arange(0, BLOCK_M)[:, None]
    place = out + head * SIZE + m.to(tl.int64) * out_stride
    column, rest = tl.arange(0, MAIN)[None, :], MAIN + tl.arange(0, REST)[None, :]
    tl.store(place + column, (result * share).to(out.dtype.element_ty), mask=m < end)
    own = (m < end) & (rest < SIZE)
    tl.store(place + rest, (result_rest * share).to(out.dtype.element_ty), mask=own)


class Tile(NamedTuple):
    """The sizes of one attention program: query rows, keys per step, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int
    specialised: bool = False
    """Whether copies run in warps of their own. Triton 3.6 does that on Hopper with four warps, one
    loop that has all products, and neither a branch nor an early return in the kernel."""


TILES = (
    Tile(64, 64, 4, 2),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(256, 64, 16, 3),
    Tile(128, 64, 4, 3, specialised=True),
    Tile(128, 128, 4, 2, specialised=True),
    Tile(256, 64, 4, 3, specialised=True),
)
"""Tilings for which Triton 3.6 spills no register on Hopper: ``triton.compile`` says so without a
GPU, for ``GPUTarget("cuda", 90, 32)``. With 256 x 128 it spills."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape, tile: Tile
) -> Tensor:
    """Softmax attention inside each segment, scaled by ``K ** -0.5``.

    Args:
        q, k, v: [T, H, K] with 64 < K <= 80; heads may lie further than K columns apart. k and v
            may have fewer heads, each shared by as many neighbouring heads of q.
        out: [T, H, K], contiguous; rows at or beyond ``offsets[-1]`` are left alone.
        offsets: int32 [S+1].
        shape: the shape of the attention.
        tile: the tiling.

    Returns:
        ``out``.
    """
    rows, heads, size = q.shape
    if not (rows and shape.segments):
        return out
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
        SPECIALISED=tile.specialised,
        num_warps=tile.warps,
    )
    return out


def make_plan(offsets: Tensor, rows: int, queries: int) -> Tensor:
    """The tiles of all segments: first row, begin and end of the segment; longest segments first.

    Args:
        offsets: int32 [S+1].
        rows: T, at least ``offsets[-1]``.
        queries: query rows per tile.

    Returns:
        int32 [P, 4] with P = T // queries + S, as many as T rows can need. Tiles that are not used
        have zeros. The fourth column means nothing.
    """
    segments = len(offsets) - 1
    plan = torch.empty(rows // queries + segments, 4, dtype=torch.int32, device=offsets.device)
    sizes = {"BLOCK_M": queries, "STEP": 128}
    _plan_kernel[(segments + 1,)](offsets, plan, segments, len(plan), **sizes, num_warps=4)
    return plan


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Rows [T, H, K] in blocks of one head; copies put zeros for columns beyond K."""
    sizes, strides = [x.shape[1], x.shape[0], x.shape[2]], [x.stride(1), x.stride(0), 1]
    return TensorDescriptor(x, sizes, strides, [1, rows, columns])
