"""The vision tower of MiniMax-M3: a ViT with rotary positions in time, height and width.

A pre-norm ViT over packed patches of any image size, without learned positions: a layer norm after
the patch embedding and none after the last block. Most columns of a head are rotated by frame, row
and column; the rest are not. Up to four frame pairs of a clip attend to each other. An MLP projects
each patch to the width of the language model, and another one turns 2x2 of them into one token.

Source: ``MiniMaxM3VLVisionModel`` and ``MiniMaxM3VLMultiModalProjector`` of transformers 5.23.0.
Repo ids: MiniMaxAI/MiniMax-M3.

Shapes: P patches in merge-block order, N tokens, D width, H heads, K head size, T packed rows of
a block. The columns of a head are rotated in pairs; the last ones are not rotated.

Deliberate differences:

- An item is a whole clip of t frame pairs, split into segments of four; the source takes one
  item per segment, which works here, too.
- The patch embedding is a Linear over the stored Conv3d weight, the same sums. A layer with LoRA or
  hooks is called as a module instead.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import PatchEncoder, merge_order_positions
from ..block_parts import BlockParts, plain_parts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_rope_theta,
    read_size,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.products import FlatPatchEmbed
from ..layers.segments import RotarySegments

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class MiniMaxM3Config:
    """Sizes of tower and projector; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    projector_size: int
    """Width of the inner layers of the two MLPs of the projector."""
    out_hidden_size: int
    segment_frames: int = 4
    """The most frame pairs of a clip that attend to each other."""
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    layer_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        if self.head_size < 6:
            raise ValueError(f"config: head size={self.head_size} must be at least 6: three axes")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * frames * height * width of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> MiniMaxM3Config:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        merging = find_section(vision, "img_token_compression_config")
        require_value(vision, "hidden_act", "gelu")
        require_value(vision, "position_embedding_type", "rope")
        require_value(vision, "rope_mode", "3d")
        require_value(merging, "image_token_compression_method", "patch_merge")
        require_value(config, "projector_hidden_act", "gelu")
        require_value(config, "multimodal_projector_bias", True)
        require_value(config, "vision_feature_layer", -1)
        require_value(config, "vision_feature_select_strategy", "full")
        frames = {"vision_segment_max_frames": 4, **vision}
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=32, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=1280),
            intermediate_size=read_size(vision, "intermediate_size", default=5120),
            num_heads=read_size(vision, "num_attention_heads", default=16),
            projector_size=read_size(config, "projector_hidden_size", default=6144),
            out_hidden_size=read_size(find_section(config, "text_config"), "hidden_size"),
            segment_frames=read_size(frames, "vision_segment_max_frames", limit=1024),
            patch_size=read_size(vision, "patch_size", default=14),
            temporal_patch_size=read_size(merging, "temporal_patch_size", default=2, limit=64),
            spatial_merge_size=read_size(merging, "spatial_merge_size", default=2, limit=64),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-5),
            rope_theta=read_rope_theta(vision),
        )


class MiniMaxM3Encoder(PatchEncoder):
    """Encodes packed patches of images to hidden states and projected tokens."""

    def __init__(self, config: MiniMaxM3Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: MiniMaxM3Config = config
        self._preprocessor = preprocessor
        self._segment_frames = config.segment_frames
        side, channels, frames = config.patch_size, config.in_channels, config.temporal_patch_size
        self.patch_embed = FlatPatchEmbed(config.hidden_size, side, channels, frames, bias=False)
        self.norm_pre = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.projector = Projector(config)

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor

        config = self.config
        sizes = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        return PatchPreprocessor.published("minimax_m3", *sizes)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to N tokens.

        Returns:
            ``last_hidden_state`` [P, D], ``pooler_output`` [N, out], no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        return EncoderOutput(hidden, self.projector(hidden), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim] as normed rows [P, D]."""
        weight = self.patch_embed.proj.weight
        patches = self._admit_patches(pixel_values, weight, metadata)
        return self.norm_pre(self.patch_embed(patches))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` [P, pairs], a row per patch.

        The 2x2 patches of a token are neighbours. P is ``max_input_size``, with padding at the
        end, or the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.patch_embed.proj.weight.dtype, torch.float32)
        merge = self.config.spatial_merge_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        positions = torch.cat(
            (frame_numbers(grids, rows)[:, None], merge_order_positions(grids, merge, rows)), 1
        )
        cos, sin = rotary_cos_sin(positions, self.config.head_size, self.config.rope_theta, dtype)
        return {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return plain_parts(self, "gelu")


class Attention(nn.Module):
    """Full attention inside each segment (4 frame pairs); fused qkv is [Q; K; V], head-major."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK = rotate(qkv_T3HK[:, :2], context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        v_THK = qkv_T3HK[:, 2]
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """Two linear layers with exact GELU between them."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Projector(nn.Module):
    """Projects each patch by one MLP, then the 2x2 patches of a token, concatenated, by another."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        inner, out = config.projector_size, config.out_hidden_size
        self.merged_width = out * config.spatial_merge_size**2
        self.linear_1 = nn.Linear(config.hidden_size, inner)
        self.linear_2 = nn.Linear(inner, out)
        self.merge_linear_1 = nn.Linear(self.merged_width, inner)
        self.merge_linear_2 = nn.Linear(inner, out)

    def forward(self, patches: Tensor) -> Tensor:
        tokens = self.linear_2(F.gelu(self.linear_1(patches))).view(-1, self.merged_width)
        return self.merge_linear_2(F.gelu(self.merge_linear_1(tokens)))


def frame_numbers(segments: Sequence[Grid], rows: int) -> Tensor:
    """Return the index of each patch's frame pair in its segment, int64 [rows].

    ``segments`` are ``(t, h, w)`` in patches; rows beyond them are padding, with index 0.
    """
    numbers = torch.zeros(rows, dtype=torch.int64, device="cpu")
    start = 0
    for t, h, w in segments:
        item_numbers = torch.arange(t, device="cpu").repeat_interleave(h * w)
        numbers[start : start + len(item_numbers)] = item_numbers
        start += len(item_numbers)
    return numbers


def rotary_cos_sin(
    positions: Tensor, head_size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [P, pairs] of the angles of ``positions`` [P, 3]: frame pair, row, column.

    A head has 3 * (head_size // 6) pairs of columns that are rotated; ``theta`` is the base.
    """
    columns = 2 * (head_size // 3 // 2)
    exponents = torch.arange(0, columns, 2, dtype=dtype, device=positions.device)
    turns = theta ** (exponents / columns)
    angles = (positions[:, :, None].to(dtype) / turns).flatten(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate columns i and i + pairs of queries and keys ``x`` [T, ..., K] by a row's angle i.

    ``cos`` and ``sin`` are [T, 1, 1, 2*pairs]: ``RotarySegments.of`` has repeated the values of the
    angles and negated the first half of ``sin``. Columns from 2*pairs on are not rotated.
    """
    rotated, unrotated = x.tensor_split((cos.shape[-1],), dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.cat((torch.addcmul(rotated * cos, swapped, sin).to(x.dtype), unrotated), dim=-1)
