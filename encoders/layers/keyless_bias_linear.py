"""The projection of queries, keys and values whose keys have no bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeylessBiasLinear(nn.Linear):
    """The projection of queries, keys and values [Q; K; V] with a bias only of Q and V.

    Rotated keys with a bias would not be the same, so the bias of keys cannot be a parameter.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 3 * width, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(width)) for _ in "qv")

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.whole_bias())

    def whole_bias(self) -> Tensor:
        """Return the bias of all rows of the weight, [3*D], which is zero for those of keys."""
        return torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))


def bias_of(layer: nn.Linear) -> Tensor | None:
    """Return what a linear layer adds to the product with its weight; None if nothing."""
    return layer.whole_bias() if isinstance(layer, KeylessBiasLinear) else layer.bias
