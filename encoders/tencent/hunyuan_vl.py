"""The vision tower of HunyuanOCR with its merger, which adds learned tokens to those of an image.

A pre-norm ViT, SigLIP's blocks over packed patches of images of any size: a learned 128x128 table
of positions interpolated to the grid, full attention inside each image, and no norm after the last
block. The merger turns 2x2 patches into one token. Each row of tokens ends with a learned newline,
and a learned token stands before and another behind all rows of an image::

    a b
    c d      BEGIN a b NEWLINE c d NEWLINE END

Source: ``HunYuanVLVisionTransformer`` of transformers 5.23.0.
Repo ids: tencent/HunyuanOCR.

Shapes: P patches row by row (T = P rows of attention), G cells of 2x2 patches, N tokens, learned
ones included, D width.

Deliberate differences:

- The patch embedding and the convolutions of the merger are matrix products over the stored
  weights, the same sums.
- Position interpolation adds its four taps in the tower's precision or float32, whichever is
  wider, both in eager runs and in graphs.
- Each frame of an item is encoded as an image of its own; the source takes one frame per item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size, check_rows, require_metadata
from ..base.patch_encoder import RasterEncoder, merge_order, merge_order_positions, squarest
from ..data import EncoderItemSpec, EncoderOutput, Grid, GridLike, Metadata, Tiling
from ..hf_config import (
    find_section,
    read_epsilon,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes
from ..layers.products import FlatPatchEmbed, patch_product
from ..layers.segments import TileSegments, padding_rows
from ..layers.table_taps import bilinear_taps

if TYPE_CHECKING:
    from ..contract import Preprocessor

BEGIN, END, NEWLINE, LEARNED = 0, 1, 2, 3
"""The numbers of the learned tokens in the merger, and how many there are."""


@dataclass(frozen=True)
class HunyuanVLConfig:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    image_size: int = 2048
    """Side in pixels of an image that has a position of the table per patch."""
    patch_size: int = 16
    spatial_merge_size: int = 2
    in_channels: int = 3
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("hidden_size", self.hidden_size, "num_heads", self.num_heads)
        require_sizes({"patches per side": self.position_side})

    @property
    def position_side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return self.image_size // self.patch_size

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * height * width of a patch."""
        return self.in_channels * self.patch_size**2

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        sizes = self.depth, self.hidden_size, self.intermediate_size, self.num_heads
        return BlockSizes(*sizes, "gelu", self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> HunyuanVLConfig:
        """Read a checkpoint's ``config.json``, with fields of the language model nested or not.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_act", "gelu")
        require_value(vision, "interpolate_mode", "bilinear", default="bilinear")
        require_value(vision, "spatial_merge_size", 2)
        require_value(vision, "temporal_patch_size", 1)
        width = read_size(vision, "hidden_size", default=1152)
        usual = 16 if width == 1152 else None
        heads = read_size(vision, "num_attention_heads", "attention_heads", default=usual)
        require_value(vision, "head_dim", width // heads)
        if vision is config:  # the tower alone
            out = read_size(vision, "text_hidden_size", default=3072)
        else:
            out = read_size(find_section(config, "text_config"), "hidden_size")
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=27, limit=1024),
            hidden_size=width,
            intermediate_size=read_size(vision, "intermediate_size", default=4304),
            num_heads=heads,
            out_hidden_size=out,
            image_size=read_size(vision, "max_image_size", default=2048),
            patch_size=read_size(vision, "patch_size", default=16),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "rms_norm_eps", "layer_norm_eps", default=1e-5),
        )


class HunyuanVLEncoder(RasterEncoder):
    """Encodes packed patches of images to hidden states, and to tokens among learned ones."""

    def __init__(self, config: HunyuanVLConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: HunyuanVLConfig = config
        self._preprocessor = preprocessor
        self.patch_embed = FlatPatchEmbed(config.hidden_size, config.patch_size, config.in_channels)
        self.pos_embed = nn.Embedding(config.position_side**2 + 1, config.hidden_size)
        self.blocks: nn.ModuleList = nn.ModuleList(map(Block, [config.block_sizes] * config.depth))
        self.merger = Merger(config)

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor

        config = self.config
        return PatchPreprocessor.row_by_row(
            "hunyuan_vl", config.patch_size, config.spatial_merge_size
        )

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to N tokens.

        Returns:
            ``last_hidden_state`` [P, D], ``pooler_output`` [N, out] with the learned tokens, no
            DeepStack features. With padded metadata, N is P.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        tokens = self.merger(hidden[metadata["merge_index"]], metadata["token_index"])
        return EncoderOutput(hidden, tokens, ())

    @property
    def _pixel_weight(self) -> Tensor:
        return self.pos_embed.weight

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], and add interpolated positions, [P, D]."""
        pixels = self._admit_pixels(pixel_values, self._pixel_weight)
        require_metadata(metadata, "pos_embed_index")
        index = metadata["pos_embed_index"]
        check_rows(pixels.shape[0], index.shape[0], "but encoder_metadata is for")
        patches = self.patch_embed(pixels)
        return self._add_weighted_rows(patches, self.pos_embed, index, metadata["pos_embed_weight"])

    def grid_for(self, tokens: int) -> Grid:
        """Return the grid (t, h, w) of an image of ``tokens`` tokens, as square as possible.

        An image has at least four tokens, of which three are learned.
        """
        merge = self.config.spatial_merge_size
        rows, columns = squarest(max(tokens - 2, 2))  # a newline counts as a column
        return 1, rows * merge, (columns - 1) * merge

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return each item's patches, tokens with the learned ones, frames, and patches of one."""
        merge = self.config.spatial_merge_size
        return [
            EncoderItemSpec(t * h * w, t * (h // merge * (w // merge + 1) + 2), t, h * w)
            for t, h, w in self._read(grid_thw)
        ]

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> TileSegments:
        """Return the tensors that all blocks read: offsets of segments, and padding."""
        offsets = metadata["cu_seqlens"]
        return TileSegments(offsets, metadata["max_seqlen"], padding_rows(offsets, hidden.shape[0]))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the positions of each patch, the patches by cell, and the rows of the tokens.

        ``pos_embed_index`` int64 and ``pos_embed_weight`` [P, 4] are the rows of the position table
        to sum, and their weights; row 0 of the table is never read. ``merge_index`` int64 [P] has
        the patches of each cell one after another. ``token_index`` int64 [N] has for each token its
        number among the merger's, of which the learned ones are the first. P is ``max_input_size``,
        with padding at the end, or the patches of ``grids``. Padded, N is P, because no image makes
        more tokens than patches.
        """
        dtype = torch.promote_types(self.pos_embed.weight.dtype, torch.float32)
        merge, side = self.config.spatial_merge_size, self.config.position_side
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        index, weights = bilinear_taps(merge_order_positions(grids, 1, rows), grids, side, dtype)
        tokens = token_rows(grids, merge)
        padding = 0 if max_input_size is None else rows - len(tokens)
        return {
            "pos_embed_index": index + 1,
            "pos_embed_weight": weights,
            "merge_index": merge_order(grids, merge, rows),
            "token_index": F.pad(tokens, (0, padding)),
        }

    def _maps_of_grids(
        self, features: Tensor, grid_thw: GridLike, tiles: Sequence[Tiling] | None = None
    ) -> list[Tensor]:
        """Return one map per item, without the learned tokens.

        Images of one cell have as many tokens as patches; of these, features as wide as tokens are
        those of tokens.
        """
        grids = self._read(grid_thw)
        places = token_rows(grids, self.config.spatial_merge_size)
        is_ambiguous = len(places) == sum(t * h * w for t, h, w in grids)
        if len(features) == len(places) and not (
            is_ambiguous and features.shape[-1] != self.out_features
        ):
            features = features[(places >= LEARNED).to(features.device)]
        return super()._maps_of_grids(features, grids, tiles)


class Merger(nn.Module):
    """Turns 2x2 patches into a token, and puts the tokens of an image among learned ones."""

    def __init__(self, config: HunyuanVLConfig) -> None:
        super().__init__()
        width, out, merge = config.hidden_size, config.out_hidden_size, config.spatial_merge_size
        self.merge = merge
        self.before_rms = nn.RMSNorm(width, eps=config.layer_norm_eps)
        self.proj_conv = nn.Conv2d(width, 2 * width, merge, stride=merge)
        self.proj_out = nn.Conv2d(2 * width, 4 * width, 1)
        self.image_newline = nn.Parameter(torch.randn(4 * width))
        self.mlp = nn.Linear(4 * width, out)
        self.image_begin = nn.Parameter(torch.randn(out))
        self.image_end = nn.Parameter(torch.randn(out))
        self.after_rms = nn.RMSNorm(out, eps=config.layer_norm_eps)

    def forward(self, patches: Tensor, token_index: Tensor) -> Tensor:
        """Return tokens [N, out] of patches [P, D], those of a cell next to each other.

        ``token_index`` has for each token its number among ``BEGIN``, ``END``, ``NEWLINE`` and the
        G cells that follow them.
        """
        width, merge = patches.shape[1], self.merge
        groups = torch.unflatten(self.before_rms(patches), 0, (-1, merge**2)).mT.flatten(1)
        cells = F.gelu(patch_product(self.proj_conv, groups, (width, merge, merge)))
        cells = patch_product(self.proj_out, cells, (cells.shape[1], 1, 1))
        rows = self.mlp(torch.cat((self.image_newline[None], cells)))
        rows = torch.cat((self.image_begin[None], self.image_end[None], rows))
        return self.after_rms(rows)[token_index]


def token_rows(grids: Sequence[Grid], merge: int) -> Tensor:
    """Return the number of each token of all items among those of the merger, int64 [N].

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        merge: side in patches of a cell, which makes one token.

    Returns:
        ``BEGIN``, ``END`` or ``NEWLINE`` for learned tokens, from ``LEARNED`` on the cells of all
        items, row by row.
    """
    parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
    start = LEARNED
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        stop = start + t * rows * columns
        cells = torch.arange(start, stop, device="cpu").view(t, rows, columns)
        lines = F.pad(cells, (0, 1), value=NEWLINE).flatten(1)
        frames = F.pad(F.pad(lines, (1, 0), value=BEGIN), (0, 1), value=END)
        parts.append(frames.flatten())
        start = stop
    return torch.cat(parts)
