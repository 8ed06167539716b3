"""The vision tower of GLM-4.1V, GLM-4.5V and GLM-4.6V.

A pre-norm ViT over packed patches of any image size: a learned 24x24 position table interpolated
bicubically to the grid, 2D rotary positions, RMS norms, SwiGLU, full attention inside each frame
pair, and a merger that takes 2x2 patches to one token.

Source: ``Glm4vVisionModel`` and ``Glm4vMoeVisionModel`` of transformers 5.23.0.
Repo ids: zai-org/GLM-4.1V-9B-{Base,Thinking}, zai-org/GLM-4.5V, zai-org/GLM-4.6V,
zai-org/GLM-4.6V-Flash.

Shapes: P patches in merge-block order (T = P rows of attention), N = P/4 tokens, D width, H heads,
K head size, S segments.

Deliberate differences:

- ``last_hidden_state`` is the output of the last block, per patch; transformers gives this name to
  the tokens between the downsampling convolution and the merger.
- The patch embedding is a Linear over the stored Conv3d weight, which makes the same sums faster
  (``patch_product`` has times). A layer with LoRA or hooks is called as a module instead.
- Position interpolation adds its sixteen taps in the tower's precision or float32, whichever is
  wider, and rounds to the tower's dtype once, both in eager runs and in graphs.
- RMS norms round once, after the weight; transformers rounds before it too.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
- Of a grid ``(t, h, w)``, positions repeat per frame pair; transformers' tower takes one row
  ``(1, h, w)`` per frame pair and raises for others.
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
    read_epsilon,
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
from ..layers.table_taps import grid_taps

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Glm4VConfig:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model.

    The MLPs of the blocks are ``intermediate_size`` wide (``out_hidden_size`` in ``config.json``),
    the MLP of the merger is ``merger_size`` wide (``intermediate_size`` in ``config.json``).
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    merger_size: int
    image_size: int = 336
    """The side in pixels of the square images that the table of positions was made for."""
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head size", self.head_size, "rotary axes * 2", 4)
        require_divisible("image_size", self.image_size, "patch_size", self.patch_size)

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
        """The size of a row of ``pixel_values``: channels * frames * height * width of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Glm4VConfig:
        """Read the ``config.json`` of a checkpoint, the whole or only its vision section.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_act", "silu")
        require_value(vision, "attention_bias", False)
        width = read_size(vision, "out_hidden_size", default=4096)
        return cls(
            depth=read_size(vision, "depth", "num_hidden_layers", default=24, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=1536),
            intermediate_size=width,
            num_heads=read_size(vision, "num_heads", "num_attention_heads", default=12),
            out_hidden_size=width,
            merger_size=read_size(vision, "intermediate_size", default=13696),
            image_size=read_size(vision, "image_size", default=336),
            patch_size=read_size(vision, "patch_size", default=14),
            temporal_patch_size=read_size(vision, "temporal_patch_size", default=2),
            spatial_merge_size=read_size(vision, "spatial_merge_size", default=2),
            in_channels=read_size(vision, "in_channels", default=3),
            rms_norm_eps=read_epsilon(vision, "rms_norm_eps", default=1e-5),
            rope_theta=read_rope_theta(vision),
        )


class Glm4VEncoder(PatchEncoder):
    """Encodes packed patches of images to hidden states and merged tokens."""

    def __init__(self, config: Glm4VConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Glm4VConfig = config
        self._preprocessor = preprocessor
        width, merge = config.hidden_size, config.spatial_merge_size
        self.patch_embed = FlatPatchEmbed(
            width, config.patch_size, config.in_channels, config.temporal_patch_size
        )
        self.post_conv_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.embeddings = Positions(config)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.post_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.downsample = nn.Conv2d(width, config.out_hidden_size, merge, stride=merge)
        self.merger = Merger(config)

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor

        config = self.config
        sizes = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        return PatchPreprocessor.published("glm4v", *sizes)

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
        """Embed and norm patches [P, patch_dim], and add interpolated positions, [P, D]."""
        weight = self.patch_embed.proj.weight
        patches = self.patch_embed(self._admit_patches(pixel_values, weight, metadata))
        taps, weights = metadata["pos_embed_index"], metadata["pos_embed_weight"]
        normed = self.post_conv_layernorm(patches)
        table = self.embeddings.position_embedding
        return self._add_weighted_rows(normed, table, taps, weights)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return rotary angles and positions per patch; the 2x2 patches of a token are neighbours.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` are [P, head_size / 2].
        ``pos_embed_index`` int64 and ``pos_embed_weight`` [P, 16] are the rows of the
        position table that are summed for a patch, and their weights. P is ``max_input_size``, with
        padding at the end, or the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.patch_embed.proj.weight.dtype, torch.float32)
        merge, head = self.config.spatial_merge_size, self.config.head_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        positions = merge_order_positions(grids, merge, rows)
        side = longest_side(grids)
        cos, sin = rotary_cos_sin(positions, head, self.config.rope_theta, dtype, side)
        index, weights = grid_taps(positions, grids, self.config.position_side, dtype)
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "pos_embed_index": index,
            "pos_embed_weight": weights,
        }

    def _downsample(self, hidden: Tensor) -> Tensor:
        """Merge patches [P, D] to tokens [N, out]; the 2x2 patches of a token are adjacent rows."""
        merge = self.config.spatial_merge_size
        groups = self.post_layernorm(hidden).unflatten(0, (-1, merge**2))
        return patch_product(self.downsample, groups.mT.flatten(1), (hidden.shape[1], merge, merge))


class Positions(nn.Module):
    """The learned table of positions, whose rows the encoder interpolates."""

    def __init__(self, config: Glm4VConfig) -> None:
        super().__init__()
        self.position_embedding = nn.Embedding(config.position_side**2, config.hidden_size)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: Glm4VConfig) -> None:
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
        )


class Attention(nn.Module):
    """Full attention inside each frame pair; fused qkv rows are [Q; K; V], head-major."""

    def __init__(self, config: Glm4VConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.head_size
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_size)
        q_THK, k_THK = rotate(qkv_T3HK[:, :2], context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        v_THK = qkv_T3HK[:, 2]
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, without biases."""

    def __init__(self, config: Glm4VConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Merger(nn.Module):
    """The merger: linear layer, norm, GELU and gated MLP per token; only the norm has a bias."""

    def __init__(self, config: Glm4VConfig) -> None:
        super().__init__()
        width, inner = config.out_hidden_size, config.merger_size
        self.proj = nn.Linear(width, width, bias=False)
        self.post_projection_norm = nn.LayerNorm(width, eps=1e-5)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.gelu(self.post_projection_norm(self.proj(tokens)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
