"""The base class of towers over packed patches, and the orders that patches come in.

Shapes: P patches in merge-block order (those of a token are neighbours), N tokens, D tower width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..data import PREFIX, EncoderItemSpec, EncoderOutput, Grid, GridLike, Metadata, Tiling
from ..grids import read_grid
from ..layers.segments import BlockContext, RotarySegments, prefix_metadata
from ..layers.table_taps import axis_weights
from .checks import check_rows, require_metadata
from .raster import raster_maps, stitch_items
from .vision_encoder import VisionEncoder

if TYPE_CHECKING:
    from .configs import PatchConfig


class PatchEncoder(VisionEncoder):
    """A tower over packed patches whose merger turns a square of patches into one token."""

    config: PatchConfig
    _segment_frames: int = 0
    """The most frames of a clip that attend to each other, as one segment; 0: each frame is one
    segment."""
    _token_frames: int = 1
    """The most frames of an item that are merged into one frame of tokens."""

    @property
    def budget_range(self) -> tuple[int, int]:
        """The fewest and most output tokens of the CUDA graphs captured by default: 64 and 8192."""
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
        """Return each item's patches, tokens, segments and patches per segment."""
        unit, segment_frames = self.config.spatial_merge_size**2, self._segment_frames or 1
        grids = self._read(grid_thw)
        specs = {
            (t, h, w): EncoderItemSpec(
                input_size=t * h * w,
                output_tokens=-(-t // self._token_frames) * (h * w // unit),
                segments=-(-t // segment_frames),
                longest_segment=self.prefix_rows + min(t, segment_frames) * h * w,
            )
            for t, h, w in set(grids)  # most items of a batch have one of a few sizes
        }
        return [specs[grid] for grid in grids]

    def _segment_grids(self, grids: list[Grid]) -> list[Grid]:
        if not (frames := self._segment_frames):
            return grids
        if (rows := sum(t * h * w for t, h, w in grids)) >= 2**31:  # before segments are listed
            raise ValueError(
                f"the grid makes {rows} rows, and int32 offsets end at 2^31: pass fewer items"
            )
        return [(min(frames, t - n), h, w) for t, h, w in grids for n in range(0, t, frames)]

    def _prefix_metadata(
        self, entries: Metadata, lengths: list[int], segments: int, max_input_size: int | None
    ) -> Metadata:
        """Return where rows before the patches lie, and rotary angles of all packed rows.

        The rows before the patches are not rotated: their cosines are 1, their sines 0.
        """
        if not self.prefix_rows:
            return {}
        patches = [length - self.prefix_rows for length in lengths]
        rows = sum(patches) if max_input_size is None else max_input_size
        places = prefix_metadata(patches, self.prefix_rows, segments, rows)
        for name, value in (("rotary_pos_emb_cos", 1.0), ("rotary_pos_emb_sin", 0.0)):
            if name in entries:
                angles = entries[name]
                still = angles.new_full((segments * self.prefix_rows, angles.shape[1]), value)
                places[name] = torch.cat((still, angles))[places["packed_index"]]
        return places

    def pack(self, prefix: Tensor, patches: Tensor, metadata: Metadata) -> Tensor:
        """Return the packed rows of all segments, each its ``prefix`` and then its patches.

        Args:
            prefix: [r, D], the class tokens and registers that every segment begins with.
            patches: [P, D].
            metadata: the result of ``prepare_encoder_metadata``.

        Returns:
            [P + S*r, D] for S segments.
        """
        segments = metadata["prefix_index"].shape[0]
        of_all = prefix.expand(segments, *prefix.shape).flatten(0, 1)
        return torch.cat((of_all.to(patches.dtype), patches))[metadata["packed_index"]]

    def prefixed_output(self, hidden: Tensor, normed: Tensor, metadata: Metadata) -> EncoderOutput:
        """Return the output of a tower whose tokens are its normed patches.

        Args:
            hidden: [T, D], the packed rows after the last block.
            normed: [T, D], the same after the last norm.
            metadata: the result of ``prepare_encoder_metadata``.
        """
        rows, tokens = self.in_input_order(hidden, metadata), self.in_input_order(normed, metadata)
        return EncoderOutput(rows, tokens, (), {PREFIX: self.rows_of_prefix(normed, metadata)})

    def in_input_order(self, rows: Tensor, metadata: Metadata) -> Tensor:
        """Return the rows of patches [P, ..] in input order, without those before the patches."""
        return rows[metadata["patch_index"]] if self.prefix_rows else rows

    def rows_of_prefix(self, rows: Tensor, metadata: Metadata) -> Tensor:
        """Return the rows before the patches [segments, r, D] among packed rows [T, D]."""
        return rows[metadata["prefix_index"]]

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> BlockContext:
        """Return the tensors that blocks read: rotary angles, offsets of segments, padding."""
        return RotarySegments.of(metadata)

    def _admit_patches(self, pixel_values: Tensor, weight: Tensor, metadata: Metadata) -> Tensor:
        """Check patches [P, patch_dim] and bring them to the dtype and device of ``weight``.

        Raises:
            ValueError: no tensor, integer pixels, or rows that ``metadata`` were not made for.
        """
        pixels = self._admit_pixels(pixel_values, weight)
        require_metadata(metadata, "rotary_pos_emb_cos")
        # ``len`` would make the number of patches a constant in torch.export's program.
        rows = metadata["rotary_pos_emb_cos"].shape[0]
        check_rows(pixels.shape[0], rows, "but encoder_metadata is for")
        return pixels

    def _add_weighted_rows(
        self, rows: Tensor, table: nn.Embedding, index: Tensor, weight: Tensor
    ) -> Tensor:
        """Add interpolated position embeddings: the table's rows at ``index`` times ``weight``.

        ``rows`` are [P, D], ``index`` and ``weight`` [P, taps]. The products are summed in the
        dtype of ``weight``, and rounded to that of ``rows`` before they are added.
        """
        if self.accelerator is not None and not self._records_gradients(rows):
            fused_sum = self.accelerator.add_weighted_rows(rows, table, index, weight)
            if fused_sum is not None:
                return fused_sum
        total: Tensor = table(index[:, 0]) * weight[:, :1]
        for tap in range(1, index.shape[1]):
            total = torch.addcmul(total, table(index[:, tap]), weight[:, tap, None])
        return rows + total.to(rows.dtype)

    def _maps_of_grids(
        self, features: Tensor, grid_thw: GridLike, tiles: Sequence[Tiling] | None = None
    ) -> list[Tensor]:
        merge, grids = self.config.spatial_merge_size, self._read(grid_thw)
        return raster_maps(features, grids, merge, self._token_frames)

    def _read(self, grid_thw: GridLike) -> list[Grid]:
        return read_grid(grid_thw, self.config.spatial_merge_size, "spatial_merge_size")


class RasterEncoder(PatchEncoder):
    """A tower whose packed patches and tokens are in raster order, not in merge-block order."""

    def _maps_of_grids(
        self, features: Tensor, grid_thw: GridLike, tiles: Sequence[Tiling] | None = None
    ) -> list[Tensor]:
        grids = self._read(grid_thw)
        is_unmerged = len(features) == sum(t * h * w for t, h, w in grids)
        merge = 1 if is_unmerged else self.config.spatial_merge_size
        return stitch_items(raster_maps(features, grids, merge, self._token_frames), tiles)


def squarest(tokens: int) -> tuple[int, int]:
    """Return the two factors of ``tokens`` that are nearest to each other, the smaller first."""
    side = next(n for n in range(math.isqrt(max(tokens, 1)), 0, -1) if max(tokens, 1) % n == 0)
    return side, max(tokens, 1) // side


def merge_order_positions(grids: Sequence[Grid], merge: int, rows: int) -> Tensor:
    """Return the position of every patch in merge-block order.

    The places of a grid of 2x4 patches, with blocks of 2x2::

        0 1 | 4 5
        2 3 | 6 7

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
        part = positions[start : start + t * h * w]
        cells = part.view(t, h // merge, w // merge, merge, merge, 2)
        cells[..., 0] = torch.arange(h, device="cpu").view(-1, 1, merge, 1)
        cells[..., 1] = torch.arange(w, device="cpu").view(-1, 1, merge)
        start += t * h * w
    return positions


def table_weights(
    grids: Sequence[Grid], merge: int, side: int, rows: int, dtype: torch.dtype
) -> Metadata:
    """Return the weights, per patch, of the rows and columns of a table of positions (SigLIP2).

    The weight of an entry of the table is its row's times its column's; :func:`table_positions`
    adds the entries up.

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        merge: side in patches of a block; 1 for patches in raster order.
        side: rows and columns of the table.
        rows: rows of the result, at least the number of patches.
        dtype: dtype of the weights.

    Returns:
        ``pos_embed_rows`` and ``pos_embed_columns`` [rows, side], 0 beyond the patches.
    """
    taps = torch.zeros(2, rows, side, dtype=dtype, device="cpu")
    sizes = {size for _, h, w in grids for size in (h, w)}
    weights_of = {size: axis_weights(side, size) for size in sizes}
    start = 0
    for t, h, w in grids:
        cells = merge_order_positions([(1, h, w)], merge, h * w)
        for axis, size in enumerate((h, w)):
            weights = weights_of[size][cells[:, axis]]
            taps[axis, start : start + t * h * w] = weights.repeat(t, 1)
        start += t * h * w
    return {"pos_embed_rows": taps[0], "pos_embed_columns": taps[1]}


def table_positions(metadata: Metadata, table: Tensor, patches: int) -> Tensor:
    """Return the position of every patch, [patches, D] in the dtype of the weights.

    Args:
        metadata: what :func:`table_weights` returned, among other entries.
        table: [side*side, D], row by row.
        patches: the number of rows of ``pixel_values``.

    Raises:
        ValueError: no metadata, or metadata of another number of patches.
    """
    require_metadata(metadata, "pos_embed_rows")
    rows, columns = metadata["pos_embed_rows"], metadata["pos_embed_columns"]
    check_rows(patches, rows.shape[0], "but encoder_metadata is for")
    weights = (rows[:, :, None] * columns[:, None]).flatten(1)
    return weights @ table.to(weights.dtype)


def longest_side(grids: Sequence[Grid]) -> int:
    """Return the largest height or width of grids in patches, 1 without any."""
    return max((max(h, w) for _, h, w in grids), default=1)


def merge_order(grids: Sequence[Grid], merge: int, rows: int) -> Tensor:
    """Return the indices that sort patches from raster order into merge order, int64 [rows].

    In merge order the ``merge**2`` patches of a token are neighbours. Entry i is the raster index,
    from 0 over all items, of the patch at place i.

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        merge: side in patches of the square that makes one token.
        rows: length of the result, at least the number of patches; beyond them, entry i is i.
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
