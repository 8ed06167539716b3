"""CLIP's vision tower, as OpenAI, LAION, Apple (DFN) and Meta (MetaCLIP 1 and 2) trained it.

LLaVA-1.5 has OpenAI's tower: a projector of two layers reads the patches after the last block but
one. LLaVA-1.6 (LLaVA-NeXT) encodes the whole image and tiles of it, and joins their tokens to one
sequence, as ``base/any_res.py`` shows.

A pre-norm ViT over square views: a class token, learned positions, a norm before the blocks, and
one after them. A linear layer projects the class token to the vector that is compared with texts
(``embed(pool="head")``).

Source: ``CLIPVisionModel``, ``CLIPModel``, ``MetaClip2VisionModel``, ``LlavaMultiModalProjector``
and ``LlavaNextModel`` of transformers 5.24.0.
Repo ids: openai/clip-vit-{base-patch32,base-patch16,large-patch14,large-patch14-336},
laion/CLIP-ViT-{B-32,B-16,L-14,H-14,g-14,bigG-14}-*, facebook/metaclip-*, apple/DFN*-CLIP-ViT-*,
llava-hf/llava-1.5-{7b,13b}-hf, llava-hf/llava-v1.6-{mistral-7b,vicuna-7b,vicuna-13b,34b}-hf,
llava-hf/llama3-llava-next-8b-hf, llava-hf/llava-next-{72b,110b}-hf.

Shapes: B views of n = 1 + h*w rows (class token first), D width, N = B*h*w tokens.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product.
- Views of another size than in the config are accepted; their positions are interpolated as
  ``CLIPVisionModel(interpolate_pos_encoding=True)`` does, in float32 or wider.
- The norm after the blocks is also taken of the patches, which makes the tokens; the source norms
  only the class token.
- Blocks after LLaVA's ``select_layer``, and the norm after the blocks, are loaded (strictly) and
  not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.any_res import AnyResEncoder
from ..base.tile_encoder import TileEncoder
from ..data import EncoderOutput, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_choice,
    read_epsilon,
    read_field,
    read_layer,
    read_size,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes, Gelu, resize_table
from ..layers.products import PatchEmbed
from ..layers.segments import mean_segments

if TYPE_CHECKING:
    from ..contract import Preprocessor
    from ..streams.pooling import PoolingHead

_ACTIVATIONS: tuple[Gelu, ...] = ("quick_gelu", "gelu")


@dataclass(frozen=True)
class ClipConfig:
    """The sizes of a CLIP tower and, unless ``projection_dim`` is None, of its projection."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    image_size: int
    patch_size: int
    projection_dim: int | None = None
    projection_bias: bool = False
    activation: Gelu = "quick_gelu"
    in_channels: int = 3
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_sizes({"patches per side": self.side})

    @property
    def tile_size(self) -> int:
        """Side of a view in pixels, rounded down to whole patches."""
        return self.side * self.patch_size

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
        return BlockSizes(*sizes, self.activation, self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> ClipConfig:
        """Read the ``config.json`` of a CLIP model, or of its tower only.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        # A tower alone has a projection if there are tensors of it: ``weights.families.clip``.
        projected = vision is not config and config.get("projection_dim", 512) is not None
        width = read_size(vision, "hidden_size", default=768)
        heads = 12 if width == 768 else None  # else required: no tensor's shape shows it
        built = cls(
            depth=read_size(vision, "num_hidden_layers", default=12, limit=1024),
            hidden_size=width,
            intermediate_size=read_size(vision, "intermediate_size", default=3072),
            num_heads=read_size(vision, "num_attention_heads", default=heads),
            image_size=read_size(vision, "image_size", default=224),
            patch_size=read_size(vision, "patch_size", default=32),
            projection_dim=read_size(config, "projection_dim", default=512) if projected else None,
            activation=read_choice(vision, "hidden_act", *_ACTIVATIONS, default="quick_gelu"),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-5),
        )
        old = config.get("vision_config_dict")  # transformers prefers it to vision_config
        if isinstance(old, Mapping):
            again = {**config, "vision_config": old, "vision_config_dict": None}
            if cls.from_hf(again) != built:
                raise ValueError(
                    "config: vision_config_dict and vision_config describe different towers: "
                    "remove the one that is wrong"
                )
        return built


@dataclass(frozen=True)
class LlavaConfig(ClipConfig):
    """The sizes of a CLIP tower, the layer that LLaVA reads, and the width of its tokens."""

    out_hidden_size: int = 4096
    select_layer: int = -2

    def __post_init__(self) -> None:
        require_sizes(vars(self), signed="select_layer")
        require_sizes({"patches per side": self.side})
        if not 0 <= self.blocks_run <= self.depth:
            rule = f"must be from {-self.depth - 1} to {self.depth}, a hidden state of the tower"
            raise ValueError(f"config: select_layer={self.select_layer} {rule}")

    @property
    def blocks_run(self) -> int:
        """The number of blocks that ``forward`` runs, up to the hidden state ``select_layer``."""
        return self.select_layer if self.select_layer >= 0 else self.depth + 1 + self.select_layer

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> LlavaConfig:
        """Read the ``config.json`` of a LLaVA-1.5 model.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        require_value(find_section(config, "vision_config"), "model_type", "clip_vision_model")
        require_value(config, "projector_hidden_act", "gelu")
        require_value(config, "multimodal_projector_bias", True)
        require_value(config, "vision_feature_select_strategy", "default")
        tower = vars(ClipConfig.from_hf({**config, "projection_dim": None}))
        return cls(
            **tower,
            out_hidden_size=read_size(find_section(config, "text_config"), "hidden_size"),
            select_layer=read_layer(config, "vision_feature_layer", default=-2),
        )


_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""The sizes of LLaVA-1.6 if its config has none, (height, width) in pixels."""


@dataclass(frozen=True)
class LlavaNextConfig(LlavaConfig):
    """The sizes of a tower of LLaVA-1.6, and those to which an image may be resized for tiles."""

    image_grid_pinpoints: tuple[tuple[int, int], ...] = _PINPOINTS
    """The (height, width) in pixels of all tiles together, multiples of ``image_size``."""

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> LlavaNextConfig:
        """Read the ``config.json`` of a LLaVA-1.6 model.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        from ..inputs.sizes import read_candidates

        base = LlavaConfig.from_hf(config)
        sizes = read_field(config, "image_grid_pinpoints", default=_PINPOINTS)
        return cls(
            **vars(base),
            image_grid_pinpoints=read_candidates(
                "config", sizes, base.image_size, "image_grid_pinpoints"
            ),
        )


class ClipEncoder(TileEncoder):
    """Encodes views of one size to hidden states, a class token and one normed token per patch."""

    prefix_rows = 1
    class_token = True

    def __init__(self, config: ClipConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: ClipConfig = config
        self._preprocessor = preprocessor
        sizes, width = config.block_sizes, config.hidden_size
        self.patch_embed = PatchEmbed(width, config.patch_size, config.in_channels, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.pos_embed = nn.Parameter(torch.randn(1 + config.side**2, width))
        self.norm_pre = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(sizes) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        if config.projection_dim is not None:
            self.head = nn.Linear(width, config.projection_dim, bias=config.projection_bias)

    def _default_preprocessor(self) -> Preprocessor:
        from .clip_pixels import CentreCropPreprocessor

        return CentreCropPreprocessor(self.config.patch_size, image_size=self.config.image_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n rows each (class token, patches) to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D] before the last norm, ``pooler_output`` [N, D], the
            patches after it, no DeepStack features, ``"prefix"`` [B, 1, D], the class token after
            the last norm.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        normed = self.norm(hidden)
        return EncoderOutput(hidden, normed[:, 1:].flatten(0, 1), (), {"prefix": normed[:, :1]})

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as a class token and patches with positions, [B, n, D]."""
        pixels = self._admit_tiles(pixel_values, self.class_embedding)
        patches: Tensor = self.patch_embed(pixels)
        h, w = patches.shape[1:3]
        cls = self.class_embedding.expand(len(patches), 1, -1)
        rows = torch.cat((cls, patches.flatten(1, 2)), dim=1)
        first, table = self.pos_embed[:1], self.pos_embed[1:]
        positions = torch.cat((first, resize_table(table, h, w, antialias=False)))
        embedded: Tensor = self.norm_pre(rows + positions)
        return embedded

    @property
    def pooling_head(self) -> PoolingHead | None:
        """The projection of the class token that is compared with texts; None without one."""
        from ..streams.pooling import PoolingHead

        return None if self.config.projection_dim is None else PoolingHead(self._project, "prefix")

    def _project(self, prefixes: Sequence[Tensor]) -> Tensor:
        """Return [items, projection] of the class tokens [views, 1, D] of each item."""
        vectors: Tensor = self.head(mean_segments(prefixes)[:, 0])
        return vectors


class LlavaEncoder(ClipEncoder):
    """Encodes views of one size to hidden states of an inner layer and projected tokens."""

    def __init__(self, config: LlavaConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__(config, preprocessor)
        self.config: LlavaConfig = config
        self.projector = Projector(config.hidden_size, config.out_hidden_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n rows each (class token, patches) to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D] of the layer ``select_layer``, ``pooler_output``
            [N, out], no DeepStack features, ``"prefix"`` [B, 1, D], the class token of that layer.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata, stop=self.config.blocks_run):
            hidden = block(hidden)
        tokens = self.projector(hidden[:, 1:].flatten(0, 1))
        return EncoderOutput(hidden, tokens, (), {"prefix": hidden[:, :1]})

    @property
    def _blocks_run(self) -> int:
        return self.config.blocks_run


class LlavaNextEncoder(AnyResEncoder):
    """Encodes an image and its tiles to hidden states of an inner layer and one token sequence."""

    def __init__(self, config: LlavaNextConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__(LlavaEncoder(config))
        self.config: LlavaNextConfig = config
        self._preprocessor = preprocessor

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.any_res import AnyResPreprocessor

        return AnyResPreprocessor(
            self.config.patch_size,
            image_size=self.config.image_size,
            pinpoints=self.config.image_grid_pinpoints,
        )


class Projector(nn.Module):
    """Projects tokens to the width of the language model: two layers, exact GELU between them."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, out)
        self.linear_2 = nn.Linear(out, out)

    def forward(self, tokens: Tensor) -> Tensor:
        """Project tokens [N, D] to [N, out]."""
        return self.linear_2(F.gelu(self.linear_1(tokens)))
