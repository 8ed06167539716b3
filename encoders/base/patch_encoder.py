"""The base class of towers over packed patches: everything that is not their architecture.

Shapes: P patches in merge-block order, N tokens, D tower width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from ..contract import EncoderItemSpec, Grid, GridLike, Metadata
from ..grids import raster_maps, read_grid, squarest
from .checks import check_rows
from .vision_encoder import VisionEncoder


class PatchEncoder(VisionEncoder):
    """A tower over packed patches whose merger turns a square of patches into one token.

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

    def block_outputs(
        self, pixel_values: Tensor, grid_thw: GridLike, wanted: Sequence[int]
    ) -> Iterator[Tensor]:
        """The hidden state [P, D] after each block in ``wanted``, in input order."""
        metadata = self.prepare_encoder_metadata(grid_thw)
        yield from self.run_blocks(self._embed(pixel_values, metadata), metadata, wanted)

    def admit_patches(self, pixel_values: Tensor, weight: Tensor, metadata: Metadata) -> Tensor:
        """Check patches [P, patch_dim] and bring them to the dtype and device of ``weight``.

        Raises:
            ValueError: what ``admit_pixels`` raises, or another number of rows than the metadata's.
        """
        pixels = self.admit_pixels(pixel_values, weight)
        check_rows(pixels.shape[0], metadata["rotary_pos_emb_cos"].shape[0], "the grid makes")
        return pixels

    @abstractmethod
    def _embed(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """The rows [P, D] that the first block reads, in the order that blocks work in."""

    def _maps_of_grids(
        self,
        features: Tensor,
        grid_thw: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]:
        return raster_maps(features, self._read(grid_thw), self.config.spatial_merge_size)

    def _read(self, grid_thw: GridLike) -> list[Grid]:
        return read_grid(grid_thw, self.config.spatial_merge_size, "spatial_merge_size")
