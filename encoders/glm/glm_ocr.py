"""The vision tower of GLM-OCR and GLM-5.3-Flash.

A pre-norm ViT over packed patches of any image size: 2D rotary positions, RMS norms of every head
of queries and keys, SwiGLU, full attention inside each frame pair, and a merger that takes 2x2
patches to one token. GLM-5.3-Flash clamps the two inner values of every SwiGLU.

Source: ``GlmOcrVisionModel`` and ``Glm5NextVisionModel`` of transformers 5.23.0.
Repo ids: zai-org/GLM-OCR, zai-org/GLM-5.3-Flash.

Shapes: P patches in merge-block order (T = P rows of attention), N = P/4 tokens, D width, H heads,
K head size, S segments.

Deliberate differences:

- ``last_hidden_state`` is the output of the last block, per patch; transformers gives this name to
  the tokens between the downsampling convolution and the merger.
- The patch embedding is a Linear over the stored Conv3d weight, which makes the same sums faster
  (``patch_product`` has times). A layer with LoRA or hooks is called as a module instead.
- RMS norms round once, after the weight; transformers rounds before it too.
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
from ..base.patch_encoder import PatchEncoder, longest_side, merge_order_positions
from ..block_parts import BlockParts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    find_type,
    read_epsilon,
    read_ratio,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.products import FlatPatchEmbed, patch_product
from ..layers.rotary import rotary_cos_sin, rotate
from ..layers.segments import RotarySegments

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class GlmOCRConfig:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    merger_size: int
    """The number of columns inside the MLP of the merger."""
    swiglu_limit: float | None = None
    """In a SwiGLU, ``gate`` is clamped to at most this before its activation, and ``up`` to plus or
    minus this (GLM-5.3-Flash); None: neither is clamped."""
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    rms_norm_eps: float = 1e-5
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
    def from_hf(cls, config: Mapping[str, object]) -> GlmOCRConfig:
        """Read the ``config.json`` of a checkpoint, the whole or only its vision section.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_act", "silu")
        require_value(vision, "attention_bias", True)
        width = read_size(vision, "out_hidden_size", default=1536)
        channels = read_size(vision, "in_channels", default=3)
        merger, limit = width * channels, None
        kind = find_type(config, vision)
        if kind.startswith("glm5_next") or (not kind and "swiglu_limit" in vision):
            merger = read_size(vision, "projection_intermediate_size", default=10240)
            limit = read_ratio(vision, "swiglu_limit", default=10)
        return cls(
            depth=read_size(vision, "depth", "num_hidden_layers", default=24, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=1024),
            intermediate_size=read_size(vision, "intermediate_size", default=4096),
            num_heads=read_size(vision, "num_heads", "num_attention_heads", default=16),
            out_hidden_size=width,
            merger_size=merger,
            swiglu_limit=limit,
            patch_size=read_size(vision, "patch_size", default=14),
            temporal_patch_size=read_size(vision, "temporal_patch_size", default=2),
            spatial_merge_size=read_size(vision, "spatial_merge_size", default=2),
            in_channels=channels,
            rms_norm_eps=read_epsilon(vision, "rms_norm_eps", default=1e-5),
            rope_theta=read_rope_theta(vision),
        )


class GlmOCREncoder(PatchEncoder):
    """Encodes packed patches of images to hidden states and merged tokens."""

    def __init__(self, config: GlmOCRConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: GlmOCRConfig = config
        self._preprocessor = preprocessor
        width, merge = config.hidden_size, config.spatial_merge_size
        self.patch_embed = FlatPatchEmbed(
            width, config.patch_size, config.in_channels, config.temporal_patch_size
        )
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.post_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.downsample = nn.Conv2d(width, config.out_hidden_size, merge, stride=merge)
        self.merger = Merger(config)

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor

        bounded = self.config.swiglu_limit is not None
        config = self.config
        sizes = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        return PatchPreprocessor.published("glm5_next" if bounded else "glm46v", *sizes)

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
        return EncoderOutput(hidden, self.merger(self._downsample(hidden)), ())

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
        positions = merge_order_positions(grids, merge, rows)
        side = longest_side(grids)
        cos, sin = rotary_cos_sin(positions, head, self.config.rope_theta, dtype, side)
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
        }

    def _downsample(self, hidden: Tensor) -> Tensor:
        """Merge patches [P, D] to tokens [N, out]; the 2x2 patches of a token are adjacent rows."""
        merge = self.config.spatial_merge_size
        groups = self.post_layernorm(hidden).unflatten(0, (-1, merge**2))
        return patch_product(self.downsample, groups.mT.flatten(1), (hidden.shape[1], merge, merge))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: GlmOCRConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return BlockParts(
            containers=(self, self.attn, self.mlp),
            norm1=self.norm1,
            qkv=self.attn.qkv,
            proj=self.attn.proj,
            norm2=self.norm2,
            gate=self.mlp.gate_proj,
            up=self.mlp.up_proj,
            down=self.mlp.down_proj,
            num_heads=self.attn.num_heads,
            activation="silu",
            gate_limit=self.mlp.limit,
            q_norm=self.attn.q_norm,
            k_norm=self.attn.k_norm,
            head_norms=True,
        )


class Attention(nn.Module):
    """Full attention inside each frame pair; fused qkv rows are [Q; K; V], head-major.

    All heads share one weight of the norm of queries, and one of the norm of keys.
    """

    def __init__(self, config: GlmOCRConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.head_size
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.q_norm = nn.RMSNorm(config.head_size, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_size)
        q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
        normed_T2HK = torch.stack((self.q_norm(q_THK), self.k_norm(k_THK)), 1)
        q_THK, k_THK = rotate(normed_T2HK, context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """SwiGLU with biases: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: GlmOCRConfig) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.limit))


class Merger(nn.Module):
    """The merger: linear layer, norm, GELU and gated MLP per token; only the norm has a bias."""

    def __init__(self, config: GlmOCRConfig) -> None:
        super().__init__()
        width, inner = config.out_hidden_size, config.merger_size
        self.limit = config.swiglu_limit
        self.proj = nn.Linear(width, width, bias=False)
        self.post_projection_norm = nn.LayerNorm(width, eps=1e-5)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.gelu(self.post_projection_norm(self.proj(tokens)))
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.limit))


def gated(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Return ``silu(gate) * up``, with gate at most ``limit``, and up within plus or minus it."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up
