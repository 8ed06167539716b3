"""The base class of the LLaVA families that cut an image into tiles of any arrangement.

A tower encodes the whole image and its tiles, all of one size, to projected tokens. The tokens of
the tiles make one map, of which the part remains that the image covers; its rows end in a learned
newline. For an image of 2x1 tiles of 2x2 tokens (a to d whole, 1 to 8 tiles), with no border::

    a b    1 2 | 5 6
    c d    3 4 | 7 8      ->    a b c d  1 2 5 6 NEWLINE  3 4 7 8 NEWLINE

A frame of a clip is one view, whose map of tokens is shrunk to half its rows and columns; one
newline follows those of all frames.

Shapes: N tokens of an item, n rows of a view, D tower width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import CLIP_SIZE, Output, PartialOutput, VisionInputs, output_like
from ..layers.assembly import Picture, covered_part, end_rows, stitch
from .paths_encoder import PathsEncoder
from .tile_encoder import TileEncoder


class _Tiles(NamedTuple):
    """The tokens of the tiles of an image: how they lie, and what remains of their map."""

    picture: Picture
    part: tuple[range, range]
    """The rows and columns that the image covers."""
    grid: tuple[int, int]
    """The rows and columns of the map in the sequence; it is shrunk if they are fewer."""

    def cut(self, views: Tensor) -> Tensor:
        """Return the part of the map of ``views`` [tiles*h*w, D] that the image covers."""
        rows, columns = self.part
        joined = stitch(views, self.picture.cell, self.picture.columns)
        return joined[rows.start : rows.stop, columns.start : columns.stop]

    @property
    def length(self) -> int:
        """The number of tokens in the sequence, newlines included."""
        return self.grid[0] * (self.grid[1] + 1)


class _Clip(NamedTuple):
    """The frames of a clip: their number, and the map of tokens that the tower makes of each."""

    frames: int
    cell: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of the map of a frame in the sequence."""
        return -(-self.cell[0] // 2), -(-self.cell[1] // 2)

    @property
    def length(self) -> int:
        """The number of tokens in the sequence, the newline included."""
        return self.frames * math.prod(self.grid) + 1

    def shrink(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all frames [N, D] after their maps are shrunk."""
        planes = tokens.unflatten(0, (self.frames, *self.cell)).permute(0, 3, 1, 2)
        shrunk = F.interpolate(planes, self.grid, mode="bilinear")
        return shrunk.permute(0, 2, 3, 1).flatten(0, 2)


class AnyResEncoder(PathsEncoder):
    """Encodes an image and its tiles with one tower, and joins their tokens to one sequence."""

    paths: Mapping[str, TileEncoder]
    _most_tiles: int | None = None
    """A map of tiles of over 1.21 times as many tokens as this many tiles have is shrunk to about
    theirs; None shrinks none."""

    def __init__(self, tower: TileEncoder) -> None:
        super().__init__()
        self._share_modules(tower, tensors=True)
        self.image_newline = nn.Parameter(torch.randn(tower.out_features))
        self.class_token = tower.class_token
        self.paths = {"image": tower}

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Join the tokens of the views of each image, and of the frames of each clip.

        Returns:
            For each item ``last_hidden_state`` [views, n, D], the whole image first, and
            ``pooler_output`` [N, out], the tokens of the whole image, then of the tiles.
        """
        items = zip(self.split_paths(outputs, inputs), self._tiles_of(inputs), strict=True)
        results = []
        for item, tiles in items:
            hidden, pooled, deepstack, extras = PartialOutput(*item["image"])
            tokens = None if pooled is None else self._sequence(pooled, tiles)
            results.append(output_like(item["image"], hidden, tokens, deepstack, extras))
        return results

    def _sequence(self, tokens: Tensor, tiles: _Tiles | _Clip | None) -> Tensor:
        """Return the sequence of the tokens of all views of an image, the whole one first."""
        if isinstance(tiles, _Clip):
            return torch.cat((tiles.shrink(tokens), self.image_newline[None]))
        if tiles is None:
            return torch.cat((tokens, self.image_newline[None]))
        whole = math.prod(tiles.picture.cell)
        joined = tiles.cut(tokens[whole:])
        if joined.shape[:2] != tiles.grid:
            planes = joined.permute(2, 0, 1)[None]
            joined = F.interpolate(planes, tiles.grid, mode="bilinear")[0].permute(1, 2, 0)
        return torch.cat((tokens[:whole], end_rows(joined, self.image_newline)))

    def _tiles_of(self, inputs: VisionInputs) -> list[_Tiles | _Clip | None]:
        """Return how the tokens of the views of each item lie; None for an image without tiles.

        Raises:
            ValueError: ``inputs`` lack tiles or sizes of images, or do not agree with each other.
        """
        grids = inputs.grid_thw.tolist()
        if inputs.tiles is None or inputs.image_sizes is None:
            if not grids:
                return []
            raise ValueError(
                "inputs without tiles or image_sizes: the tokens of an image depend on both; pass "
                "what preprocess returned"
            )
        items = zip(grids, inputs.tiles, inputs.image_sizes, strict=True)
        return [self._tiles(grid, tiling, size) for grid, tiling, size in items]

    def _tiles(
        self, grid: list[int], tiling: tuple[int, int, bool], size: tuple[int, int]
    ) -> _Tiles | _Clip | None:
        (views, h, w), (columns, rows, tiled) = grid, tiling
        if size == CLIP_SIZE:
            return _Clip(views, self.paths["image"]._token_grid(h, w))
        expected = 1 + columns * rows if tiled else 1
        if views != expected:
            raise ValueError(
                f"an item has {views} views, and its tiles make {expected}: pass what preprocess "
                "returned"
            )
        if not tiled:
            return None
        cell = self.paths["image"]._token_grid(h, w)
        picture = Picture(cell, columns, rows)
        rows_kept, columns_kept = part = covered_part(picture.grid, size)
        grid_kept = self._shrunk(len(rows_kept), len(columns_kept), cell[0])
        return _Tiles(picture, part, grid_kept)

    def _shrunk(self, rows: int, columns: int, side: int) -> tuple[int, int]:
        """Return the size of the map of tiles of ``side`` rows, which ``_most_tiles`` bounds."""
        if self._most_tiles is not None:
            ratio = math.sqrt(rows * columns / (self._most_tiles * side**2))
            if ratio > 1.1:
                return int(rows // ratio), int(columns // ratio)
        return rows, columns

    def _check_inputs(self, inputs: VisionInputs) -> None:
        super()._check_inputs(inputs)
        self._tiles_of(inputs)

    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Return per item the map "image" and, if it has tiles, "tiles", [1, rows, columns, D].

        The map of tiles is the part that the image covers. Of tokens, it has no newlines. The map
        "image" of a clip has its frames, [t, rows, columns, D].
        """
        tower, items = self.paths["image"], self._tiles_of(inputs)
        if features.ndim == 3:
            maps = tower.feature_maps(features, inputs.grid_thw)
            return [_maps_of_views(*pair) for pair in zip(maps, items, strict=True)]
        cells = [tower._token_grid(h, w) for _, h, w in inputs.grid_thw.tolist()]
        lengths = [_length(cell, tiles) for cell, tiles in zip(cells, items, strict=True)]
        if len(features) != sum(lengths):
            raise ValueError(
                f"features have {len(features)} rows: these inputs make {sum(lengths)} tokens of "
                "pooler_output"
            )
        return [
            _maps_of_tokens(*of_item)
            for of_item in zip(features.split(lengths), cells, items, strict=True)
        ]


def _length(cell: tuple[int, int], tiles: _Tiles | _Clip | None) -> int:
    """Return the number of tokens of an item whose views make maps of ``cell`` tokens."""
    if isinstance(tiles, _Clip):
        return tiles.length
    return math.prod(cell) + (1 if tiles is None else tiles.length)


def _maps_of_views(views: Tensor, tiles: _Tiles | _Clip | None) -> dict[str, Tensor]:
    """Return the maps of an item by name, from those of its views [views, h, w, D]."""
    if not isinstance(tiles, _Tiles):
        return {"image": views}
    return {"image": views[:1], "tiles": tiles.cut(views[1:].flatten(0, 2))[None]}


def _maps_of_tokens(
    rows: Tensor, cell: tuple[int, int], tiles: _Tiles | _Clip | None
) -> dict[str, Tensor]:
    """Return the maps of an item by name, from its sequence of tokens, without newlines."""
    if isinstance(tiles, _Clip):
        return {"image": rows[:-1].unflatten(0, (tiles.frames, *tiles.grid))}
    whole = math.prod(cell)
    maps = {"image": rows[None, :whole].unflatten(1, cell)}
    if tiles is not None:
        lines = rows[whole:].unflatten(0, (tiles.grid[0], tiles.grid[1] + 1))
        maps["tiles"] = lines[None, :, :-1]
    return maps
