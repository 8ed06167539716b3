"""Linear layers that clamp their input and their output.

Source: ``Gemma4ClippableLinear`` of transformers 5.23.0.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Range: TypeAlias = tuple[Tensor, Tensor]
"""The smallest and the largest value that clamping lets through, each a 0-dim tensor."""


class Bounds(nn.Module):
    """The bounds of the input and of the output of a linear layer, 0-dim buffers.

    They are infinite, which clamps nothing, until a checkpoint is loaded.
    """

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("input_min", "output_min"):
            self.register_buffer(name, torch.tensor(-torch.inf))
        for name in ("input_max", "output_max"):
            self.register_buffer(name, torch.tensor(torch.inf))

    @property
    def input(self) -> Range:
        """The bounds (minimum, maximum) of the input of a linear layer, 0-dim tensors."""
        return self.input_min, self.input_max

    @property
    def output(self) -> Range:
        """The bounds (minimum, maximum) of the output of a linear layer, 0-dim tensors."""
        return self.output_min, self.output_max

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.clamp(*self.input), weight).clamp(*self.output)


class BoundedLinear(nn.Linear):
    """Several linear layers with one input and a joint weight; each clamps its input and output.

    Args:
        columns: width of the input.
        rows: width of the output of all layers together.
        parts: number of layers, which divide ``rows`` equally.
    """

    def __init__(self, columns: int, rows: int, parts: int = 1) -> None:
        super().__init__(columns, rows, bias=False)
        self.bounds = nn.ModuleList(Bounds() for _ in range(parts))

    @property
    def inputs(self) -> list[Range]:
        """The bounds (minimum, maximum) to which each of the joined layers clamps its input."""
        return [part.input for part in self.bounds if isinstance(part, Bounds)]

    @property
    def outputs(self) -> list[Range]:
        """The bounds (minimum, maximum) to which each of the joined layers clamps its output."""
        return [part.output for part in self.bounds if isinstance(part, Bounds)]

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weight.chunk(len(self.bounds))
        parts = [bounds(x, weight) for bounds, weight in zip(self.bounds, weights, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def make_linear(columns: int, rows: int, parts: int = 1, *, bounded: bool) -> nn.Linear:
    """Make a linear layer without bias; if ``bounded``, ``parts`` joined ones that clamp values."""
    if bounded:
        return BoundedLinear(columns, rows, parts)
    return nn.Linear(columns, rows, bias=False)
