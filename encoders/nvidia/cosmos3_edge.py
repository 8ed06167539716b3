"""The encoder of Cosmos3-Edge: SigLIP2 NaFlex over images and frames of any size, and a merger.

A pre-norm ViT over packed patches: a learned 16x16 table of positions, resized to the grid of each
item; layer norms, full attention inside each image or frame, a final norm. A merger normalises
patches again and joins 2x2 of them to one token.

Source: ``Cosmos3EdgeVisionModel`` and ``Cosmos3EdgePatchMerger`` of transformers 5.23.0.
Repo ids: nvidia/Cosmos3-Edge. The other Cosmos3 models have Qwen3-VL's tower.

Shapes: P patches in merge-block order, N = P/4 tokens, D width, s side of the table of positions.

Deliberate differences:

- Positions are interpolated in float32 or wider and rounded once, on every device; the source does
  so only on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import PatchEncoder, table_positions, table_weights
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_size,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes
from ..layers.segments import TileSegments, padding_rows

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Cosmos3EdgeConfig:
    """Sizes of tower and merger; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    projector_hidden_size: int
    out_hidden_size: int
    patch_size: int = 16
    num_patches: int = 256
    """The number of entries of the table of positions."""
    spatial_merge_size: int = 2
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
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
    def from_hf(cls, config: Mapping[str, object]) -> Cosmos3EdgeConfig:
        """Read the ``config.json`` of a checkpoint, in NVIDIA's form or that of transformers.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        projector = find_section(config, "projector_config")
        require_value(vision, "hidden_act", "gelu_pytorch_tanh")
        require_value(projector, "use_postshuffle_norm", False)
        merger = {**projector, **config}
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=27, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=1152),
            intermediate_size=read_size(vision, "intermediate_size", default=4304),
            num_heads=read_size(vision, "num_attention_heads", default=16),
            projector_hidden_size=read_size(
                merger, "projector_hidden_size", "merger_intermediate_size", default=11520
            ),
            out_hidden_size=read_size(find_section(config, "text_config"), "hidden_size"),
            patch_size=read_size(vision, "patch_size", default=16),
            num_patches=read_size(vision, "num_patches", default=256),
            spatial_merge_size=read_size(vision, "spatial_merge_size", default=2, limit=64),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
        )


class Cosmos3EdgeEncoder(PatchEncoder):
    """Encodes packed patches to hidden states and merged tokens."""

    def __init__(self, config: Cosmos3EdgeConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Cosmos3EdgeConfig = config
        self._preprocessor = preprocessor
        self.patch_embed = nn.Linear(config.patch_dim, config.hidden_size)
        self.pos_embed = nn.Parameter(torch.randn(config.num_patches, config.hidden_size))
        self.blocks: nn.ModuleList = nn.ModuleList(map(Block, [config.block_sizes] * config.depth))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.merger = Merger(config)

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor
        from ..inputs.pixel_rules import PATCH_RULES

        config = self.config
        sizes = config.patch_size, 1, config.spatial_merge_size
        return PatchPreprocessor(*sizes, *PATCH_RULES["cosmos3_edge"], channels_last=True)

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
        return EncoderOutput(hidden, self.merger(self.norm(hidden)), ())

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
        """Return the weights, per patch, of the rows and columns of the table of positions.

        ``pos_embed_rows`` and ``pos_embed_columns`` [P, s] are in merge-block order. P is
        ``max_input_size``, with padding at the end, or the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.pos_embed.dtype, torch.float32)
        merge = self.config.spatial_merge_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        return table_weights(grids, merge, self.config.position_side, rows, dtype)


class Merger(nn.Module):
    """Normalises patches, and joins the neighbouring ones of a token."""

    def __init__(self, config: Cosmos3EdgeConfig) -> None:
        super().__init__()
        self.group, width = config.spatial_merge_size**2, config.hidden_size
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.linear_fc1 = nn.Linear(self.group * width, config.projector_hidden_size)
        self.linear_fc2 = nn.Linear(config.projector_hidden_size, config.out_hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        squares = self.norm(patches).view(-1, self.group * patches.shape[-1])
        return self.linear_fc2(F.gelu(self.linear_fc1(squares)))
