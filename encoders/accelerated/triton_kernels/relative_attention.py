"""Attention with learned relative positions inside square windows or whole views (Triton).

The score of a query at (y, x) for a key at (y', x') is their product times ``K ** -0.5``, plus
``query . table_h[y - y'] + query . table_w[x - x']`` (SAM). Both terms are read from the products
of every query with all rows of the tables: R numbers per query instead of one per query and key.

Query, key and value rows are read in place from the fused projection. No window is cut out: a
program reads the rows of its window where they lie. Windows at the edge reach beyond the view;
their missing rows count as zeros before the projection, so their keys and values are its biases.

Shapes: B views of h x w rows, T = B*h*w, H heads, K head size, R relative positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import HALF_DTYPES, RelativeShape
from .triton_attention import LOG2_E


@triton.jit
def _relative_kernel(
    qkv: tl.tensor,
    bias: tl.tensor,
    products: tl.tensor,
    out: tl.tensor,
    h: tl.tensor,
    w: tl.tensor,
    segment_h: tl.tensor,
    segment_w: tl.tensor,
    windows_across: tl.tensor,
    windows: tl.tensor,
    blocks: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LINES: tl.constexpr,
    EXACT: tl.constexpr,
    CUT: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    program, head = tl.program_id(0), tl.program_id(1)
    window = program // blocks % windows
    origin = (program // blocks // windows).to(tl.int64) * h  # the first line of the view
    top, left = window // windows_across * segment_h, window % windows_across * segment_w
    m = program % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    y, x = m // segment_w, m % segment_w
    query_mask = (y < segment_h) & (top + y < h) & (left + x < w)
    row = (origin + top + y) * w + left + x
    column = tl.arange(0, SIZE)
    query = qkv + head * SIZE
    key, value = query + HEADS * SIZE, query + 2 * HEADS * SIZE
    q = tl.load(
        query + row[:, None] * row_stride + column[None, :], mask=query_mask[:, None], other=0.0
    )
    n = tl.arange(0, BLOCK_W * LINES)
    step, j = n // BLOCK_W, n % BLOCK_W
    product_row = products + (head.to(tl.int64) * rows + row) * columns
    bias_w = tl.load(
        product_row[:, None] + (2 * segment_h - 1) + x[:, None] - j[None, :] + (segment_w - 1),
        mask=query_mask[:, None] & (j[None, :] < segment_w),
        other=0.0,
    )
    bias_w = bias_w.to(tl.float32) * LOG2_E
    if CUT:
        key_bias = tl.load(bias + (HEADS + head) * SIZE + column)
        value_bias = tl.load(bias + (2 * HEADS + head) * SIZE + column)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, SIZE], tl.float32)
    for first in tl.range(0, segment_h, LINES):
        line = first + step
        in_segment = (line < segment_h) & (j < segment_w)
        key_offset = ((origin + top + line) * w + left + j) * row_stride
        keys = key + key_offset[None, :] + column[:, None]
        values = value + key_offset[:, None] + column[None, :]
        if EXACT:
            k, v = tl.load(keys), tl.load(values)
        else:
            in_view = in_segment & (top + line < h) & (left + j < w)
            k = tl.load(keys, mask=in_view[None, :], other=0.0)
            v = tl.load(values, mask=in_view[:, None], other=0.0)
            if CUT:
                k = tl.where(in_view[None, :], k, key_bias[:, None])
                v = tl.where(in_view[:, None], v, value_bias[None, :])
        if LINES == 1:
            bias_h = tl.load(product_row + y - first + (segment_h - 1), mask=query_mask, other=0.0)[
                :, None
            ]
        else:
            bias_h = tl.load(
                product_row[:, None] + y[:, None] - line[None, :] + (segment_h - 1),
                mask=query_mask[:, None] & (line[None, :] < segment_h),
                other=0.0,
            )
        scores = tl.dot(q, k) * scale + (bias_w + bias_h.to(tl.float32) * LOG2_E)
        if not EXACT:
            scores = tl.where(in_segment[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(highest - higher)
        total = total * rescale + tl.sum(p, 1)
        result = tl.dot(p.to(v.dtype), v, result * rescale[:, None])
        highest = higher
    pointer = out + row[:, None] * (HEADS * SIZE) + head * SIZE + column[None, :]
    inverse_total = (1.0 / total)[:, None]
    tl.store(pointer, (result * inverse_total).to(out.dtype.element_ty), mask=query_mask[:, None])


WIDEST = 128
"""The most patches across a window or view: a program of the kernel holds a whole line of keys."""


def takes(shape: RelativeShape, dtype: torch.dtype) -> bool:
    """Return whether :func:`attend` supports the dtype, head size and window width."""
    return dtype in HALF_DTYPES and shape.size in (16, 32, 64, 128) and shape.segment[1] <= WIDEST


def attend(
    qkv: Tensor,
    bias: Tensor | None,
    tables: tuple[Tensor, Tensor],
    shape: RelativeShape,
    out: Tensor,
) -> Tensor:
    """Compute softmax attention inside each window or view, with relative positions.

    Args:
        qkv: [T, 3*H*K], contiguous: the fused projection of T = B*h*w rows.
        bias: [3*H*K], the bias of the projection, or None if it has none.
        tables: [2*height - 1, K] and [2*width - 1, K]: rows for the distances ``1 - size`` to
            ``size - 1`` between a query and a key of one window or view.
        shape: head size, height and width of a view, and side of the windows.
        out: [T, H, K], contiguous; all of it is written.

    Returns:
        ``out``.
    """
    rows, heads, size = out.shape
    segment_h, segment_w = shape.segment
    filler = tables[0].new_zeros(
        -2 * (segment_h + segment_w - 1) % 8, size
    )  # cuBLAS is fast on aligned rows
    table = torch.cat((*tables, filler))
    q = qkv.unflatten(-1, (3, heads, size))[:, 0].transpose(0, 1)
    products = torch.bmm(q, table.t().expand(heads, -1, -1))
    if bias is None and shape.cut:
        bias = qkv.new_zeros(qkv.shape[1])
    bias = None if bias is None else bias.contiguous()
    windows_across, windows_down = -(-shape.w // segment_w), -(-shape.h // segment_h)
    views = rows // (shape.h * shape.w)
    block_w = max(triton.next_power_of_2(segment_w), 16)
    block_m, lines, warps, stages = tiling(segment_h * segment_w, block_w)
    blocks = triton.cdiv(segment_h * segment_w, block_m)
    _relative_kernel[(blocks * windows_across * windows_down * views, heads)](
        qkv,
        bias,
        products,
        out,
        shape.h,
        shape.w,
        segment_h,
        segment_w,
        windows_across,
        windows_across * windows_down,
        blocks,
        rows,
        products.shape[2],
        qkv.stride(0),
        size**-0.5 * LOG2_E,
        HEADS=heads,
        SIZE=size,
        BLOCK_M=block_m,
        BLOCK_W=block_w,
        LINES=lines,
        EXACT=segment_w == block_w and segment_h % lines == 0 and not shape.cut,
        CUT=shape.cut,
        LOG2_E=LOG2_E,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def tiling(rows: int, block_w: int) -> tuple[int, int, int, int]:
    """Return query rows per program, lines of keys per step, warps and pipeline stages.

    ``rows`` is the size of a window or view, ``block_w`` its width rounded up to a power of two.
    """
    if rows < 1024:
        return 128, max(32 // block_w, 1), 4, 3
    return 64, max(64 // block_w, 1), 4, 3


def distance(shape: RelativeShape, device: torch.device, dtype: torch.dtype) -> float:
    """Return the relative L2 distance of :func:`attend` to float32 attention.

    The kernel runs on one random view of ``shape``, on ``device`` and in ``dtype``.
    """
    size, h, w = shape[:3]
    segment_h, segment_w = shape.segment
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((h * w, 3 * size), (3 * size,), (2 * segment_h - 1, size), (2 * segment_w - 1, size))
    qkv, bias, *pair = (torch.randn(x, generator=generator, device=device).to(dtype) for x in sizes)
    pair = [table * size**-0.5 for table in pair]  # scores of about one, as trained tables make
    unwritten = qkv.new_full((len(qkv), 1, size), float("nan"))
    result = attend(qkv, bias, (pair[0], pair[1]), shape, unwritten)
    padded = bias.float().repeat(-(-h // segment_h) * segment_h, -(-w // segment_w) * segment_w, 1)
    padded[:h, :w] = qkv.float().view(h, w, -1)
    parts = padded.unflatten(1, (-1, segment_w)).unflatten(0, (-1, segment_h)).transpose(1, 2)
    q, k, v = parts.flatten(2, 3).chunk(3, dim=-1)
    y, x = (torch.arange(n, device=device) for n in (segment_h, segment_w))
    table_h = pair[0].float()[y[:, None] - y + segment_h - 1]
    table_w = pair[1].float()[x[:, None] - x + segment_w - 1]
    grid = q.unflatten(2, (segment_h, segment_w))
    bias_h = torch.einsum("abyxk,yzk->abyxz", grid, table_h)[..., None]
    bias_w = torch.einsum("abyxk,xzk->abyxz", grid, table_w)[..., None, :]
    scores = (bias_h + bias_w).flatten(4).flatten(2, 3)
    truth = F.scaled_dot_product_attention(q, k, v, attn_mask=scores)
    truth = truth.unflatten(2, (segment_h, segment_w)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    truth = truth[:h, :w].flatten(0, 1)
    return float((result[:, 0].float() - truth).norm() / truth.norm())
