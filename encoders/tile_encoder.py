"""What towers over square tiles share beside their architecture: bounds, costs, maps.

Shapes: B tiles of n = 1 + h*w rows (class token first), D tower width, N = B*h*w/4 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor

from .contract import EncoderItemSpec, Grid, GridLike
from .inputs import read_grid, require_features, stitch_tiles
from .vision_encoder import VisionEncoder


class TileEncoder(VisionEncoder):
    """A tower over square tiles whose pixel shuffle makes a token of 2x2 patches.

    Its ``config`` has ``tile_size``, ``patch_size``, ``in_channels`` and ``ps_version``.
    """

    @property
    def budget_range(self) -> tuple[int, int]:
        """One tile (256 tokens) to 64 tiles, a clip of 64 frames."""
        return self._tile_tokens, 64 * self._tile_tokens

    @property
    def row_shape(self) -> tuple[int, ...]:
        """One tile."""
        return self.config.in_channels, self.config.tile_size, self.config.tile_size

    def grid_for(self, tokens: int) -> Grid:
        """As few whole tiles as make ``tokens`` tokens."""
        side = self.config.tile_size // self.config.patch_size
        return max(-(-tokens // self._tile_tokens), 1), side, side

    @property
    def _tile_tokens(self) -> int:
        return (self.config.tile_size // self.config.patch_size // 2) ** 2

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Rows (tiles), tokens, segments (tiles) and longest segment of each item."""
        return [
            EncoderItemSpec(t, t * h * w // 4, t, 1 + h * w) for t, h, w in self._read(grid_thw)
        ]

    def feature_maps(
        self,
        features: Tensor,
        grid_thw: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]:
        """Lay ``last_hidden_state`` or ``pooler_output`` out in space, class token dropped.

        With ``tiles`` (as :class:`VisionInputs` has them) one map [1, rows*h, columns*w, D] an
        image, thumbnail dropped; without them [tiles, h, w, D] an item.
        """
        require_features(features)
        grids = self._read(grid_thw)
        sizes = [t if features.ndim == 3 else t * h * w // 4 for t, h, w in grids]
        if features.shape[0] != sum(sizes):
            kind = "tiles" if features.ndim == 3 else "tokens"
            raise ValueError(f"features have {len(features)} {kind}: the grid makes {sum(sizes)}")
        parts = zip(features.split(sizes), grids, strict=True)
        maps = [self._tile_maps(part, h, w) for part, (_, h, w) in parts]
        if tiles is None:
            return maps
        if len(tiles) != len(maps):
            raise ValueError(f"tiles has {len(tiles)} items, grid_thw {len(maps)}: must be equal")
        return [stitch_tiles(*pair) for pair in zip(maps, tiles, strict=True)]

    def _tile_maps(self, features: Tensor, h: int, w: int) -> Tensor:
        if features.ndim == 3:
            return features[:, 1:].unflatten(1, (h, w))
        tokens = features.unflatten(0, (-1, h * w // 4))
        order = "(h w)" if self.config.ps_version == "v2" else "(w h)"
        return rearrange(tokens, f"b {order} d -> b h w d", h=h // 2)

    def _read(self, grid_thw: GridLike) -> list[Grid]:
        return read_grid(grid_thw, 2, "the pixel shuffle")
