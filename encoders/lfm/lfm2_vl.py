"""The vision tower of LFM2-VL and LFM2.5-VL: SigLIP2 NaFlex over images and tiles, and a projector.

A pre-norm ViT with a learned 16x16 table of positions, resized to the grid of each image; layer
norms, full attention inside each image or tile, a final norm; then 2x2 patches are put side by side
and projected to one token. A large image is cut into tiles of one size, after which the whole
image, resized to some number of patches, comes last.

Source: ``Siglip2VisionModel`` and ``Lfm2VlMultiModalProjector`` of transformers 5.23.0.
Repo ids: LiquidAI/LFM2-VL-450M, LiquidAI/LFM2-VL-1.6B, LiquidAI/LFM2.5-VL-450M,
LiquidAI/LFM2.5-VL-1.6B, LiquidAI/LFM2.5-VL-3B.

Shapes: P patches row by row, D width, s side of the table of positions, N = P/4 tokens.

Deliberate differences:

- Images are packed, not padded to the longest.
- Positions are interpolated in float32 or wider and rounded once, on every device; the source does
  so only on the CPU. An image of one column of patches has positions as in ``siglip2.py``.
- ``last_hidden_state`` is the output of the last block, before the final norm.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import RasterEncoder, merge_order, table_positions, table_weights
from ..base.paths_encoder import TilesThenImage
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_flag,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes
from ..layers.segments import TileSegments, padding_rows

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Lfm2VLConfig:
    """Sizes of tower and projector; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    projector_hidden_size: int
    out_hidden_size: int
    projector_norm: bool = True
    """Whether the projector normalises the patches of a token first (LFM2-VL, not LFM2.5-VL)."""
    projector_bias: bool = True
    patch_size: int = 16
    num_patches: int = 256
    """The number of entries of the table of positions."""
    spatial_merge_size: int = 2
    tile_size: int = 512
    """The side of a tile in pixels; CUDA graphs for tiles are captured for this size."""
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        token = self.patch_size * self.spatial_merge_size
        require_divisible("tile_size", self.tile_size, "the side of a token", token)
        if self.position_side**2 != self.num_patches:
            raise ValueError(f"config: num_patches={self.num_patches} must be a square")

    @property
    def position_side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return isqrt(self.num_patches)

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: height * width * channels of a patch."""
        return self.patch_size**2 * self.in_channels

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        sizes = self.depth, self.hidden_size, self.intermediate_size, self.num_heads
        return BlockSizes(*sizes, "gelu_tanh", self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Lfm2VLConfig:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_act", "gelu_pytorch_tanh")
        require_value(config, "projector_hidden_act", "gelu")
        require_value(config, "vision_feature_layer", -1)
        width = read_size(vision, "hidden_size", default=768)
        heads = 12 if width == 768 else None  # else required: no tensor's shape shows it
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=12, limit=1024),
            hidden_size=width,
            intermediate_size=read_size(vision, "intermediate_size", default=3072),
            num_heads=read_size(vision, "num_attention_heads", default=heads),
            projector_hidden_size=read_size(config, "projector_hidden_size", default=2560),
            out_hidden_size=read_size(find_section(config, "text_config"), "hidden_size"),
            projector_norm=read_flag(config, "projector_use_layernorm", default=True),
            projector_bias=read_flag(config, "projector_bias", default=True),
            patch_size=read_size(vision, "patch_size", default=16),
            num_patches=read_size(vision, "num_patches", default=256),
            spatial_merge_size=read_size(config, "downsample_factor", default=2, limit=64),
            tile_size=read_size(config, "tile_size", default=512),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
        )


class Lfm2VLEncoder(TilesThenImage):
    """Encodes images, and the tiles of large ones, to hidden states and projected tokens."""

    config: Lfm2VLConfig
    _tiles_alone = True

    def __init__(self, config: Lfm2VLConfig, preprocessor: Preprocessor | None = None) -> None:
        tower = Lfm2VLTower(config)
        super().__init__(tower, tower.at(config.tile_size), preprocessor)

    def _default_preprocessor(self) -> Preprocessor:
        from .lfm2_vl_pixels import PatchTilesPreprocessor

        return PatchTilesPreprocessor(
            self.config.patch_size,
            token_size=self.config.spatial_merge_size,
            tile_size=self.config.tile_size,
        )


class Lfm2VLTower(RasterEncoder):
    """Encodes packed patches, of whole images (input path "image") or tiles ("tiles")."""

    _tile: int = 0
    """The side in patches of the tiles that CUDA graphs are captured for; 0: images of any size."""

    def __init__(self, config: Lfm2VLConfig) -> None:
        super().__init__()
        self.config: Lfm2VLConfig = config
        self.patch_embed = nn.Linear(config.patch_dim, config.hidden_size)
        self.pos_embed = nn.Parameter(torch.randn(config.num_patches, config.hidden_size))
        self.blocks: nn.ModuleList = nn.ModuleList(map(Block, [config.block_sizes] * config.depth))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.projector = Projector(config)

    def at(self, side: int) -> Lfm2VLTower:
        """Return a copy of this tower, with shared parameters, whose CUDA graphs are for tiles.

        ``side`` is the side of a tile in pixels. Without graphs the copy encodes any grid.
        """
        tile_tower = copy.copy(self)  # the copy shares the modules, parameters and hooks
        tile_tower._tile = side // self.config.patch_size
        return tile_tower

    @property
    def budget_range(self) -> tuple[int, int]:
        """The fewest and most tokens of a CUDA graph; after :meth:`at`, for 1 and 32 tiles."""
        tokens = (self._tile // self.config.spatial_merge_size) ** 2
        return (tokens, 32 * tokens) if tokens else super().budget_range

    def grid_for(self, tokens: int) -> Grid:
        """Return the grid (t, h, w) with the fewest patches for at least ``tokens`` output tokens.

        h and w are in patches. The item is t tiles if this tower was made by :meth:`at`, else one
        image.
        """
        if not self._tile:
            return super().grid_for(tokens)
        per_tile = (self._tile // self.config.spatial_merge_size) ** 2
        return max(-(-tokens // per_tile), 1), self._tile, self._tile

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to N tokens.

        Returns:
            ``last_hidden_state`` [P, D] before the last norm, ``pooler_output`` [N, out], no
            DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        tokens = self.projector(self.norm(hidden)[metadata["merge_index"]])
        return EncoderOutput(hidden, tokens, ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], and add interpolated positions, [P, D]."""
        pixels = self._admit_pixels(pixel_values, self.pos_embed)
        positions = table_positions(metadata, self.pos_embed, pixels.shape[0])
        patches: Tensor = self.patch_embed(pixels)
        return patches + positions.to(patches.dtype)

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> TileSegments:
        """Return the tensors that all blocks read: offsets of segments, and padding."""
        offsets = metadata["cu_seqlens"]
        return TileSegments(offsets, metadata["max_seqlen"], padding_rows(offsets, len(hidden)))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the weights of the table of positions per patch, and the patches by token.

        ``pos_embed_rows`` and ``pos_embed_columns`` [P, s] are the weights of all rows and of all
        columns of the table. ``merge_index`` int64 [P] has the patches of each token one after
        another. P is ``max_input_size``, with padding at the end, or the patches of ``grids``.
        """
        dtype = torch.promote_types(self.pos_embed.dtype, torch.float32)
        merge = self.config.spatial_merge_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        weights = table_weights(grids, 1, self.config.position_side, rows, dtype)
        return {**weights, "merge_index": merge_order(grids, merge, rows)}


class Projector(nn.Module):
    """Projects the 2x2 patches of a token, which are neighbouring rows, to that token."""

    def __init__(self, config: Lfm2VLConfig) -> None:
        super().__init__()
        self.width = width = config.hidden_size * config.spatial_merge_size**2
        self.layer_norm = nn.LayerNorm(width) if config.projector_norm else nn.Identity()
        inner, bias = config.projector_hidden_size, config.projector_bias
        self.linear_1 = nn.Linear(width, inner, bias=bias)
        self.linear_2 = nn.Linear(inner, config.out_hidden_size, bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        rows = self.layer_norm(patches.view(-1, self.width))
        return self.linear_2(F.gelu(self.linear_1(rows)))
