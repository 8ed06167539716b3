"""InternViT (300M and 6B), the vision tower of InternVL 1.5 to 3.5, with its pixel-shuffle
projector.

A pre-norm ViT over square tiles: a class token, learned positions, layer scale, layer norm (300M)
or RMS norm with normalised queries and keys (6B); then 2x2 pixel shuffle and the ``mlp1``
projector.

Source: ``InternVisionModel`` of OpenGVLab/InternVL at commit 2d93b09 (also the remote code of the
published repos) and ``InternVLVisionModel`` of transformers 5.23.0.
Repo ids: OpenGVLab/InternViT-{300M-448px,300M-448px-V2_5,6B-448px-V1-5,6B-448px-V2_5},
OpenGVLab/InternVL2-*, InternVL2_5-*, InternVL3-*, InternVL3_5-* (with or without -hf / -HF).

Shapes: B tiles of n = 1 + h*w rows (class token first), T = B*n rows of attention, D width,
H heads, K head size, N = B*h*w/4 tokens.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product. A
  layer with LoRA or hooks is called as a module instead.
- Layer scale with residual, and RMS norm with weight, round once; the source rounds twice.
- Positions for other tile sizes are interpolated in float32 or wider and added in the tower's
  dtype.
- Blocks after ``select_layer`` are loaded (strictly) and not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.tile_encoder import TileEncoder
from ..block_parts import BlockParts, plain_parts
from ..data import EncoderOutput, GridLike, Metadata
from ..hf_config import (
    find_section,
    find_type,
    read_choice,
    read_epsilon,
    read_flag,
    read_layer,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.blocks import resize_table
from ..layers.products import patch_product
from ..layers.segments import TileSegments

if TYPE_CHECKING:
    from ..contract import Preprocessor

_CONVERTED = ("internvl", "internvl_vision", "interns1", "interns1_vision")
"""Values of ``model_type`` in configs with the names and defaults of transformers' classes."""


@dataclass(frozen=True)
class InternViTConfig:
    """Sizes of a tower, its tiling and, unless ``out_hidden_size`` is None, its projector."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    image_size: int
    qkv_bias: bool
    qk_normalization: bool
    norm_type: str
    out_hidden_size: int | None
    layer_norm_eps: float = 1e-6
    patch_size: int = 14
    in_channels: int = 3
    select_layer: int = -1
    ps_version: str = "v2"
    min_dynamic_patch: int = 1
    max_dynamic_patch: int = 12
    use_thumbnail: bool = True
    dynamic_image_size: bool = True
    tile_size: int = 448

    def __post_init__(self) -> None:
        require_sizes(vars(self), signed="select_layer")
        require_divisible("image_size", self.image_size, "patch_size", self.patch_size)
        require_divisible("tile size", self.tile_size, "patch_size * 2", self.patch_size * 2)
        if not 0 <= self.blocks_run <= self.depth:
            rule = f"must be from {-self.depth - 1} to {self.depth}, a hidden state of the tower"
            raise ValueError(f"config: select_layer={self.select_layer} {rule}")

    @property
    def blocks_run(self) -> int:
        """The number of blocks that ``forward`` runs, up to the hidden state ``select_layer``."""
        return self.select_layer if self.select_layer >= 0 else self.depth + 1 + self.select_layer

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> InternViTConfig:
        """Read the ``config.json`` of a chat model, of its -hf repo, or of InternViT alone.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        chat = "vision_config" in config
        kind = find_type(config, vision)
        qianfan = kind in ("qianfan_ocr", "qianfan_ocr_vision")
        converted = qianfan or kind in _CONVERTED or "use_qk_norm" in vision
        require_value(vision, "hidden_act", "gelu")
        require_value(vision, "use_mean_pooling", True)
        require_value(vision, "use_absolute_position_embeddings", True)
        require_value(vision, "use_mask_token", False)
        require_value(config, "downsample_ratio", 0.5)
        require_value(config, "projector_hidden_act", "gelu")
        require_value(config, "vision_feature_select_strategy", "default")
        # Original and converted configs have different defaults.
        depth, width, inner, heads = (24, 1024, 4096, 16) if converted else (48, 3200, 12800, 25)
        norms, versions = ("rms_norm", "layer_norm"), ("v1", "v2")
        qk_norm = not converted
        image_size = read_size(vision, "image_size", default=448 if converted else 224)
        tiling = chat and not converted  # a -hf repo describes tiling in its processor files
        language = find_section(config, "llm_config", "text_config")
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=depth, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=width),
            intermediate_size=read_size(vision, "intermediate_size", default=inner),
            num_heads=read_size(vision, "num_attention_heads", default=heads),
            image_size=image_size,
            qkv_bias=read_flag(vision, "qkv_bias", "attention_bias", default=qianfan),
            qk_normalization=read_flag(vision, "qk_normalization", "use_qk_norm", default=qk_norm),
            norm_type=read_choice(vision, "norm_type", *norms, default=norms[converted]),
            out_hidden_size=read_size(language, "hidden_size") if chat else None,
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
            patch_size=read_size(vision, "patch_size", default=14),
            in_channels=read_size(vision, "num_channels", "in_chans", default=3),
            select_layer=read_layer(config, "select_layer", "vision_feature_layer", default=-1),
            ps_version=read_choice(config, "ps_version", *versions, default=versions[not tiling]),
            min_dynamic_patch=read_size(config, "min_dynamic_patch", default=1),
            max_dynamic_patch=read_size(config, "max_dynamic_patch", default=6 if tiling else 12),
            use_thumbnail=read_flag(config, "use_thumbnail", default=not tiling),
            dynamic_image_size=read_flag(config, "dynamic_image_size", default=not tiling),
            tile_size=read_size(config, "force_image_size", default=image_size),
        )


class InternViT(TileEncoder):
    """Encodes tiles to hidden states (class token first) and projected tokens."""

    prefix_rows = 1
    class_token = True
    _grid_multiple = 2

    def __init__(self, config: InternViTConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: InternViTConfig = config
        self._preprocessor = preprocessor
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.mlp1 = projector(config)

    def _default_preprocessor(self) -> Preprocessor:
        from .intern_vit_pixels import TilePreprocessor

        return TilePreprocessor(
            image_size=self.config.tile_size,
            patch_size=self.config.patch_size,
            min_tiles=self.config.min_dynamic_patch,
            max_tiles=self.config.max_dynamic_patch,
            use_thumbnail=self.config.use_thumbnail,
            dynamic=self.config.dynamic_image_size,
        )

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B tiles of n rows each (class token, patches) to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D], ``pooler_output`` [N, out], no DeepStack features,
            ``"prefix"`` [B, 1, D], the class token.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata, stop=self.config.blocks_run):
            hidden = block(hidden)
        h, w = (size // self.config.patch_size for size in pixel_values.shape[2:])
        tokens = self.mlp1(pixel_shuffle(hidden[:, 1:], h, w, self.config.ps_version))
        return EncoderOutput(hidden, tokens, (), {"prefix": hidden[:, :1]})

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed tiles [B, C, H, W] as a class token and patches with positions, [B, n, D]."""
        return self.embeddings(self._admit_tiles(pixel_values, self.embeddings.class_embedding))

    @property
    def _blocks_run(self) -> int:
        return self.config.blocks_run

    @property
    def blocks(self) -> nn.ModuleList:
        """All blocks of the tower, including those after ``select_layer``, which ``forward`` does
        not run."""
        return self.layers

    @property
    def out_features(self) -> int:
        """The number of columns of ``pooler_output``: ``out_hidden_size`` or, without a projector,
        four times the width of the tower."""
        return int(self.config.out_hidden_size or 4 * self.config.hidden_size)

    def _token_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of tokens of a tile of ``h`` x ``w`` patches: half of each."""
        return h // 2, w // 2

    def _token_maps(self, tokens: Tensor, h: int, w: int) -> Tensor:
        order = "(b h w)" if self.config.ps_version == "v2" else "(b w h)"
        return rearrange(tokens, f"{order} d -> b h w d", h=h // 2, w=w // 2)


class Embeddings(nn.Module):
    """Embeds patches, prepends a class token and adds learned positions."""

    def __init__(self, config: InternViTConfig) -> None:
        super().__init__()
        self.side, self.patch_size = config.image_size // config.patch_size, config.patch_size
        width, patch = config.hidden_size, config.patch_size
        self.patch = (config.in_channels, patch, patch)
        self.class_embedding = nn.Parameter(torch.randn(1, 1, width))
        self.patch_embedding = nn.Conv2d(config.in_channels, width, patch, stride=patch)
        self.position_embedding = nn.Parameter(torch.randn(1, 1 + self.side**2, width))

    def forward(self, pixels: Tensor) -> Tensor:
        h, w = (size // self.patch_size for size in pixels.shape[2:])
        patches = rearrange(
            pixels, "b c (h p) (w q) -> b (h w) (c p q)", p=self.patch_size, q=self.patch_size
        )
        rows = patch_product(self.patch_embedding, patches, self.patch)
        cls = self.class_embedding.expand(pixels.shape[0], -1, -1)
        return torch.cat((cls, rows), dim=1) + self.positions(h, w)

    def positions(self, h: int, w: int) -> Tensor:
        """Return position embeddings [1, 1+h*w, D]: the table, or a bicubic resize of it."""
        table = self.position_embedding[0]
        if (h, w) == (self.side, self.side):
            return table[None]
        return torch.cat((table[:1], resize_table(table[1:], h, w, antialias=False)))[None]


class Block(nn.Module):
    """Pre-norm attention and MLP, each scaled per channel and added to the residual."""

    def __init__(self, config: InternViTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(config), norm(config)
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.ls1 = nn.Parameter(torch.full((config.hidden_size,), 0.1))
        self.ls2 = nn.Parameter(torch.full((config.hidden_size,), 0.1))

    def forward(self, hidden: Tensor, context: TileSegments) -> Tensor:
        hidden = torch.addcmul(hidden, self.attn(self.norm1(hidden), context), self.ls1)
        return torch.addcmul(hidden, self.mlp(self.norm2(hidden)), self.ls2)

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return plain_parts(self, "gelu")._replace(
            q_norm=self.attn.q_norm,
            k_norm=self.attn.k_norm,
            scale1=self.ls1,
            scale2=self.ls2,
        )


class Attention(nn.Module):
    """Full attention inside each tile; InternViT-6B normalises q and k over all heads together."""

    def __init__(self, config: InternViTConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        self.proj = nn.Linear(width, width)
        self.q_norm = nn.RMSNorm(width, eps=eps) if config.qk_normalization else nn.Identity()
        self.k_norm = nn.RMSNorm(width, eps=eps) if config.qk_normalization else nn.Identity()

    def forward(self, x: Tensor, context: TileSegments) -> Tensor:
        q, k, v = self.qkv(x).flatten(0, 1).chunk(3, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        q_THK, k_THK, v_THK = (rows.unflatten(-1, (self.num_heads, -1)) for rows in (q, k, v))
        out_THK = attention(q_THK, k_THK, v_THK, *context, segment_rows=x.shape[1])
        out: Tensor = self.proj(out_THK.flatten(1))
        return out.view_as(x)


class MLP(nn.Module):
    """Two linear layers with exact GELU between them."""

    def __init__(self, config: InternViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def norm(config: InternViTConfig) -> nn.LayerNorm | nn.RMSNorm:
    """Return a new norm of the kind in the config: layer norm (InternViT-300M) or RMS norm (6B)."""
    kind = nn.LayerNorm if config.norm_type == "layer_norm" else nn.RMSNorm
    return kind(config.hidden_size, eps=config.layer_norm_eps)


def projector(config: InternViTConfig) -> nn.Module:
    """Return the projector ``mlp1`` of 2x2 patches to a token; Identity if the config has none."""
    if config.out_hidden_size is None:
        return nn.Identity()
    width, out = 4 * config.hidden_size, config.out_hidden_size
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, out), nn.GELU(), nn.Linear(out, out))


def pixel_shuffle(patches: Tensor, h: int, w: int, version: str) -> Tensor:
    """Join 2x2 patches [B, h*w, D] to tokens [B*h*w/4, 4D] row by row (version "v1": by column)."""
    order = "(b h w)" if version == "v2" else "(b w h)"
    return rearrange(patches, f"b (h x w y) d -> {order} (x y d)", h=h // 2, x=2, w=w // 2, y=2)
