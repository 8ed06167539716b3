"""The vision tower of Qwen2-VL.

A pre-norm ViT over packed patches of any image size: 2D rotary positions, full attention inside
each frame pair, and a 2x2 merger into the language model's width.

Source: ``Qwen2VisionTransformerPretrainedModel`` of transformers 5.23.0.
Repo ids: Qwen/Qwen2-VL-{2B,7B,72B}-Instruct, Qwen/Qwen2-VL-{2B,7B,72B}.

Shapes: P patches in merge-block order (T = P rows of attention), N = P/4 tokens, D width, H heads,
K head size, S segments.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv3d weight, which makes the same sums faster
  (``patch_product`` has times). A layer with LoRA or hooks is called as a module instead.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
- Config fields have one meaning in every file here: ``hidden_size`` is the tower's width
  (``embed_dim`` in ``config.json``) and ``out_hidden_size`` is the language model's width
  (``hidden_size`` in ``config.json``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import PatchEncoder, longest_side, merge_order_positions
from ..block_parts import BlockParts, plain_parts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_ratio,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.products import FlatPatchEmbed
from ..layers.rotary import rotary_cos_sin, rotate
from ..layers.segments import RotarySegments

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Qwen2VLConfig:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head size", self.head_size, "rotary axes * 2", 4)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * frames * height * width of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Qwen2VLConfig:
        """Read a checkpoint's ``config.json``, or its vision section; missing fields get defaults.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_act", "quick_gelu")
        width = read_size(vision, "embed_dim", default=1280)
        return cls(
            depth=read_size(vision, "depth", "num_hidden_layers", default=32, limit=1024),
            hidden_size=width,
            intermediate_size=int(width * read_ratio(vision, "mlp_ratio", default=4)),
            num_heads=read_size(vision, "num_heads", "num_attention_heads", default=16),
            out_hidden_size=read_size(vision, "hidden_size", default=3584),
            patch_size=read_size(vision, "patch_size", "spatial_patch_size", default=14),
            temporal_patch_size=read_size(vision, "temporal_patch_size", default=2),
            spatial_merge_size=read_size(vision, "spatial_merge_size", default=2),
            in_channels=read_size(vision, "in_channels", "in_chans", default=3),
            rope_theta=read_rope_theta(vision),
        )


class Qwen2VLEncoder(PatchEncoder):
    """Encodes packed patches of images to hidden states and merged tokens."""

    def __init__(self, config: Qwen2VLConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Qwen2VLConfig = config
        self._preprocessor = preprocessor
        side, channels, frames = config.patch_size, config.in_channels, config.temporal_patch_size
        self.patch_embed = FlatPatchEmbed(config.hidden_size, side, channels, frames, bias=False)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.merger = Merger(config)

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor

        config = self.config
        sizes = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        return PatchPreprocessor.published("qwen2_vl", *sizes)

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
        return EncoderOutput(hidden, self.merger(hidden), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim] as rows [P, D]."""
        weight = self.patch_embed.proj.weight
        return self.patch_embed(self._admit_patches(pixel_values, weight, metadata))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` [P, K/2], a row per patch.

        The 2x2 patches of a token are neighbours. P is ``max_input_size``, with padding at the
        end, or the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.patch_embed.proj.weight.dtype, torch.float32)
        merge, head = self.config.spatial_merge_size, self.config.head_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        positions, side = merge_order_positions(grids, merge, rows), longest_side(grids)
        cos, sin = rotary_cos_sin(positions, head, self.config.rope_theta, dtype, side)
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
        }


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return plain_parts(self, "quick_gelu")


class Attention(nn.Module):
    """Full attention inside each frame pair; fused qkv rows are [Q; K; V], head-major."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.head_size
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_size)
        q_THK, k_THK = rotate(qkv_T3HK[:, :2], context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        v_THK = qkv_T3HK[:, 2]
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """Two linear layers with quick GELU, ``x * sigmoid(1.702 x)``, between them."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))


class Merger(nn.Module):
    """Normalises each patch and turns four neighbouring patches into one token."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(self.width, self.width),
            nn.GELU(),
            nn.Linear(self.width, config.out_hidden_size),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(self.ln_q(hidden).view(-1, self.width))
