"""Private functions of torch, each with the reason why no public one can be used.

No other file of ``encoders`` uses such names, but ``inputs/torch_internals.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

Module = TypeVar("Module", bound=nn.Module)
_GLOBAL = torch.nn.modules.module
_KNOWN = (nn.Linear, nn.Conv2d, nn.Conv3d)
_WEIGHTS = frozenset((Tensor, nn.Parameter, FakeTensor))  # torch.export traces with FakeTensor


def is_plain(*layers: nn.Module, types: tuple[type[nn.Module], ...] = _KNOWN) -> bool:
    """Return whether calling each layer computes with its weight and bias and nothing else.

    The answer is no for a subclass, a wrapper, a ``forward`` set on the instance, a hook on the
    layer, and a weight that is a tensor subclass or no parameter. It takes 0.3 us per layer (CPU).

    Args:
        layers: layers, or modules that wrap or replace layers.
        types: the exact types of layers for which the answer may be yes.
    """
    for layer in layers:
        if (
            type(layer) not in types
            or type(layer._parameters.get("weight")) not in _WEIGHTS
            or not is_untouched(layer)
        ):
            return False
    return True


def is_untouched(module: nn.Module) -> bool:
    """Return whether a module has no hooks (own or global) and no ``forward`` on the instance.

    No public function of torch lists the hooks of a module.
    """
    return not (
        "forward" in module.__dict__
        or _GLOBAL._global_forward_hooks
        or _GLOBAL._global_forward_pre_hooks
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def share_modules(holder: nn.Module, tower: nn.Module, *, tensors: bool = False) -> None:
    """Make a module share the submodules of a tower and, with ``tensors``, its direct weights.

    The tower is not a submodule of ``holder``, so each weight is in its ``state_dict`` once, by the
    name that it has in the tower. A layer replaced in either, as peft does, is replaced in both.
    Torch has no public function for that, so the modules' private dicts are shared.

    Args:
        holder: a module without submodules; with ``tensors``, without parameters and buffers, too.
        tower: the module whose submodules ``holder`` gets.
        tensors: share the parameters and buffers that are the tower's own, not its submodules'.
    """
    holder._modules = tower._modules
    if tensors:
        holder._parameters, holder._buffers = tower._parameters, tower._buffers


def with_child(module: Module, name: str, child: nn.Module) -> Module:
    """Return a copy of a module, with the same weights and hooks, that has another child ``name``.

    ``copy.copy`` alone shares the private dict of children, so that the module itself would change.
    """
    changed = copy(module)
    changed._modules = {**module._modules, name: child}
    return changed


@contextmanager
def autograd_inside_op() -> Iterator[None]:
    """Let autograd record inside a custom op, where torch turns it off, to recompute a forward.

    No public function turns it on inside a custom op.
    """
    key = torch._C.DispatchKey.AutogradFunctionality
    was = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was written in place, as torch counts it for autograd.

    No public function shows whether weights were updated since copies of them were made.
    """
    return [tensor._version for tensor in tensors]


def any_fake(tensors: Iterable[Tensor]) -> bool:
    """Return whether any tensor is a fake one without data, as ``torch.export`` traces with.

    No public function distinguishes fake tensors from others.
    """
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def transforms_are_on() -> bool:
    """Return whether a function transform (vmap, grad) or forward-mode differentiation is running.

    Fused kernels support neither, and no public function says whether one is running.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return transformed or forward_ad._current_level >= 0


def fp8_product(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Return ``rows @ weight.T + bias``, bfloat16 [T, N], with a scale per row on both sides.

    Args:
        rows: e4m3 [T, K].
        weight: e4m3 [N, K]; N and K are multiples of 16.
        row_scales: float32 [T, 1].
        weight_scales: float32 [N, 1].
        bias: bfloat16 [N], or None.
    """
    # torch.nn.functional.scaled_mm is public, but fp8 was measured with torch._scaled_mm.
    return torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=row_scales,
        scale_b=weight_scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def gelu_tanh_product(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``gelu_tanh(rows @ weight.T + bias)``, [T, N], with bias and GELU in the product.

    Public functions launch two kernels for this: 124 us instead of 104 us at 6,272 rows (H200).
    """
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)


def attend_flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Attend with flash attention 2, which writes no rows beyond the last offset.

    The public ``varlen_attn`` also fills an unused random state in every call, one more launch.

    Args:
        q, k, v: half precision [T, H, K] on CUDA; K is a multiple of 8 and at most 256.
        cu_seqlens: int32 [S+1], the offsets of the segments.
        longest: rows of the longest segment, at least 1.

    Returns:
        [T, H, K].
    """
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, False, False
    )[0]


def attend_efficient(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Attend with memory-efficient attention, which has no public function for packed segments.

    Args:
        q, k, v: [T, H, K] on CUDA; K may be any size.
        cu_seqlens: int32 [S+1], the offsets of the segments.
        longest: rows of the longest segment, at least 1.

    Returns:
        [T, H, K]; rows beyond the last offset are not written.
    """
    pad = -q.shape[-1] % 8  # the kernel wants 16-byte rows; zeros change neither scores nor values
    scale = q.shape[-1] ** -0.5
    padded_qkv = [F.pad(x, (0, pad)) if pad else x for x in (q, k, v)]
    needs_lse = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        *(x.unsqueeze(0) for x in padded_qkv),
        None,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        0,
        needs_lse,
        scale=scale,
    )[0]
    return out.squeeze(0)[..., : q.shape[-1]]


def copies_of(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a copy of each tensor, of floating point, made by one kernel together.

    ``Tensor.clone`` launches a kernel for each; public functions of torch take no list of tensors.
    """
    return torch._foreach_mul(tensors, 1.0)  # the same bits
