"""The vision tower of Step3 (321B): an EVA-like ViT with a two-step downsampler and a projector.

A ViT over a whole image of 728x728 pixels and, for larger or elongated images, tiles of 504x504: a
class token, learned positions, and norms on the branches, after attention and MLP, instead of
before them. Two strided convolutions make one token of 4x4 patches, and a projector brings it to
the language model's width.

Source: ``step3_vl.py`` of vLLM 0.33.0. No reference that can be installed exists, so this family is
compared with a second implementation in the tests, and is not verified against an upstream one.
Repo ids: stepfun-ai/step3.

Shapes: B views of n = h*w patches and 4 prefix rows, T rows of all views, D width, H heads, K head
size, N tokens.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product. A
  layer with LoRA or hooks is called as a module instead.
- Positions of tiles are interpolated in float32 or wider and added in the tower's dtype.
- The width of the MLP and the bias of the projector are read from the tensors, since the published
  config may not state them. A stride of the first convolution other than 2 is rejected: only 2
  makes the 169 and 81 tokens that the checkpoint's own processor expects.
- ``accelerated()`` runs the blocks unfused: no kernel normalises a branch before adding it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor, nn

from ..base.paths_encoder import TilesThenImage
from ..base.tile_encoder import TileEncoder
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
from ..layers.attention import attention
from ..layers.blocks import resize_table
from ..layers.products import convolve, patch_product
from ..layers.segments import TileSegments

if TYPE_CHECKING:
    from ..contract import Preprocessor

PREFIX_ROWS = 4
"""The number of copies of the class token before the patches of a view, as in training."""

LARGEST_BATCH = {"image": 8, "tiles": 36}
"""Views of the largest default CUDA graph of each input path. One whole image of Step3-VL is 10
TFLOP: 2,704 patches through 1.8 billion parameters. Only elongated images have over 36 tiles."""


@dataclass(frozen=True)
class Step3Config:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    downsampled_size: int
    """The number of channels after the first convolution of the downsampler; the second
    convolution doubles them."""
    out_hidden_size: int
    projector_bias: bool = True
    image_size: int = 728
    tile_size: int = 504
    patch_size: int = 14
    in_channels: int = 3
    layer_norm_eps: float = 1e-5
    enable_patch: bool = True
    """Whether large images are also encoded as tiles; if not, only the whole image is."""

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("image_size", self.image_size, "patch_size", self.patch_size)
        require_divisible("tile size", self.tile_size, "patch_size", self.patch_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Step3Config:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        language = find_section(config, "text_config")
        require_value(vision, "hidden_act", "quick_gelu")
        require_value(config, "understand_projector_stride", 2)
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=63, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=1792),
            intermediate_size=read_size(vision, "intermediate_size", default=15360),
            num_heads=read_size(vision, "num_attention_heads", default=16),
            downsampled_size=read_size(vision, "output_hidden_size", default=4096),
            out_hidden_size=read_size(language, "hidden_size", default=7168),
            projector_bias=read_flag(config, "projector_bias", default=True),
            image_size=read_size(vision, "image_size", default=728),
            patch_size=read_size(vision, "patch_size", default=14),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-5),
            enable_patch=read_flag(vision, "enable_patch", default=True),
        )


class Step3Encoder(TilesThenImage):
    """Encodes images, whole and as tiles, to hidden states and projected tokens."""

    config: Step3Config

    def __init__(self, config: Step3Config, preprocessor: Preprocessor | None = None) -> None:
        tower = Step3Tower(config)
        image = tower.at(config.image_size, LARGEST_BATCH["image"])
        super().__init__(image, tower.at(tower.side, LARGEST_BATCH["tiles"]), preprocessor)

    def _default_preprocessor(self) -> Preprocessor:
        from .step3_pixels import CropPreprocessor

        return CropPreprocessor(
            self.config.patch_size,
            image_size=self.config.image_size,
            tile_size=self.config.tile_size,
            tiled=self.config.enable_patch,
        )


class Step3Tower(TileEncoder):
    """Encodes square views of one size: whole images (input path "image") or tiles ("tiles")."""

    prefix_rows = PREFIX_ROWS

    def __init__(self, config: Step3Config) -> None:
        super().__init__()
        self.config: Step3Config = config
        self.embeddings = Embeddings(config)
        self.transformer = Transformer(config)
        width, merged_width = config.downsampled_size, 2 * config.downsampled_size
        self.vit_downsampler = nn.Conv2d(config.hidden_size, width, 2, stride=2)
        self.vit_downsampler2 = nn.Conv2d(width, merged_width, 3, stride=2, padding=1)
        self.vit_large_projector = nn.Linear(
            merged_width, config.out_hidden_size, bias=config.projector_bias
        )

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n patches and 4 prefix rows each to N tokens.

        Returns:
            ``last_hidden_state`` [B, 4+n, D], the prefix rows first, ``pooler_output`` [N, out], no
            DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        h, w = (size // self.config.patch_size for size in pixel_values.shape[2:])
        maps = hidden[:, PREFIX_ROWS:].mT.unflatten(2, (h, w))
        maps = convolve(self.vit_downsampler2, convolve(self.vit_downsampler, maps))
        tokens = self.vit_large_projector(rearrange(maps, "b d h w -> (b h w) d"))
        return EncoderOutput(hidden, tokens, ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as class tokens and patches with positions, [B, 4+n, D]."""
        return self.embeddings(self._admit_tiles(pixel_values, self.embeddings.class_embedding))

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks of the tower, in the order in which they run."""
        return self.transformer.layers

    def _token_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of tokens of a view: ``h`` and ``w`` patches, halved twice."""
        return -(-(h // 2) // 2), -(-(w // 2) // 2)

    def _read(self, grid_thw: GridLike) -> list[Grid]:
        grids = super()._read(grid_thw)
        for _, h, w in grids:
            if min(h, w) < 2:
                raise ValueError(
                    f"grid {h}x{w}: the first convolution joins 2x2 patches; resize the view to at "
                    "least two patches per side"
                )
        return grids


class Embeddings(nn.Module):
    """Embeds patches, adds learned positions and prepends four copies of the class token."""

    def __init__(self, config: Step3Config) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.patch_size, side = patch, config.image_size // patch
        self.patch = (config.in_channels, patch, patch)
        self.class_embedding = nn.Parameter(torch.randn(1, width))
        self.patch_embedding = nn.Conv2d(config.in_channels, width, patch, stride=patch)
        self.position_embedding = nn.Parameter(torch.randn(1 + side**2, width))

    def forward(self, pixels: Tensor) -> Tensor:
        h, w = (size // self.patch_size for size in pixels.shape[2:])
        patches = rearrange(
            pixels, "b c (h p) (w q) -> b (h w) (c p q)", p=self.patch_size, q=self.patch_size
        )
        rows = patch_product(self.patch_embedding, patches, self.patch)
        first = self.class_embedding + self.position_embedding[:1]
        prefix = first.expand(pixels.shape[0], PREFIX_ROWS, -1)
        positions = resize_table(self.position_embedding[1:], h, w, antialias=True)
        return torch.cat((prefix, rows + positions), dim=1)


class Transformer(nn.Module):
    """Holds the transformer blocks, so that parameter names begin as in the checkpoint."""

    def __init__(self, config: Step3Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.depth))


class Block(nn.Module):
    """Attention and MLP, each normalised before it is added to the residual."""

    def __init__(self, config: Step3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor, context: TileSegments) -> Tensor:
        hidden = hidden + self.layer_norm1(self.self_attn(hidden, context))
        return hidden + self.layer_norm2(self.mlp(hidden))


class Attention(nn.Module):
    """Full attention inside each view; fused rows are [Q; K; V], head-major."""

    def __init__(self, config: Step3Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: TileSegments) -> Tensor:
        qkv_T3HK = self.qkv_proj(x).flatten(0, 1).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
        out_THK = attention(q_THK, k_THK, v_THK, *context, segment_rows=x.shape[1])
        out: Tensor = self.out_proj(out_THK.flatten(1))
        return out.view_as(x)


class MLP(nn.Module):
    """Two linear layers with quick GELU, ``x * sigmoid(1.702 x)``, between them."""

    def __init__(self, config: Step3Config) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))
