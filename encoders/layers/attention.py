"""Attention over packed segments: one function for every encoder and device.

Shapes: T packed rows, S segments, H heads, K head size; ``cu_seqlens`` [S+1] are offsets.

Kernels, by device and dtype:

- CPU: ``scaled_dot_product_attention`` once per run of equal segments; exact in every dtype.
- CUDA, half precision: flash attention's variable-length kernel, offsets read on the device.
- CUDA, float32 and old GPUs: memory-efficient attention, offsets read on the device.
- CUDA, float64: a block-diagonal mask built on the device (for checks; memory grows with T
  squared).
- Segments known to be equal (tiles): dense attention, the fastest everywhere.
- Segments whose second half is causal: dense attention twice, by flash attention's rule for fewer
  queries than keys ("bottom right"); only where no such kernel runs is there a mask.

No kernel writes the rows at or beyond ``cu_seqlens[-1]`` (stale NaN there once spread into real
rows: vLLM #57136), so they are set to zero here. Under ``torch.compile`` the function is one custom
op with a fake and a backward; in eager mode autograd records the kernels themselves.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .segments import BELONGING_METADATA, padding_rows
from .torch_internals import attend_efficient, attend_flash, autograd_inside_op


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    padding: Tensor | None = None,
    *,
    segment_rows: int = 0,
    causal_half: bool = False,
) -> Tensor:
    """Compute softmax attention inside each segment, scaled by ``K ** -0.5``.

    Args:
        q, k, v: [T, H, K], any strides with a contiguous last dimension.
        cu_seqlens: int32 [S+1], non-decreasing offsets on the device of ``q``.
        max_seqlen: 0-dim integer tensor **on the CPU**, at least the longest segment.
        padding: the result of :func:`padding_rows`, computed once for all blocks; None: it is now.
        segment_rows: promise that every segment (padding too) has exactly this many rows, so that
            dense attention may be used; 0 promises nothing.
        causal_half: whether, in each segment of ``segment_rows`` rows, the first half attends to
            the first half, and a row of the second half to all rows up to itself.

    Returns:
        [T, H, K], zeros in the rows at or beyond ``cu_seqlens[-1]``.

    Raises:
        ValueError: offsets beyond T or a segment without ``segment_rows`` rows. That is checked on
            the CPU only: on a GPU the offsets would have to be copied to the host.
    """
    if torch.compiler.is_compiling():
        return _attention_node(q, k, v, cu_seqlens, max_seqlen, padding, segment_rows, causal_half)
    observe_attention(q, k, cu_seqlens, q.shape[-1] ** -0.5, causal_half)
    return _attend(q, k, v, cu_seqlens, max_seqlen, padding, segment_rows, causal_half)


def observe_attention(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, scale: float, causal_half: bool = False
) -> None:
    """Show the arguments to an active :class:`torch.overrides.TorchFunctionMode`; do nothing else.

    Queries and keys are [T, H, K] or, if ``cu_seqlens`` is None, [S, H, n, K].
    """
    if not torch.compiler.is_compiling() and has_torch_function((q, k)):
        handle_torch_function(observe_attention, (q, k), q, k, cu_seqlens, scale, causal_half)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    padding: Tensor | None,
    segment_rows: int,
    causal_half: bool,
) -> Tensor:
    if q.shape[0] == 0:
        return torch.zeros_like(q)
    if q.device.type == "cpu":
        return _attend_runs(q, k, v, cu_seqlens.tolist(), segment_rows, causal_half)
    if segment_rows:
        out = _attend_dense(q, k, v, q.shape[0] // segment_rows, causal_half)
    elif q.device.type != "cuda" or q.dtype == torch.float64:
        out = _attend_masked(q, k, v, cu_seqlens)
    elif _flash_takes(q):
        out = attend_flash(q, k, v, cu_seqlens, max(int(max_seqlen), 1))
    else:
        out = attend_efficient(q, k, v, cu_seqlens, max(int(max_seqlen), 1))
    padding = padding_rows(cu_seqlens, q.shape[0]) if padding is None else padding
    return out.masked_fill(padding, 0.0) if out.requires_grad else out.masked_fill_(padding, 0.0)


def _attend_runs(
    q: Tensor, k: Tensor, v: Tensor, offsets: list[int], segment_rows: int, causal_half: bool
) -> Tensor:
    """Attend on the CPU with one dense call per run of equally long segments, for speed."""
    lengths = [end - start for start, end in pairwise(offsets) if end > start]
    _check_lengths(lengths, q.shape[0], segment_rows)
    parts, start = [], 0
    for length, equal in groupby(lengths):
        count = len(list(equal))
        rows = slice(start, start + count * length)
        parts.append(_attend_dense(q[rows], k[rows], v[rows], count, causal_half))
        start += count * length
    if start < q.shape[0]:
        parts.append(q.new_zeros(q.shape[0] - start, *q.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_lengths(lengths: list[int], rows: int, segment_rows: int) -> None:
    if sum(lengths) > rows:
        raise ValueError(
            f"these pixels make {rows} rows, and cu_seqlens end at {sum(lengths)}: "
            f"{BELONGING_METADATA}"
        )
    wrong_length = next((n for n in lengths if n != segment_rows), 0) if segment_rows else 0
    if wrong_length:
        raise ValueError(
            f"cu_seqlens have a segment of {wrong_length} rows, and these pixels make segments "
            f"of {segment_rows}: {BELONGING_METADATA}"
        )


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, segments: int, causal_half: bool) -> Tensor:
    q, k, v = (rearrange(x, "(s n) h k -> s h n k", s=segments) for x in (q, k, v))
    if not causal_half:
        return rearrange(F.scaled_dot_product_attention(q, k, v), "s h n k -> (s n) h k")
    from torch.nn.attention.bias import causal_lower_right  # imports Triton

    half = q.shape[2] // 2
    first_q, first_k, first_v = (x[:, :, :half] for x in (q, k, v))
    first = F.scaled_dot_product_attention(first_q, first_k, first_v)
    rule = causal_lower_right(half, 2 * half)
    second = F.scaled_dot_product_attention(q[:, :, half:], k, v, attn_mask=rule)
    return rearrange(torch.cat((first, second), dim=2), "s h n k -> (s n) h k")


def _flash_takes(q: Tensor) -> bool:
    """Return whether flash attention 2 takes ``q``: Ampere, half precision, head size 8n <= 256."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return half and fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    rows = torch.arange(q.shape[0], device=q.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
    mask = segment[:, None] == segment[None, :]  # rows of padding form one more segment
    padding = padding_rows(cu_seqlens, q.shape[0])  # NaN in padding would survive an added mask
    q, k, v = (x.masked_fill(padding, 0.0).transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


@torch.library.custom_op("vitgraph::segment_attention", mutates_args=())
def _attention_node(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    padding: Tensor | None,
    segment_rows: int,
    causal_half: bool = False,
) -> Tensor:
    options = segment_rows, causal_half
    return _attend(q, k, v, cu_seqlens, max_seqlen, padding, *options).contiguous()


@_attention_node.register_fake
def _(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("vitgraph::segment_attention_backward", mutates_args=())
def _attention_node_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    padding: Tensor | None,
    segment_rows: int,
    causal_half: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by running the forward again: no kernel state is saved."""
    with torch.enable_grad(), autograd_inside_op():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        options = segment_rows, causal_half
        out = _attend(leaves[0], leaves[1], leaves[2], cu_seqlens, max_seqlen, padding, *options)
        grads = torch.autograd.grad(out, leaves, grad)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


@_attention_node_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Saved(Protocol):
    """The type of the object in which torch keeps tensors and numbers for a backward."""

    options: tuple[int, bool]
    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


_Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, int, bool]


def _save_inputs(ctx: _Saved, inputs: _Inputs, output: Tensor) -> None:
    *tensors, segment_rows, causal_half = inputs
    ctx.options = segment_rows, causal_half
    ctx.save_for_backward(*tensors)


def _backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = _attention_node_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *grads, None, None, None, None, None


_attention_node.register_autograd(_backward, setup_context=_save_inputs)
