"""The base class of encoders whose one tower takes whole images and their tiles, as two paths.

Shapes: P patches of all paths of an item, N tokens of all paths of an item, D tower width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import Grid, Output, Preprocessor, VisionInputs, output_like
from .paths_encoder import PathsEncoder, tilings_of
from .tile_encoder import TileEncoder

LARGEST_BATCH = {"image": 8, "tiles": 36}
"""Views of the largest default graph. One whole image of Step3-VL is 10 TFLOP of work: 2,704
patches through 1.8 billion parameters. Only a long and narrow item has more than 36 tiles."""


class TilesThenImage(PathsEncoder):
    """An encoder of whole images and their tiles by one tower: an item's tiles come first.

    The path "image" has one entry per item, of one tile that is the whole image. The path "tiles"
    has one entry per item that has tiles, row by row.

    Args:
        tower: has all parameters and modules; its config has ``image_size`` and ``tile_size``, the
            sides of the whole image and of a tile in pixels.
        preprocessor: makes the inputs of both paths; None for that of the family.
    """

    def __init__(self, tower: TileEncoder, preprocessor: Preprocessor | None) -> None:
        super().__init__()
        self.config, self._preprocessor = tower.config, preprocessor
        self._parameters, self._buffers = tower._parameters, tower._buffers
        self._modules = tower._modules  # each of them stands once in the state_dict
        self.paths = {
            "image": tower.at(self.config.image_size, LARGEST_BATCH["image"]),
            "tiles": tower.at(self.config.tile_size, LARGEST_BATCH["tiles"]),
        }

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Return one output per item: the rows of its tiles, then those of the whole image.

        Args:
            outputs: by the names of ``paths``; "tiles" is left out if no item has tiles.
            inputs: what ``preprocess`` returned.

        Returns:
            Per item ``last_hidden_state`` [P, D], the rows of patches alone, and ``pooler_output``
            [N, out].

        Raises:
            ValueError: entries that cannot be assigned to items.
        """
        tilings_of(inputs)
        joined = []
        for parts in self.split_paths(outputs, inputs):
            ordered = [parts[name] for name in ("tiles", "image") if name in parts]
            hidden = [x.last_hidden_state for x in ordered if x.last_hidden_state is not None]
            first = self.paths["image"].rows_before
            pooled = [x.pooler_output for x in ordered if x.pooler_output is not None]
            joined.append(
                output_like(
                    ordered[0],
                    torch.cat([x[:, first:].flatten(0, 1) for x in hidden]) if hidden else None,
                    torch.cat(pooled) if pooled else None,
                    ordered[0].deepstack_features,
                )
            )
        return joined

    def _check_inputs(self, inputs: VisionInputs) -> None:
        super()._check_inputs(inputs)
        tilings_of(inputs)

    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Maps "image" [1, h, w, D] and, of items with tiles, "tiles" [1, rows*h, columns*w, D]."""
        entries = self._entries(inputs)
        patches, tokens = (sum(entry.sizes[n] for entry in entries) for n in (0, 1))
        if len(features) not in (patches, tokens):
            raise ValueError(
                f"features have {len(features)} rows: these inputs make {patches} patches or "
                f"{tokens} tokens"
            )
        kind = 0 if len(features) == patches else 1
        maps: list[dict[str, Tensor]] = [{} for _ in inputs.grid_thw]
        for rows, entry in zip(
            features.split([p.sizes[kind] for p in entries]), entries, strict=True
        ):
            part = rows.unflatten(0, (entry.grid[0], -1)) if kind == 0 else rows
            path = self.paths[entry.name]
            (maps[entry.item][entry.name],) = path.feature_maps(part, [entry.grid], [entry.layout])
        return maps

    def _entries(self, inputs: VisionInputs) -> list[Entry]:
        """The entries of all items, in the order in which ``join`` puts their rows."""
        tilings = tilings_of(inputs)
        grids = {
            name: dict(zip(path.items, path.grid_thw.tolist(), strict=True))
            for name, path in inputs.paths.items()
        }
        entries = []
        for item, (columns, rows) in enumerate(tilings):
            for name, layout in (("tiles", (columns, rows, False)), ("image", (1, 1, False))):
                if item in grids[name]:
                    t, h, w = grids[name][item]
                    (spec,) = self.paths[name].item_specs([(t, h, w)])
                    sizes = t * h * w, spec.output_tokens
                    entries.append(Entry(item, name, (t, h, w), sizes, layout))
        return entries


class Entry(NamedTuple):
    """One entry of a path, and where its rows go in space."""

    item: int
    name: str
    """Of the path."""
    grid: Grid
    sizes: tuple[int, int]
    """Patches and tokens."""
    layout: tuple[int, int, bool]
    """(columns, rows, thumbnail) of the tiles."""
