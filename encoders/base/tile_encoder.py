"""The base class of towers over square tiles: grids, metadata and maps, but no layers.

Shapes: B tiles of n = r + h*w rows (r of them before the patches: a class token, or none), D tower
width, N tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..data import EncoderItemSpec, Grid, GridLike, Metadata, Tiling
from ..grids import read_grid
from ..layers.segments import BlockContext, TileSegments
from .checks import check_input_size, check_rows
from .raster import stitch_items
from .vision_encoder import VisionEncoder

if TYPE_CHECKING:
    from .configs import TileConfig

Own = TypeVar("Own", bound="TileEncoder")


class TileEncoder(VisionEncoder):
    """A tower over square tiles: attention stays in a tile, and each tile makes a map of tokens."""

    config: TileConfig
    _grid_multiple: int = 1
    """The height and width of a tile in patches must be multiples of this number."""
    _grid_multiple_name: str = "the pixel shuffle"
    """What needs these multiples, for error messages."""
    _largest_batch: int = 64
    """The number of tiles of the largest CUDA graph that is captured by default. A larger batch
    runs as several replays, which costs nothing if this many tiles keep the device busy."""
    _side: int | None = None

    def at(self: Own, side: int, largest_batch: int | None = None) -> Own:
        """Return a copy of this tower for tiles of another size, which shares its parameters.

        Args:
            side: height and width of a tile in pixels.
            largest_batch: tiles of the largest CUDA graph; None keeps the present number.
        """
        resized = copy.copy(self)  # the copy shares the modules, parameters and hooks
        resized._side = side
        resized._largest_batch = largest_batch or self._largest_batch
        return resized

    @property
    def side(self) -> int:
        """Height and width of a tile in pixels."""
        return self.config.tile_size if self._side is None else self._side

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> BlockContext:
        """Return the tensors that blocks read: offsets of tiles and, in rotary towers, angles."""
        return TileSegments.of(metadata, hidden)

    def _row_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of the features of a tile of ``h`` x ``w`` patches."""
        return h, w

    def _token_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of the tokens of a tile of ``h`` x ``w`` patches.

        There is one token per row of ``last_hidden_state``, unless the family merges rows.
        """
        return self._row_grid(h, w)

    @property
    def budget_range(self) -> tuple[int, int]:
        """The fewest and most tokens of a CUDA graph, for 1 and ``_largest_batch`` tiles."""
        return self._tile_tokens, self._largest_batch * self._tile_tokens

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one tile: channels, height and width in pixels."""
        return self.config.in_channels, self.side, self.side

    def grid_for(self, tokens: int) -> Grid:
        """Return the grid of the fewest tiles that make at least ``tokens`` tokens."""
        side = self.side // self.config.patch_size
        return max(-(-tokens // self._tile_tokens), 1), side, side

    @property
    def _tile_tokens(self) -> int:
        side = self.side // self.config.patch_size
        return prod(self._token_grid(side, side))

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return each item's tiles, output tokens, segments (its tiles) and their length."""
        grids = self._read(grid_thw)
        specs = {
            (t, h, w): EncoderItemSpec(
                input_size=t,
                output_tokens=t * prod(self._token_grid(h, w)),
                segments=t,
                longest_segment=self.prefix_rows + prod(self._row_grid(h, w)),
            )
            for t, h, w in set(grids)  # most items of a batch have one of a few sizes
        }
        return [specs[grid] for grid in grids]

    def _has_whole_tokens(self, pixel_values: Tensor) -> bool:
        """Return whether the height and width of tiles are multiples of the side of a token."""
        step, sizes = self.config.patch_size * self._grid_multiple, pixel_values.shape[2:]
        return len(sizes) == 2 and all(size > 0 and size % step == 0 for size in sizes)

    def _check_grids(self, pixel_values: Tensor, grids: list[Grid]) -> None:
        """Check the number and the size of tiles [B, C, H, W] against the grids of their items."""
        if not self._has_whole_tokens(pixel_values):
            return  # ``_admit_tiles`` will raise the error
        check_rows(pixel_values.shape[0], sum(t for t, _, _ in grids), "but the grid makes")
        patch, shape = self.config.patch_size, tuple(pixel_values.shape)
        for _, h, w in grids:
            if shape[2:] != (h * patch, w * patch):
                raise ValueError(
                    f"grid {h}x{w} means tiles of {h * patch}x{w * patch} pixels, these are "
                    f"{shape}: pass the grid_thw that belongs to them"
                )

    def _admit_tiles(self, pixel_values: Tensor, weight: Tensor) -> Tensor:
        """Check tiles [B, C, H, W] and bring them to the dtype and device of ``weight``.

        Raises:
            ValueError: integer pixels, or a height or width that cannot be encoded.
        """
        sizes = (self.config.in_channels, *pixel_values.shape[2:])
        shape = sizes if self._has_whole_tokens(pixel_values) else ()
        step = self.config.patch_size * self._grid_multiple
        hint = f" (or any height and width that are multiples of {step})"
        return self._admit_pixels(pixel_values, weight, hint, shape)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return an empty dict: blocks over tiles need no metadata but segment offsets."""
        check_input_size(sum(t for t, _, _ in grids), max_input_size)
        return {}

    def _shared_grid(self, grids: list[Grid], max_input_size: int | None) -> tuple[int, int]:
        """Return the patches down and across of all tiles, which share their positions.

        Metadata that is padded to ``max_input_size`` tiles is for tiles of the usual size.

        Raises:
            ValueError: tiles of several sizes, or more than ``max_input_size``.
        """
        check_input_size(sum(t for t, _, _ in grids), max_input_size)
        side = self.side // self.config.patch_size
        h, w = grids[0][1:] if grids and max_input_size is None else (side, side)
        other_grid = next((grid for grid in grids if grid[1:] != (h, w)), None)
        if other_grid:
            raise ValueError(
                f"grid {other_grid[1]}x{other_grid[2]}: all views of a call have one size, here "
                f"{h}x{w} patches; encode others in another call"
            )
        return h, w

    def _maps_of_grids(
        self, features: Tensor, grid_thw: GridLike, tiles: Sequence[Tiling] | None = None
    ) -> list[Tensor]:
        """Arrange ``last_hidden_state`` or ``pooler_output`` as maps, without class tokens.

        With ``tiles`` (see :class:`VisionInputs`) each image gets one map [1, rows*h, columns*w, D]
        without its thumbnail. Without ``tiles`` each item gets [tiles, h, w, D].
        """
        grids = self._read(grid_thw)
        sizes = [t if features.ndim == 3 else t * prod(self._token_grid(h, w)) for t, h, w in grids]
        if features.shape[0] != sum(sizes):
            kind = "tiles" if features.ndim == 3 else "tokens"
            raise ValueError(
                f"features have {len(features)} {kind}: the grid makes {sum(sizes)}; pass the "
                "inputs that these features were made of"
            )
        parts = zip(features.split(sizes), grids, strict=True)
        maps = [
            self._row_maps(part, h, w) if part.ndim == 3 else self._token_maps(part, h, w)
            for part, (_, h, w) in parts
        ]
        return stitch_items(maps, tiles)

    def _row_maps(self, rows: Tensor, h: int, w: int) -> Tensor:
        """Arrange rows [B, n, D] of tiles of h*w patches as maps [B, rows, columns, D]."""
        grid = self._row_grid(h, w)
        return torch.unflatten(rows[:, -prod(grid) :], 1, grid)

    def _token_maps(self, tokens: Tensor, h: int, w: int) -> Tensor:
        """Arrange tokens [N, out] of tiles of h*w patches as maps [tiles, rows, columns, out]."""
        return torch.unflatten(tokens, 0, (-1, *self._token_grid(h, w)))

    def _read(self, grid_thw: GridLike) -> list[Grid]:
        return read_grid(grid_thw, self._grid_multiple, self._grid_multiple_name)
