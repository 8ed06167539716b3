"""What the towers over packed patches share beside their architecture: bounds, costs, maps.

Shapes: P patches in merge-block order, N tokens, D tower width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .contract import EncoderItemSpec, Grid, GridLike
from .inputs import raster_maps, read_grid, squarest
from .vision_encoder import VisionEncoder


class PatchEncoder(VisionEncoder):
    """A tower over packed patches whose merger makes a token of a square of patches.

    Its ``config`` has ``patch_dim`` and ``spatial_merge_size``.
    """

    @property
    def budget_range(self) -> tuple[int, int]:
        """64 tokens (a 256x256 image) to 8192."""
        return 64, 8192

    @property
    def row_shape(self) -> tuple[int, ...]:
        """One patch, flattened."""
        return (self.config.patch_dim,)

    def grid_for(self, tokens: int) -> Grid:
        """One image of exactly ``tokens`` tokens, as square as its factors allow."""
        merge = self.config.spatial_merge_size
        short, long = squarest(tokens)
        return 1, short * merge, long * merge

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Rows, tokens, segments (frame pairs) and longest segment of each item."""
        unit = self.config.spatial_merge_size**2
        return [
            EncoderItemSpec(t * h * w, t * h * w // unit, t, h * w)
            for t, h, w in self._read(grid_thw)
        ]

    def feature_maps(
        self,
        features: Tensor,
        grid_thw: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]:
        """[t, h, w, D] per item in raster order, from one row per patch or one row per token."""
        return raster_maps(features, self._read(grid_thw), self.config.spatial_merge_size)

    def _read(self, grid_thw: GridLike) -> list[Grid]:
        return read_grid(grid_thw, self.config.spatial_merge_size, "spatial_merge_size")
