"""The vision tower of PaddleOCR-VL: SigLIP's blocks over packed patches of images of any size.

A pre-norm ViT: a learned 27x27 table of positions interpolated to the grid and 2D rotary positions,
full attention inside each image, a final norm; then a projector that normalises each patch and
turns 2x2 of them into one token.

Source: ``PaddleOCRVisionModel`` and ``PaddleOCRProjector`` of transformers 5.23.0.
Repo ids: PaddlePaddle/PaddleOCR-VL, PaddlePaddle/PaddleOCR-VL-1.5.

Shapes: P patches row by row (T = P rows of attention), N = P/4 tokens, D width, H heads, K head
size.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product.
- Position interpolation adds its four taps in the tower's precision or float32, whichever is
  wider, both in eager runs and in graphs.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import RasterEncoder, merge_order, merge_order_positions
from ..block_parts import BlockParts, plain_parts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.blocks import MLP, BlockSizes
from ..layers.products import FlatPatchEmbed
from ..layers.rotary import rotary_cos_sin, rotate
from ..layers.segments import RotarySegments
from ..layers.table_taps import bilinear_taps

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class PaddleOCRVLConfig:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    image_size: int = 384
    patch_size: int = 14
    spatial_merge_size: int = 2
    in_channels: int = 3
    layer_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head size", self.head_size, "rotary axes * 2", 4)
        require_sizes({"patches per side": self.position_side})

    @property
    def position_side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return self.image_size // self.patch_size

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * height * width of a patch."""
        return self.in_channels * self.patch_size**2

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        sizes = self.depth, self.hidden_size, self.intermediate_size, self.num_heads
        return BlockSizes(*sizes, "gelu_tanh", self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> PaddleOCRVLConfig:
        """Read a checkpoint's ``config.json``, with fields of the language model nested or not.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        language = find_section(config, "text_config")
        require_value(vision, "hidden_act", "gelu_pytorch_tanh")
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=27, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=1152),
            intermediate_size=read_size(vision, "intermediate_size", default=4304),
            num_heads=read_size(vision, "num_attention_heads", default=16),
            out_hidden_size=read_size(language, "hidden_size", default=1024),
            image_size=read_size(vision, "image_size", default=384),
            patch_size=read_size(vision, "patch_size", default=14),
            spatial_merge_size=read_size(vision, "spatial_merge_size", default=2),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
            rope_theta=read_rope_theta(vision),
        )


class PaddleOCRVLEncoder(RasterEncoder):
    """Encodes packed patches of images to hidden states and merged tokens."""

    def __init__(self, config: PaddleOCRVLConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: PaddleOCRVLConfig = config
        self._preprocessor = preprocessor
        self.patch_embed = FlatPatchEmbed(config.hidden_size, config.patch_size, config.in_channels)
        self.pos_embed = nn.Embedding(config.position_side**2, config.hidden_size)
        self.blocks: nn.ModuleList = nn.ModuleList(map(Block, [config.block_sizes] * config.depth))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.projector = Projector(config)

    def _default_preprocessor(self) -> Preprocessor:
        from .paddleocr_vl_pixels import RasterPreprocessor

        return RasterPreprocessor.paddleocr_vl(
            patch_size=self.config.patch_size, token_size=self.config.spatial_merge_size
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
            ``last_hidden_state`` [P, D] row by row, ``pooler_output`` [N, out], no DeepStack
            features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        tokens = self.projector(self.norm(hidden)[metadata["merge_index"]])
        return EncoderOutput(hidden, tokens, ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], and add interpolated positions, [P, D]."""
        weight = self.patch_embed.proj.weight
        patches = self.patch_embed(self._admit_patches(pixel_values, weight, metadata))
        taps, weights = metadata["pos_embed_index"], metadata["pos_embed_weight"]
        return self._add_weighted_rows(patches, self.pos_embed, taps, weights)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return rotary angles and positions per patch, row by row, and the patches by token.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` are [P, head_size / 2].
        ``pos_embed_index`` int64 and ``pos_embed_weight`` [P, 4] are the rows of the position table
        to sum, and their weights. ``merge_index`` int64 [P] has the patches of each token one after
        another. P is ``max_input_size``, with padding at the end, or the patches of ``grids``.
        """
        dtype = torch.promote_types(self.patch_embed.proj.weight.dtype, torch.float32)
        merge, side = self.config.spatial_merge_size, self.config.position_side
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        positions = merge_order_positions(grids, 1, rows)
        cos, sin = rotary_cos_sin(positions, self.config.head_size, self.config.rope_theta, dtype)
        index, weights = bilinear_taps(positions, grids, side, dtype)
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "pos_embed_index": index,
            "pos_embed_weight": weights,
            "merge_index": merge_order(grids, merge, rows),
        }


class Block(nn.Module):
    """SigLIP's block with rotary positions in its attention."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.attn = Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.mlp = MLP(sizes.hidden_size, sizes.intermediate_size, sizes.activation)

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return plain_parts(self, self.mlp.activation)


class Attention(nn.Module):
    """Full attention inside each image; fused qkv rows are [Q; K; V], head-major."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.num_heads, width = sizes.num_heads, sizes.hidden_size
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK = rotate(qkv_T3HK[:, :2], context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        v_THK = qkv_T3HK[:, 2]
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class Projector(nn.Module):
    """Normalises patches and projects the 2x2 patches of a token, which are neighbours."""

    def __init__(self, config: PaddleOCRVLConfig) -> None:
        super().__init__()
        self.width = width = config.hidden_size * config.spatial_merge_size**2
        self.pre_norm = nn.LayerNorm(config.hidden_size, eps=1e-5)
        self.linear_1 = nn.Linear(width, width)
        self.linear_2 = nn.Linear(width, config.out_hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        rows = self.pre_norm(patches).view(-1, self.width)
        return self.linear_2(F.gelu(self.linear_1(rows)))
