"""The encoder of Idefics3, SmolVLM and ModernVBERT: SigLIP over tiles and the whole image.

A pre-norm ViT without a class token: learned positions, layer norms, a final norm; then squares of
patches are put side by side and projected to one token. An image is cut into tiles of one size;
the whole image, resized to such a tile, comes last. A frame of a video is one tile.

Source: ``Idefics3VisionTransformer``, ``Idefics3Connector``, ``SmolVLMVisionTransformer``,
``SiglipVisionModel`` and ``ModernVBertConnector`` of transformers 5.23.0.
Repo ids: HuggingFaceM4/Idefics3-8B-Llama3, HuggingFaceTB/SmolVLM-{256M,500M}-Instruct,
HuggingFaceTB/SmolVLM-Instruct, HuggingFaceTB/SmolVLM2-{256M,500M,2.2B}-*,
ibm-granite/granite-docling-258M, docling-project/SmolDocling-256M-preview,
ModernVBERT/{modernvbert,colmodernvbert-merged}.

Shapes: B tiles, n patches of a tile, D width, N tokens.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product.
- A tile is rounded down to whole patches: of 384x384 pixels and patches of 14, the source's
  convolution never reads the last 6 rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor, nn

from ..base.tile_encoder import TileEncoder
from ..data import EncoderOutput, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes, resize_table
from ..layers.products import PatchEmbed

if TYPE_CHECKING:
    from ..contract import Preprocessor

_SIGLIP = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}
"""Defaults of ``SiglipVisionConfig``, the tower of ModernVBERT, that differ from Idefics3's."""


@dataclass(frozen=True)
class Idefics3Config:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    image_size: int
    patch_size: int
    scale_factor: int
    out_hidden_size: int
    in_channels: int = 3
    layer_norm_eps: float = 1e-6
    bicubic_positions: bool = False
    """Whether tiles of another size have interpolated positions (ModernVBERT), or nearest ones."""

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_sizes({"patches per side": self.side})
        require_divisible("patches per side", self.side, "scale_factor", self.scale_factor)

    @property
    def tile_size(self) -> int:
        """Side of a tile in pixels, rounded down to whole patches."""
        return self.side * self.patch_size

    @property
    def side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return self.image_size // self.patch_size

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        sizes = self.depth, self.hidden_size, self.intermediate_size, self.num_heads
        return BlockSizes(*sizes, "gelu_tanh", self.layer_norm_eps)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Idefics3Config:
        """Read the ``config.json`` of a checkpoint; ColModernVBERT's has the model in a section.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        model = {**config, **find_section(config, "vlm_config")}
        name = str(model.get("model_type"))
        modern = name.endswith("modernvbert") or "pixel_shuffle_factor" in model
        vision = find_section(config, "vision_config", "vlm_config.vision_config")
        vision = {**_SIGLIP, **vision} if modern else vision
        require_value(vision, "hidden_act", "gelu_pytorch_tanh")
        scale = 4 if modern else 2
        text = {**find_section(config, "text_config"), **find_section(model, "text_config")}
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=12, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=1152),
            intermediate_size=read_size(vision, "intermediate_size", default=3072),
            num_heads=read_size(vision, "num_attention_heads", default=16),
            image_size=read_size(vision, "image_size", default=224),
            patch_size=read_size(vision, "patch_size", default=32),
            scale_factor=read_size(
                model, "scale_factor", "pixel_shuffle_factor", default=scale, limit=64
            ),
            out_hidden_size=read_size(text, "hidden_size", default=768 if modern else None),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
            bicubic_positions=modern,
        )


class Idefics3Encoder(TileEncoder):
    """Encodes tiles to hidden states and projected tokens."""

    def __init__(self, config: Idefics3Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Idefics3Config = config
        self._preprocessor = preprocessor
        self._grid_multiple = config.scale_factor
        sizes, width = config.block_sizes, config.hidden_size
        self.patch_embed = PatchEmbed(width, config.patch_size, config.in_channels)
        self.pos_embed = nn.Parameter(torch.randn(config.side**2, width))
        self.blocks: nn.ModuleList = nn.ModuleList(Block(sizes) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.projector = nn.Linear(
            width * config.scale_factor**2, config.out_hidden_size, bias=False
        )

    def _default_preprocessor(self) -> Preprocessor:
        from .idefics3_pixels import SplitPreprocessor

        size = self.config.image_size
        return SplitPreprocessor(self.config.patch_size, image_size=size, longest_edge=4 * size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B tiles of n patches each to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D] before the last norm, ``pooler_output`` [N, out], no
            DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        h, side = pixel_values.shape[2] // self.config.patch_size, self.config.scale_factor
        squares = rearrange(
            self.norm(hidden), "b (r x c y) d -> (b r c) (x y d)", r=h // side, x=side, y=side
        )
        return EncoderOutput(hidden, self.projector(squares), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed tiles [B, C, H, W] as patches with positions, [B, n, D]."""
        pixels = self._admit_tiles(pixel_values, self.pos_embed)
        patches: Tensor = self.patch_embed(pixels)
        return patches.flatten(1, 2) + self._positions(*patches.shape[1:3])

    def _token_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of tokens of ``h`` x ``w`` patches: one per square of patches."""
        return h // self.config.scale_factor, w // self.config.scale_factor

    def _positions(self, h: int, w: int) -> Tensor:
        """Return position embeddings [h*w, D]: the table, or its entries for another grid."""
        if self.config.bicubic_positions:
            return resize_table(self.pos_embed, h, w, antialias=False)
        side = self.config.side
        if (h, w) == (side, side):
            return self.pos_embed
        rows, columns = nearest_below(h, side), nearest_below(w, side)
        index = (rows[:, None] * side + columns).flatten()
        return self.pos_embed[index.to(self.pos_embed.device)]


def nearest_below(size: int, entries: int) -> Tensor:
    """Return the index of the table entry at or before each of ``size`` positions, int64 [size].

    Positions and ``entries`` divide one axis into equal parts. As in the source, the division is in
    float32, whose rounding decides where a position falls on an entry.
    """
    edges = torch.arange(1 / entries, 1.0, 1 / entries, device="cpu", dtype=torch.float32)
    positions = torch.arange(size, device="cpu", dtype=torch.float32) * (1.0 / torch.tensor([size]))
    indices = torch.bucketize(positions.clamp(max=1.0 - 1e-6), edges, right=True)
    return indices.clamp(max=entries - 1)
