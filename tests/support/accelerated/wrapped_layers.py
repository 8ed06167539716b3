"""Towers whose layers are wrapped or hold other weights, and the distance of their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from tests.oracles import BY_NAME, build_encoder, distances, draw_pixels, grids_for

PATCHED = (nn.Linear, nn.Conv2d, nn.Conv3d)


def fresh(name: str, dtype: torch.dtype = torch.float64) -> VisionEncoder:
    """Build a three-block tower that a test may change."""
    return build_encoder(BY_NAME[name], BY_NAME[name].tiny, dtype)


def run(encoder: VisionEncoder, name: str) -> EncoderOutput:
    """Return an encoder's output for random pixels, with gradients if its weights require them."""
    grids = grids_for(name)
    return encoder(draw_pixels(encoder, grids), grids)


def worst(ours: EncoderOutput, theirs: EncoderOutput) -> float:
    """Return the largest relative L2 distance of any field of two outputs."""
    with torch.no_grad():
        return max(distances(ours, theirs).values())


def replace_layers(encoder: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Replace every linear layer and convolution of an encoder by ``wrap(layer)``."""
    for parent in list(encoder.modules()):
        for key, layer in list(parent.named_children()):
            if type(layer) in PATCHED:
                setattr(parent, key, wrap(layer))


class Lora(nn.Module):
    """A linear layer with LoRA as peft wraps it: ``weight`` is the base layer's weight."""

    def __init__(self, base: Any, up: float) -> None:
        super().__init__()
        self.base = base
        out, columns = base.weight.shape[0], base.weight[0].numel()
        # No constant: the rows of a layer norm sum to nearly nothing, and so would its products.
        down = torch.linspace(0.0, 1.0 / columns, columns, dtype=base.weight.dtype)
        self.down = nn.Parameter(down[None])
        self.up = nn.Parameter(torch.full((out, 1), up, dtype=base.weight.dtype))

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.base.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.base, nn.Linear):
            return self.base(x) + F.linear(F.linear(x, self.down), self.up)
        convolve = F.conv2d if isinstance(self.base, nn.Conv2d) else F.conv3d
        down = self.down.view(1, *self.base.weight.shape[1:])
        inner = convolve(x, down, None, self.base.stride, self.base.padding)
        return self.base(x) + inner * self.up.view(-1, *[1] * (x.ndim - 2))


class Halved(Tensor):
    """A weight tensor that is stored halved and doubled when read, as scaled quantised weights
    are.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        calls = {F.linear, F.conv2d, F.conv3d, torch.conv2d, torch.conv3d}

        def read(x: Any) -> Any:
            plain = x.as_subclass(Tensor) if isinstance(x, Halved) else x
            return 2 * plain if isinstance(x, Halved) and function in calls else plain

        return function(*tree_map(read, args), **tree_map(read, kwargs or {}))
