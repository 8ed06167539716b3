"""Convolutions of plain layers: where they are computed as matrix products, and how exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from encoders.layers.products import convolve


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [(1, 1, 0), (2, 2, 0), (3, 1, 1), (3, 2, 1)])
@torch.no_grad()
def test_a_float32_convolution_is_a_matrix_product(
    kernel: int, stride: int, pad: int, bias: bool
) -> None:
    layer = nn.Conv2d(5, 7, kernel, stride=stride, padding=pad, bias=bias)
    maps = torch.randn(2, 5, 9, 11)
    wanted = copy.deepcopy(layer).double()(maps.double())
    assert float((convolve(layer, maps) - wanted).norm() / wanted.norm()) <= 1e-6
    assert torch.equal(convolve(layer.bfloat16(), maps.bfloat16()), layer(maps.bfloat16()))


@torch.no_grad()
def test_a_large_convolution_in_half_precision_is_a_matrix_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a convolution its weights would be copied into another layout in every call."""
    layer = nn.Conv2d(16, 64, 3, stride=2, padding=1).half()
    maps = torch.randn(3, 8, 8, 16).half().permute(0, 3, 1, 2)  # channels side by side
    wanted = copy.deepcopy(layer).double()(maps.double())
    monkeypatch.delattr(nn.Conv2d, "forward")
    with pytest.raises(NotImplementedError):
        convolve(layer, maps)
    monkeypatch.setattr("encoders.layers.products.LARGE", layer.weight.numel())
    assert float((convolve(layer, maps) - wanted).norm() / wanted.norm()) <= 6e-4
