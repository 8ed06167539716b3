"""The smallest encoder of two input paths: whole images, and pieces that only some items have.

Both paths multiply by one shared weight. Their items differ in size, and so do their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from encoders.contract import EncoderOutput, Grid, PathInputs, VisionInputs

from .toy_encoder import WIDTH, ToyEncoder

Item = tuple[Grid, Grid | None]
"""The grid of the whole item, and that of its pieces or None."""


class PiecesPath(ToyEncoder):
    """The input path of pieces, with another budget range and other results than whole images."""

    budget_range = (2, 32)

    def forward(self, *args: object, **kwargs: object) -> EncoderOutput:
        hidden, pooled, deep, *_ = super().forward(*args, **kwargs)  # type: ignore[arg-type]
        return EncoderOutput(-hidden, -pooled, tuple(-layer for layer in deep))


class TwoPaths(nn.Module):
    """A toy encoder of two paths, whose items give the tokens of pieces, then of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.pieces = ToyEncoder(), PiecesPath()
        self.pieces.weight = self.whole.weight

    @property
    def paths(self) -> Mapping[str, ToyEncoder]:
        return {"image": self.whole, "tiles": self.pieces}

    def forward(self, inputs: VisionInputs) -> list[EncoderOutput]:
        outputs = {
            name: self.paths[name](path.pixel_values, path.grid_thw.tolist())
            for name, path in inputs.paths.items()
            if len(path.grid_thw)
        }
        return self.join(outputs, inputs)

    def join(
        self, outputs: Mapping[str, EncoderOutput], inputs: VisionInputs
    ) -> list[EncoderOutput]:
        parts = {
            name: iter(self.paths[name].split(output, inputs.paths[name].grid_thw.tolist()))
            for name, output in outputs.items()
        }
        assert inputs.tiles is not None
        joined = []
        for _, _, has_pieces in inputs.tiles:
            both = [next(parts[name]) for name in ["tiles"] * has_pieces + ["image"]]
            hidden, pooled, deep, *_ = zip(*both, strict=True)
            layers: Any = deep[0] and tuple(map(torch.cat, zip(*deep, strict=True)))  # or None
            whole: list[Any] = [None if x[0] is None else torch.cat(x) for x in (hidden, pooled)]
            joined.append(EncoderOutput(whole[0], whole[1], layers))
        return joined


def inputs_of(items: Sequence[Item], seed: int = 0) -> VisionInputs:
    """Draw random pixels for items, in the form that ``preprocess`` returns."""
    generator = torch.Generator().manual_seed(seed)

    def path(grids: Sequence[Grid | None]) -> PathInputs:
        used = [grid for grid in grids if grid is not None]
        rows = sum(t * h * w for t, h, w in used)
        grid_thw = torch.tensor(used, dtype=torch.int64).reshape(-1, 3)
        users = [number for number, grid in enumerate(grids) if grid is not None]
        pixels = torch.randn(rows, WIDTH, generator=generator)
        return PathInputs(pixels, grid_thw, tuple(users))

    pixels, grid_thw, _ = path([whole for whole, _ in items])
    tiles = [(1, 1, pieces is not None) for _, pieces in items]
    pieces = path([pieces for _, pieces in items])
    return VisionInputs(pixels, grid_thw, tiles, {"tiles": pieces})


def with_pixels(inputs: VisionInputs, pixels: Tensor) -> VisionInputs:
    return inputs._replace(pixel_values=pixels)
