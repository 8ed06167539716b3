"""SigLIP and SigLIP2 of one image size, and Gemma 3, PaliGemma and LLaVA-OneVision on that tower.

A pre-norm ViT over square views without a class token: learned positions, layer norms, a final
norm. SigLIP's head turns the tokens of an image into one vector (``embed(pool="head")``). Gemma 3
has no head; it takes the mean of 4x4 patches, normalises it and projects it. PaliGemma projects
each patch. LLaVA-OneVision projects each patch before the final norm, of the whole image and of its
tiles, and joins them to one sequence, as ``base/any_res.py`` shows; a frame of a video is one view.

Source: ``SiglipVisionModel``, ``Gemma3MultiModalProjector`` and ``PaliGemmaMultiModalProjector`` of
transformers 5.23.0, and ``LlavaOnevisionModel`` of 5.24.0.
Repo ids: google/siglip-{base,large}-patch16-*, google/siglip-so400m-patch14-{224,384},
google/siglip2-{base,large,so400m,giant-opt}-patch{14,16,32}-*, google/gemma-3-{4b,12b,27b}-{pt,it},
google/medgemma-4b-{pt,it}, google/paligemma-3b-{pt,mix}-{224,448,896},
google/paligemma2-{3b,10b,28b}-{pt,mix}-{224,448,896}, vidore/colpali-v1.{2,3}-hf,
llava-hf/llava-onevision-qwen2-{0.5b,7b,72b}-{ov,si,ov-chat}-hf. Repos whose names end in naflex
have the tower of ``siglip2.py``.

Shapes: B views, n patches of a view, D width, N tokens.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product.
- Views of another size than in the config are accepted; their positions are interpolated as
  ``SiglipVisionModel(interpolate_pos_encoding=True)`` does, in float32 or wider.
- A view is rounded down to whole patches: of 384x384 pixels and patches of 14, the source's
  convolution never reads the last 6 rows and columns.
- LLaVA-OneVision's final norm is loaded (strictly) and not run.
- Gemma 3's mean and norm are computed in float32 and rounded once; the source rounds the mean, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.any_res import AnyResEncoder
from ..base.tile_encoder import TileEncoder
from ..data import EncoderOutput, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_field,
    read_flag,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes, resize_table
from ..layers.products import PatchEmbed
from ..streams.pooling import PoolingHead
from .head import Head

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class SiglipConfig:
    """The sizes of a SigLIP tower, with or without a pooling head."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    image_size: int
    patch_size: int
    use_head: bool = True
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_sizes({"patches per side": self.side})

    @property
    def tile_size(self) -> int:
        """Side of a view in pixels, rounded down to whole patches."""
        return self.image_size // self.patch_size * self.patch_size

    @property
    def side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return self.image_size // self.patch_size

    @property
    def out_hidden_size(self) -> int:
        """The number of columns of a token, which is the width of the tower."""
        return self.hidden_size

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        sizes = self.depth, self.hidden_size, self.intermediate_size, self.num_heads
        return BlockSizes(*sizes, "gelu_tanh", self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> SiglipConfig:
        """Read the ``config.json`` of a checkpoint, the whole or only its vision section.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        require_value(vision, "hidden_act", "gelu_pytorch_tanh")
        width = read_size(vision, "hidden_size", default=768)
        heads = 12 if width == 768 else None  # else required: no tensor's shape shows it
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=12, limit=1024),
            hidden_size=width,
            intermediate_size=read_size(vision, "intermediate_size", default=3072),
            num_heads=read_size(vision, "num_attention_heads", default=heads),
            image_size=read_size(vision, "image_size", default=224),
            patch_size=read_size(vision, "patch_size", default=16),
            use_head=read_flag(vision, "vision_use_head", default=True),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
        )


@dataclass(frozen=True)
class Gemma3Config(SiglipConfig):
    """The sizes of a SigLIP tower and of Gemma 3's projector behind it."""

    out_hidden_size: int = 2560
    tokens_per_image: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        side = isqrt(self.tokens_per_image)
        if side**2 != self.tokens_per_image:
            raise ValueError(
                f"config: mm_tokens_per_image={self.tokens_per_image} must be a square"
            )
        require_divisible("patches per side", self.side, "tokens per side", side)

    @property
    def pool_size(self) -> int:
        """The side in patches of the squares that are averaged to one token."""
        return self.side // isqrt(self.tokens_per_image)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Gemma3Config:
        """Read the ``config.json`` of a Gemma 3 model.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        return cls(
            **vars(SiglipConfig.from_hf(config)),
            out_hidden_size=read_size(find_section(config, "text_config"), "hidden_size"),
            tokens_per_image=read_size(config, "mm_tokens_per_image", default=256),
        )


@dataclass(frozen=True)
class PaliGemmaConfig(SiglipConfig):
    """The sizes of a SigLIP tower and of PaliGemma's projector behind it."""

    out_hidden_size: int = 2048

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> PaliGemmaConfig:
        """Read the ``config.json`` of a PaliGemma or ColPali model.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        model = {**config, **find_section(config, "vlm_config")}
        vision = find_section(config, "vision_config", "vlm_config.vision_config")
        return cls(
            **vars(SiglipConfig.from_hf(vision)),
            out_hidden_size=read_size(model, "projection_dim", default=2048),
        )


_PINPOINTS = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
"""The sizes of LLaVA-OneVision if its config has none, (height, width) in pixels."""


@dataclass(frozen=True)
class LlavaOnevisionConfig(SiglipConfig):
    """The sizes of a SigLIP tower and of LLaVA-OneVision's projector, and how an image is tiled."""

    out_hidden_size: int = 3584
    image_grid_pinpoints: tuple[tuple[int, int], ...] = _PINPOINTS
    """The (height, width) in pixels of all tiles together, multiples of ``image_size``."""
    most_tiles: int = 9
    """The number of tiles of whose size a larger map of tokens becomes."""

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> LlavaOnevisionConfig:
        """Read the ``config.json`` of a LLaVA-OneVision model.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        from ..inputs.sizes import read_candidates

        vision = find_section(config, "vision_config")
        require_value(vision, "model_type", "siglip_vision_model")
        require_value(config, "projector_hidden_act", "gelu")
        require_value(config, "multimodal_projector_bias", True)
        require_value(config, "vision_feature_select_strategy", "full")
        require_value(config, "vision_feature_layer", -1)
        base = SiglipConfig.from_hf(vision)
        sizes = read_field(config, "image_grid_pinpoints", default=_PINPOINTS)
        ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
        most = ratio.removeprefix("anyres_max_")
        if not (most.isdecimal() and ratio.startswith("anyres_max_") and len(most) < 5):
            raise ValueError(
                f"config field vision_aspect_ratio={ratio!r} is not implemented: it must be "
                "anyres_max_ and a number of tiles"
            )
        return cls(
            **vars(base),
            out_hidden_size=read_size(find_section(config, "text_config"), "hidden_size"),
            image_grid_pinpoints=read_candidates(
                "config", sizes, base.image_size, "image_grid_pinpoints"
            ),
            most_tiles=int(most),
        )


class SiglipEncoder(TileEncoder):
    """Encodes views of one size to hidden states and one normed token per patch."""

    def __init__(self, config: SiglipConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: SiglipConfig = config
        self._preprocessor = preprocessor
        sizes, width = config.block_sizes, config.hidden_size
        self.patch_embed = PatchEmbed(width, config.patch_size, config.in_channels)
        self.pos_embed = nn.Parameter(torch.randn(config.side**2, width))
        self.blocks: nn.ModuleList = nn.ModuleList(Block(sizes) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        if config.use_head:
            self.head = Head(sizes)

    def _default_preprocessor(self) -> Preprocessor:
        from .siglip_pixels import StretchPreprocessor

        return StretchPreprocessor(self.config.patch_size, image_size=self.config.image_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n patches each to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D] before the last norm, ``pooler_output`` [N, out] after
            the last norm (and projector, if there is one), no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        h, w = (size // self.config.patch_size for size in pixel_values.shape[2:])
        return EncoderOutput(hidden, self._tokens(self.norm(hidden), h, w), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as patches with positions, [B, n, D]."""
        pixels = self._admit_tiles(pixel_values, self.pos_embed)
        patches: Tensor = self.patch_embed(pixels)
        h, w = patches.shape[1:3]
        return patches.flatten(1, 2) + resize_table(self.pos_embed, h, w, antialias=False)

    def _tokens(self, normed: Tensor, h: int, w: int) -> Tensor:
        """Return the tokens [N, out] of the normed patches [B, n, D] of views of h*w patches."""
        return normed.flatten(0, 1)

    @property
    def pooling_head(self) -> PoolingHead | None:
        """The head that pools the tokens of an item to one vector; None if the model has none."""
        return PoolingHead(self.head) if self.config.use_head else None


class Gemma3Encoder(SiglipEncoder):
    """Encodes views of 896x896 pixels to hidden states and 256 projected tokens per view."""

    def __init__(self, config: Gemma3Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__(config, preprocessor)
        self.config: Gemma3Config = config
        self.projector = Projector(config)
        self._grid_multiple = config.pool_size

    def _default_preprocessor(self) -> Preprocessor:
        from .siglip_pixels import StretchPreprocessor

        config = self.config
        return StretchPreprocessor(
            config.patch_size, image_size=config.image_size, resample="bilinear"
        )

    def _tokens(self, normed: Tensor, h: int, w: int) -> Tensor:
        tokens: Tensor = self.projector(normed.unflatten(1, (h, w)))
        return tokens.flatten(0, 2)

    def _token_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of tokens of ``h`` x ``w`` patches: one per square of patches."""
        return h // self.config.pool_size, w // self.config.pool_size


class PaliGemmaEncoder(SiglipEncoder):
    """Encodes views of one size to hidden states and one projected token per patch."""

    def __init__(self, config: PaliGemmaConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__(config, preprocessor)
        self.config: PaliGemmaConfig = config
        self.projector = nn.Linear(config.hidden_size, config.out_hidden_size)

    def _tokens(self, normed: Tensor, h: int, w: int) -> Tensor:
        tokens: Tensor = self.projector(normed)
        return tokens.flatten(0, 1)


class LlavaOnevisionTower(SiglipEncoder):
    """The SigLIP tower and the projector of LLaVA-OneVision, which encode views of one size."""

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        super().__init__(config)
        width, out = config.hidden_size, config.out_hidden_size
        self.projector = nn.Sequential(nn.Linear(width, out), nn.GELU(), nn.Linear(out, out))

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n patches each to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D] before the last norm, ``pooler_output`` [N, out], its
            projection, no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        return EncoderOutput(hidden, self.projector(hidden).flatten(0, 1), ())

    @property
    def pooling_head(self) -> None:
        """None: no model of the family uses the head of its tower."""
        return None


class LlavaOnevisionEncoder(AnyResEncoder):
    """Encodes an image and its tiles, or a clip, to hidden states and a sequence of tokens."""

    def __init__(
        self, config: LlavaOnevisionConfig, preprocessor: Preprocessor | None = None
    ) -> None:
        super().__init__(LlavaOnevisionTower(config))
        self.config: LlavaOnevisionConfig = config
        self._most_tiles = config.most_tiles
        self._preprocessor = preprocessor

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.any_res import AnyResClipPreprocessor

        return AnyResClipPreprocessor(
            self.config.patch_size,
            image_size=self.config.image_size,
            pinpoints=self.config.image_grid_pinpoints,
        )


class Projector(nn.Module):
    """Turns a square of patches into a token: mean, RMS norm and linear projection."""

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__()
        self.side, self.eps = config.pool_size, config.layer_norm_eps
        self.norm = nn.Parameter(torch.zeros(config.hidden_size))
        """The gain of the norm minus one, as the checkpoint stores it."""
        self.projection = nn.Parameter(torch.randn(config.hidden_size, config.out_hidden_size))

    def forward(self, maps: Tensor) -> Tensor:
        """Return tokens [B, rows, columns, out] of normed patches [B, h, w, D]."""
        dtype = torch.promote_types(maps.dtype, torch.float32)
        squares = rearrange(maps, "b (r a) (c e) d -> b r a c e d", a=self.side, e=self.side)
        means = squares.mean((2, 4), dtype=dtype)
        gain = 1 + self.norm.to(means.dtype)
        return F.rms_norm(means, gain.shape, gain, self.eps).to(maps.dtype) @ self.projection
