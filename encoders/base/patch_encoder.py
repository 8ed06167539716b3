"""The base class of towers over packed patches, and the orders that patches come in.

Shapes: P patches in merge-block order, N tokens, D tower width.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from ..data import EncoderItemSpec, Grid, GridLike, Metadata
from ..grids import read_grid, stitch_tiles
from ..layers.segments import RotarySegments
from .checks import check_rows
from .vision_encoder import VisionEncoder

if TYPE_CHECKING:
    from ..configs import PatchConfig


class PatchEncoder(VisionEncoder):
    """A tower over packed patches whose merger turns a square of patches into one token."""

    config: PatchConfig
    _segment_frames: int = 0
    """The most frames of a segment, if metadata are made as if each segment were an item; 0: each
    frame is a segment."""
    _token_frames: int = 1
    """The most frames of an item that make one frame of tokens."""

    @property
    def budget_range(self) -> tuple[int, int]:
        """The fewest and most tokens of a CUDA graph: 64 (an image of 256x256) and 8192."""
        return 64, 8192

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of ``pixel_values``: one flattened patch."""
        return (self.config.patch_dim,)

    def grid_for(self, tokens: int) -> Grid:
        """Return the grid (t, h, w) of an image of ``tokens`` tokens, as square as possible."""
        merge = self.config.spatial_merge_size
        short, long = squarest(tokens)
        return 1, short * merge, long * merge

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return each item's patches, tokens, attention sequences and patches per sequence."""
        unit, most = self.config.spatial_merge_size**2, self._segment_frames or 1
        return [
            EncoderItemSpec(
                input_size=t * h * w,
                output_tokens=-(-t // self._token_frames) * (h * w // unit),
                segments=-(-t // most),
                longest_segment=min(t, most) * h * w,
            )
            for t, h, w in self._read(grid_thw)
        ]

    def _segment_grids(self, grids: list[Grid]) -> list[Grid]:
        if not (most := self._segment_frames):
            return grids
        if (rows := sum(t * h * w for t, h, w in grids)) >= 2**31:  # before segments are listed
            raise ValueError(f"the grid makes {rows} rows, int32 offsets end at 2^31: pass fewer")
        return [(min(most, t - first), h, w) for t, h, w in grids for first in range(0, t, most)]

    def _block_outputs(
        self, pixel_values: Tensor, grid_thw: GridLike, numbers: Sequence[int]
    ) -> Iterator[Tensor]:
        """Embed patches [P, patch_dim], and yield the state [P, D] after each block in ``numbers``.

        ``grid_thw`` is (t, h, w) per item; ``numbers`` are block numbers from 0, ascending.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, None)
        yield from self._run_blocks(self._embed(pixel_values, metadata), metadata, numbers)

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> object:
        """Return the tensors that blocks read: rotary angles, offsets of sequences, padding."""
        return RotarySegments.of(metadata)

    def _admit_patches(self, pixel_values: Tensor, weight: Tensor, metadata: Metadata) -> Tensor:
        """Check patches [P, patch_dim] and bring them to the dtype and device of ``weight``.

        Raises:
            ValueError: no tensor, integer pixels, or rows that ``metadata`` were not made for.
        """
        pixels = self._admit_pixels(pixel_values, weight)
        check_rows(pixels.shape[0], metadata["rotary_pos_emb_cos"].shape[0], "the grid makes")
        return pixels

    @abstractmethod
    def _embed(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Return the input of the first block, [P, D], from patches [P, patch_dim].

        ``metadata`` has the positions of patches and, for attention windows, the order of rows.
        """

    def _maps_of_grids(
        self,
        features: Tensor,
        grid_thw: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]:
        merge, grids = self.config.spatial_merge_size, self._read(grid_thw)
        return raster_maps(features, grids, merge, self._token_frames)

    def _read(self, grid_thw: GridLike) -> list[Grid]:
        return read_grid(grid_thw, self.config.spatial_merge_size, "spatial_merge_size")


class RasterEncoder(PatchEncoder):
    """A tower whose packed patches and tokens are in raster order, not in merge-block order."""

    def _maps_of_grids(
        self,
        features: Tensor,
        grid_thw: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]:
        grids = self._read(grid_thw)
        whole = len(features) == sum(t * h * w for t, h, w in grids)
        merge = 1 if whole else self.config.spatial_merge_size
        maps = raster_maps(features, grids, merge, self._token_frames)
        if tiles is None:
            return maps
        return [stitch_tiles(*pair) for pair in zip(maps, tiles, strict=True)]


def raster_maps(
    features: Tensor, grids: Sequence[Grid], merge: int, frames: int = 1
) -> list[Tensor]:
    """Arrange rows, which come in merge-block order, as maps in raster order.

    Rows of a tower that merges 2x2 patches lie block by block, so that 4 neighbours in memory make
    one token. For a grid of 4x4 patches::

        0  1 |  4  5
        2  3 |  6  7        rows 0..3 are the top left block, 4..7 the top right one
        ------------
        8  9 | 12 13
       10 11 | 14 15

    Merged tokens (one row per block) are in raster order already, on a grid of h/2 x w/2.

    Args:
        features: [P, D], one row per patch, or [N, D], one row per token.
        grids: ``(t, h, w)`` per item, in patches.
        merge: side of a block in patches.
        frames: frames of the grid that make one frame of tokens.

    Returns:
        [t, h, w, D] per item in raster order, of patches or of tokens as ``features`` are.

    Raises:
        ValueError: no tensor, or one with neither a row per patch nor a row per token.
    """
    patches = [t * h * w for t, h, w in grids]
    times = [-(-t // frames) for t, _, _ in grids]
    tokens = [t * h * w // merge**2 for t, (_, h, w) in zip(times, grids, strict=True)]
    if features.shape[0] == sum(patches):
        return [
            rearrange(part, "(t h w a b) d -> t (h a) (w b) d", t=t, h=h // merge, a=merge, b=merge)
            for part, (t, h, _) in zip(features.split(patches), grids, strict=True)
        ]
    if features.shape[0] == sum(tokens):
        return [
            part.unflatten(0, (t, h // merge, w // merge))
            for part, t, (_, h, w) in zip(features.split(tokens), times, grids, strict=True)
        ]
    raise ValueError(
        f"features have {features.shape[0]} rows: the grid makes {sum(patches)} patches "
        f"or {sum(tokens)} tokens"
    )


def squarest(tokens: int) -> tuple[int, int]:
    """Return the two factors of ``tokens`` that are nearest to each other, the smaller first."""
    side = next(n for n in range(math.isqrt(max(tokens, 1)), 0, -1) if max(tokens, 1) % n == 0)
    return side, max(tokens, 1) // side


def merge_order_positions(grids: Sequence[Grid], merge: int, rows: int) -> Tensor:
    """Return the position of every patch in merge-block order.

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        merge: side of a block in patches.
        rows: rows of the result, at least the number of patches.

    Returns:
        (row, column) per patch, int64 [rows, 2]; (0, 0) for rows beyond the patches.
    """
    positions = torch.zeros(rows, 2, dtype=torch.int64, device="cpu")
    start = 0
    for t, h, w in grids:
        cells = torch.cartesian_prod(_count(h), _count(w))
        cells = cells.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
        positions[start : start + t * h * w] = cells.repeat(t, 1)
        start += t * h * w
    return positions


def merge_order(grids: Sequence[Grid], merge: int, rows: int) -> Tensor:
    """Return the indices that sort patches from raster order into merge order, int64 [rows].

    In merge order the ``merge**2`` patches of a token are neighbours. Entry i is the raster index,
    from 0 over all items, of the patch at place i.

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        merge: side of a token in patches.
        rows: number of entries, at least that of patches; entry i beyond the patches is i.
    """
    order = torch.arange(rows, device="cpu")
    start = 0
    for t, h, w in grids:
        cells = merge_order_positions([(1, h, w)], merge, h * w)
        frame = cells[:, 0] * w + cells[:, 1]
        frames = start + torch.arange(t, device="cpu")[:, None] * (h * w) + frame
        order[start : start + t * h * w] = frames.flatten()
        start += t * h * w
    return order


def window_order(
    grids: Sequence[Grid], merge: int, side: int, tokens: int
) -> tuple[Tensor, list[int]]:
    """Return the order of merged tokens window by window, and the size of each window.

    Windows of ``side`` x ``side`` tokens lie in raster order over each frame, and tokens in raster
    order inside a window; windows at the right and bottom edge are smaller. A frame of 3x6 tokens
    with side 4::

        0  1  2  3 |  4  5
        6  7  8  9 | 10 11      order 0-3, 6-9, 12-15 | 4, 5, 10, 11, 16, 17
       12 13 14 15 | 16 17      windows of 12 and 6 tokens

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        merge: side of a merge block in patches.
        side: side of a window in tokens.
        tokens: length of the order, at least the number of tokens.

    Returns:
        Token numbers, int64 [tokens], those beyond the last window in their own order; and the
        number of patches per window.
    """
    order, windows, start = [], [], 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        frame = _count(rows * columns).view(rows, columns)
        tiles = [tile for band in frame.split(side) for tile in band.split(side, dim=1)]
        frame_order = torch.cat([tile.flatten() for tile in tiles])
        starts = start + _count(t)[:, None] * rows * columns
        order.append((starts + frame_order).flatten())
        windows += [tile.numel() * merge**2 for tile in tiles] * t
        start += t * rows * columns
    return torch.cat([*order, _count(tokens)[start:]]), windows


def _count(end: int) -> Tensor:
    """Return the numbers 0 to ``end`` - 1 on the CPU, whatever torch's default device is."""
    return torch.arange(end, device="cpu")
