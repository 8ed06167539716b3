"""Functions of torch that are not public, each with the reason why a public one does not serve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was written in place, as torch counts it for autograd.

    No public function tells whether weights were updated since copies of them were made.
    """
    return [tensor._version for tensor in tensors]


def transforms_are_on() -> bool:
    """Return whether a function transform (vmap, grad) or forward-mode differentiation is running.

    Fused kernels know neither, and no public function says whether one is running.
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
    # torch.nn.functional.scaled_mm is public; the speed of fp8 was measured with this one.
    out: Tensor = torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=row_scales,
        scale_b=weight_scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out


def gelu_tanh_product(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``gelu_tanh(rows @ weight.T + bias)``, [T, N], with bias and GELU in the product.

    Public functions launch two kernels for this: 124 us instead of 104 us at 6,272 rows.
    """
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
