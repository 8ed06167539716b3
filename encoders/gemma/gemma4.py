"""The vision tower of Gemma 4 (E2B, E4B, 26B-A4B and 31B).

A ViT over packed patches of any image size: positions from a table per axis and 2D rotary
positions, norms before and after each branch, norms of queries, keys and values, and softmax
without a scale. A 3x3 mean makes the tokens. E2B and E4B clamp the input and the output of every
linear layer of the blocks; 26B-A4B and 31B standardise the tokens.

Source: ``Gemma4VisionModel``, ``Gemma4MultimodalEmbedder`` and ``Gemma4ImageProcessor`` of
transformers 5.23.0.
Repo ids: google/gemma-4-E2B-it, google/gemma-4-E4B-it, google/gemma-4-26B-A4B-it,
google/gemma-4-31B-it, and the same without ``-it``.

Shapes: P patches row by row (T = P rows of attention), N = P/9 tokens row by row, D width, H heads,
K head size. A frame of a video is an image.

Deliberate differences:

- ``pixel_values`` are ``2 * (x - 0.5)`` of the source's, which computes this in the tower. So they
  are rounded to the tower's dtype once, in CUDA graphs too.
- The rotation multiplies in float32 or wider and rounds to the tower's dtype once. The source
  rounds cos and sin to the tower's dtype first.
- The mean of a token, its factor and its standardisation are computed in float32 or wider and
  rounded once. The source rounds the mean to the tower's dtype, too.
- Images are packed; the source pads each to the most patches that it may have.
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
from ..block_parts import BlockParts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_flag,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.bounded_linear import make_linear
from ..layers.rotary import rotary_cos_sin
from ..layers.segments import RotarySegments

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Gemma4Config:
    """Sizes of a vision tower, and of the projector to the language model if there is one."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_size: int
    out_hidden_size: int | None = None
    """Width of the language model; None: there is no projector."""
    bounded_linears: bool = False
    """Whether the linear layers of the blocks clamp their inputs and outputs to stored bounds."""
    standardize: bool = False
    position_embedding_size: int = 10240
    """The number of entries per axis (row or column) of the table of positions."""
    patch_size: int = 16
    pooling_kernel_size: int = 3
    rope_theta: float = 100.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head_dim", self.head_size, "rotary axes * 2", 4)

    @property
    def spatial_merge_size(self) -> int:
        """The number of patches on a side of the square that becomes one token."""
        return self.pooling_kernel_size

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: height * width * channels of a patch."""
        return 3 * self.patch_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Gemma4Config:
        """Read the ``config.json`` of a checkpoint, the whole or only its vision section.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_activation", "gelu_pytorch_tanh")
        require_value(vision, "attention_bias", False, None)
        heads = read_size(vision, "num_attention_heads", default=12)
        require_value(vision, "num_key_value_heads", heads, default=12)
        text = find_section(config, "text_config")
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=16, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=768),
            intermediate_size=read_size(vision, "intermediate_size", default=3072),
            num_heads=heads,
            head_size=read_size(vision, "head_dim", default=64),
            out_hidden_size=None if text is config else read_size(text, "hidden_size"),
            bounded_linears=read_flag(vision, "use_clipped_linears", default=False),
            standardize=read_flag(vision, "standardize", default=False),
            position_embedding_size=read_size(vision, "position_embedding_size", default=10240),
            patch_size=read_size(vision, "patch_size", default=16),
            pooling_kernel_size=read_size(vision, "pooling_kernel_size", default=3),
            rope_theta=read_rope_theta({"rope_theta": 100.0, **vision, "head_dim": None}),
            rms_norm_eps=read_epsilon(vision, "rms_norm_eps", default=1e-6),
        )


class Gemma4Encoder(RasterEncoder):
    """Encodes packed patches of images to hidden states and pooled tokens."""

    std_bias: Tensor
    std_scale: Tensor

    def __init__(self, config: Gemma4Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Gemma4Config = config
        self._preprocessor = preprocessor
        self.patch_embed = nn.Linear(config.patch_dim, config.hidden_size, bias=False)
        table = torch.randn(2, config.position_embedding_size, config.hidden_size)
        self.position_embedding_table = nn.Parameter(table)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        if config.standardize:
            self.register_buffer("std_bias", torch.zeros(config.hidden_size))
            self.register_buffer("std_scale", torch.ones(config.hidden_size))
        projected = config.out_hidden_size is not None
        self.embed_vision = Projector(config) if projected else nn.Identity()

    def _default_preprocessor(self) -> Preprocessor:
        from .gemma4_pixels import SoftTokenPreprocessor

        return SoftTokenPreprocessor.gemma4(self.config.patch_size, self.config.pooling_kernel_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to N tokens.

        Returns:
            ``last_hidden_state`` [P, D], ``pooler_output`` [N, out] ([N, D] without a projector),
            no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        tokens = self._pool(hidden, metadata["pool_index"])
        return EncoderOutput(hidden, self.embed_vision(tokens), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], and add the positions of their column and row, [P, D]."""
        table = self.position_embedding_table
        patches: Tensor = self.patch_embed(self._admit_patches(pixel_values, table, metadata))
        columns, rows = table.unbind()
        x, y = metadata["position_ids"].unbind(1)
        return patches + (F.embedding(x, columns) + F.embedding(y, rows))

    @property
    def out_features(self) -> int:
        """The number of columns of ``pooler_output``."""
        return self.config.out_hidden_size or self.config.hidden_size

    def grid_for(self, tokens: int) -> Grid:
        """Return the grid (t, h, w) of one item of exactly ``tokens`` tokens.

        The item is one image or, if its width would be over ``position_embedding_size`` patches, a
        video of ``tokens`` frames of one token each.
        """
        side, (_, h, w) = self.config.pooling_kernel_size, super().grid_for(tokens)
        return (1, h, w) if w <= self.config.position_embedding_size else (tokens, side, side)

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> RotarySegments:
        """Return the tensors that all blocks read: rotary angles, offsets of segments, padding."""
        return RotarySegments.of(metadata, repeated=False)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return rotary angles and positions per patch, and the patches of each token.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` are [P, head_size / 2], the columns'
        angles first. ``position_ids`` int64 [P, 2] are column and row, ``pool_index`` int64 [N, 9]
        the patches of each token. P is ``max_input_size``, with padding at the end, or the number
        of patches of ``grids``.
        """
        dtype = torch.promote_types(self.position_embedding_table.dtype, torch.float32)
        side, max_side = self.config.pooling_kernel_size, self.config.position_embedding_size
        for _, h, w in grids:
            if max(h, w) > max_side:
                raise ValueError(
                    f"grid {h}x{w}: a side must have at most position_embedding_size={max_side} "
                    "patches; resize the image"
                )
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, side**2)
        positions = merge_order_positions(grids, 1, rows).flip(1)
        cos, sin = rotary_cos_sin(positions, self.config.head_size, self.config.rope_theta, dtype)
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "position_ids": positions,
            "pool_index": merge_order(grids, side, rows).view(-1, side**2),
        }

    def _pool(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Return tokens [N, D]: means of patches ``index`` [N, 9], scaled and standardised."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        tokens: Tensor = hidden[index].mean(1, dtype=dtype) * self.config.hidden_size**0.5
        if self.config.standardize:
            tokens = (tokens - self.std_bias.to(dtype)) * self.std_scale.to(dtype)
        return tokens.to(hidden.dtype)


class Block(nn.Module):
    """Attention and MLP with a norm before and after each, added to the residual."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm1 = nn.RMSNorm(width, eps=eps)
        self.attn = Attention(config)
        self.post_norm1 = nn.RMSNorm(width, eps=eps)
        self.norm2 = nn.RMSNorm(width, eps=eps)
        self.mlp = MLP(config)
        self.post_norm2 = nn.RMSNorm(width, eps=eps)

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = hidden + self.post_norm1(self.attn(self.norm1(hidden), context))
        return hidden + self.post_norm2(self.mlp(self.norm2(hidden)))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        attn, mlp = self.attn, self.mlp
        if (type(self), type(attn), type(mlp)) != (Block, Attention, MLP):
            return None
        return BlockParts(
            containers=(self, attn, mlp),
            norm1=self.norm1,
            qkv=attn.qkv,
            proj=attn.proj,
            post_norm1=self.post_norm1,
            norm2=self.norm2,
            gate=mlp.gate_proj,
            up=mlp.up_proj,
            down=mlp.down_proj,
            post_norm2=self.post_norm2,
            num_heads=attn.num_heads,
            activation="gelu_tanh",
            q_norm=attn.q_norm,
            k_norm=attn.k_norm,
            v_norm=attn.v_norm,
            head_norms=True,
            softmax_scale=1.0,
            rotary_pair_distance=attn.head_size // 4,
        )


class Attention(nn.Module):
    """Full attention inside each image; rows of the fused qkv are [Q; K; V], head-major."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.num_heads, self.head_size = config.num_heads, config.head_size
        size, eps = config.head_size, config.rms_norm_eps
        inner = config.num_heads * size
        self.qkv = make_linear(config.hidden_size, 3 * inner, 3, bounded=config.bounded_linears)
        self.q_norm = nn.RMSNorm(size, eps=eps)
        self.k_norm = nn.RMSNorm(size, eps=eps)
        self.v_norm = nn.RMSNorm(size, eps=eps, elementwise_affine=False)
        self.proj = make_linear(inner, config.hidden_size, bounded=config.bounded_linears)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_size)
        q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
        cos, sin, *offsets = context
        root = self.head_size**0.5  # cancels 1/sqrt(K) in attention
        q_THK = rotate(self.q_norm(q_THK), cos * root, sin * root)
        k_THK = rotate(self.k_norm(k_THK), cos, sin)
        out_THK = attention(q_THK, k_THK, self.v_norm(v_THK), *offsets)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """GeGLU: ``down(gelu_tanh(gate(x)) * up(x))``."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        bounded = config.bounded_linears
        self.gate_proj = make_linear(width, inner, bounded=bounded)
        self.up_proj = make_linear(width, inner, bounded=bounded)
        self.down_proj = make_linear(inner, width, bounded=bounded)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class Projector(nn.Module):
    """Normalises tokens and brings them to the width of the language model."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        width, out = config.hidden_size, config.out_hidden_size
        assert out is not None
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps, elementwise_affine=False)
        self.embedding_projection = nn.Linear(width, out, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding_projection(self.norm(tokens))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate columns i and i + K/4 of each half of a head of ``x`` [T, H, K] by the same angle.

    ``cos`` and ``sin`` are [T, 1, 1, K/2] in float32 or wider; the result has the dtype of ``x``.
    """
    first, second = x.unflatten(-1, (2, 2, -1)).unbind(-2)
    cos, sin = (by_angle.unflatten(-1, (2, -1)).squeeze(1) for by_angle in (cos, sin))
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(rotated, -2).flatten(-3).to(x.dtype)
