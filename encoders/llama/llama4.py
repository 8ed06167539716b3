"""The vision tower of Llama 4 Scout and Maverick: a ViT over tiles, and pixel shuffle to tokens.

A pre-norm ViT over tiles of 336x336 pixels and the whole image at that size: a class token, learned
positions and 2D rotary positions, layer norms before the first block and after the last; then 2x2
pixel shuffle, an MLP, and a projection to the width of the language model.

Source: ``Llama4VisionModel`` and ``Llama4MultiModalProjector`` of transformers 5.23.0.
Repo ids: meta-llama/Llama-4-Scout-17B-16E, meta-llama/Llama-4-Maverick-17B-128E, with or without
-Instruct.

Shapes: B tiles of n = 1 + h*w rows (class token first), T = B*n rows of attention, D width,
H heads, K head size, N = B*h*w/4 tokens.

Deliberate differences:

- The class token is the first row of a tile, as in the other towers; the source puts it last. The
  table of positions keeps the order of the checkpoint: the row of the class token is its last.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
- Tiles of another size than in the config are accepted: their learned positions are resized
  bicubically in float32 or wider, and rotary positions count rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.checks import check_rows, require_metadata
from ..base.tile_encoder import TileEncoder
from ..block_parts import BlockParts, plain_parts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.blocks import MLP, resize_table
from ..layers.rotary import rotate_pairs
from ..layers.segments import RotarySegments, TileSegments

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Llama4Config:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    num_heads: int
    tile_size: int
    adapter_size: int
    """Width of both layers of the MLP after the pixel shuffle."""
    out_hidden_size: int
    patch_size: int = 14
    in_channels: int = 3
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head size", self.head_size, "rotary axes * 2", 4)
        require_divisible("image_size", self.tile_size, "patch_size * 2", self.patch_size * 2)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Llama4Config:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_act", "gelu")
        require_value(vision, "norm_eps", 1e-5)
        require_value(vision, "pixel_shuffle_ratio", 0.5)
        require_value(vision, "multi_modal_projector_bias", False)
        require_value(vision, "vision_feature_layer", -1)
        require_value(vision, "vision_feature_select_strategy", "default")
        width = read_size(vision, "hidden_size", default=768)
        # transformers takes "intermediate_size" for the MLP and for the columns after the pixel
        # shuffle, which are always 4 * width.
        require_value(vision, "intermediate_size", 4 * width, default=5632)
        adapter = read_size(vision, "projector_output_dim", default=4096)
        require_value(vision, "projector_input_dim", adapter, default=4096)
        require_value(vision, "vision_output_dim", adapter, default=7680)
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=34, limit=1024),
            hidden_size=width,
            num_heads=read_size(vision, "num_attention_heads", default=16),
            tile_size=read_size(vision, "image_size", default=448),
            adapter_size=adapter,
            out_hidden_size=read_size(find_section(config, "text_config"), "hidden_size"),
            patch_size=read_size(vision, "patch_size", default=14),
            in_channels=read_size(vision, "num_channels", default=3),
            rope_theta=read_rope_theta(vision),
        )


class Llama4Encoder(TileEncoder):
    """Encodes tiles to hidden states (class token first) and projected tokens."""

    prefix_rows = 1
    class_token = True
    _grid_multiple = 2

    def __init__(self, config: Llama4Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Llama4Config = config
        self._preprocessor = preprocessor
        width, adapter, patch = config.hidden_size, config.adapter_size, config.patch_size
        self.patch_embed = nn.Linear(config.in_channels * patch**2, width, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.pos_embed = nn.Parameter(torch.randn((config.tile_size // patch) ** 2 + 1, width))
        self.norm_pre = nn.LayerNorm(width, eps=1e-5)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.adapter = Adapter(4 * width, adapter)
        self.projector = nn.Linear(adapter, config.out_hidden_size, bias=False)

    def _default_preprocessor(self) -> Preprocessor:
        from .llama4_pixels import CanvasPreprocessor

        return CanvasPreprocessor(self.config.patch_size, image_size=self.config.tile_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B tiles of n rows each (class token, patches) to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D] before the last norm, ``pooler_output`` [N, out], no
            DeepStack features, ``"prefix"`` [B, 1, D], the class token after the last norm.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        h = pixel_values.shape[2] // self.config.patch_size
        normed = self.norm(hidden)
        squares = rearrange(normed[:, 1:], "b (r x c y) d -> (b r c) (x y d)", r=h // 2, x=2, y=2)
        tokens = self.projector(self.adapter(squares))
        return EncoderOutput(hidden, tokens, (), {"prefix": normed[:, :1]})

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed tiles [B, C, H, W] as a class token and patches with positions, [B, n, D]."""
        pixels = self._admit_tiles(pixel_values, self.class_embedding)
        patch = self.config.patch_size
        h, w = (size // patch for size in pixels.shape[2:])
        patches = rearrange(pixels, "b c (h p) (w q) -> b (h w) (c p q)", p=patch, q=patch)
        cls = self.class_embedding.expand(pixels.shape[0], 1, -1)
        rows = torch.cat((cls, self.patch_embed(patches)), dim=1)
        table = self.pos_embed
        positions = torch.cat((table[-1:], resize_table(table[:-1], h, w, antialias=False)))
        return self.norm_pre(rows + positions)

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> RotarySegments:
        """Return the tensors that all blocks read: rotary angles, offsets of segments, padding."""
        require_metadata(metadata, "rotary_pos_emb_cos")
        cos, sin = metadata["rotary_pos_emb_cos"], metadata["rotary_pos_emb_sin"]
        segments = TileSegments.of(metadata, hidden)
        if hidden.shape[0]:
            check_rows(hidden.shape[1], cos.shape[0], "per tile but encoder_metadata is for")
        return RotarySegments(cos[:, None, None], sin[:, None, None], *segments)

    def _token_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of tokens of a tile of ``h`` x ``w`` patches: half of each."""
        return h // 2, w // 2

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the rotary cos and sin [n, K/2] of one tile, which all tiles share."""
        h, w = self._shared_grid(grids, max_input_size)
        dtype = torch.promote_types(self.class_embedding.dtype, torch.float32)
        cos, sin = rotary_cos_sin(h, w, self.config.head_size, self.config.rope_theta, dtype)
        return {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: Llama4Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-5)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-5)
        self.mlp = MLP(config.hidden_size, 4 * config.hidden_size, "gelu")

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return plain_parts(self, "gelu")._replace(rotary_pair_distance=1)


class Attention(nn.Module):
    """Full attention inside each tile; fused qkv rows are [Q; K; V], head-major."""

    def __init__(self, config: Llama4Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        cos, sin, *segments = context
        qkv_Bn3HK = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK = rotate_pairs(qkv_Bn3HK[:, :, :2], cos, sin).flatten(0, 1).unbind(1)
        v_THK = qkv_Bn3HK[:, :, 2].flatten(0, 1)
        out_THK = attention(q_THK, k_THK, v_THK, *segments, segment_rows=x.shape[1])
        out: Tensor = self.proj(out_THK.flatten(1))
        return out.view_as(x)


class Adapter(nn.Module):
    """Two linear layers without bias, each followed by exact GELU."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, out, bias=False)
        self.fc2 = nn.Linear(out, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc2(F.gelu(self.fc1(x))))


def rotary_cos_sin(
    h: int, w: int, head_size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1 + h*w, K/2] of rotary angles, half by column, then half by row.

    Rows and columns of the ``h`` x ``w`` patches of a tile count from 1; the class token, which
    comes first, is not rotated. K is ``head_size``, ``theta`` the base.
    """
    exponents = torch.arange(0, head_size // 2, 2, dtype=dtype, device="cpu")
    turns = theta ** (exponents / (head_size // 2))
    rows = torch.arange(1, h + 1, dtype=dtype, device="cpu")[:, None, None] / turns
    columns = torch.arange(1, w + 1, dtype=dtype, device="cpu")[None, :, None] / turns
    angles = torch.cat((columns.expand(h, -1, -1), rows.expand(-1, w, -1)), dim=-1).flatten(0, 1)
    angles = F.pad(angles, (0, 0, 1, 0))
    return angles.cos(), angles.sin()
