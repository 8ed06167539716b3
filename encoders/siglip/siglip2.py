"""SigLIP2 NaFlex: SigLIP's tower over packed patches of images of any size and shape.

A pre-norm ViT with a learned 16x16 table of positions, resized to the grid of each image; layer
norms, full attention inside each image, a final norm. The head turns the tokens of an image into
one vector (``embed(pool="head")``).

Source: ``Siglip2VisionModel`` of transformers 5.23.0.
Repo ids: google/siglip2-base-patch16-naflex, google/siglip2-so400m-patch16-naflex. SigLIP2 of one
image size is in ``siglip.py``.

Shapes: P patches row by row, D width, s side of the table of positions.

Deliberate differences:

- Images are packed, not padded to the longest.
- Positions are interpolated in float32 or wider and rounded once, on every device; the source does
  so only on the CPU.
- Positions of an image of one column of patches are computed for one row and transposed. The source
  has others on a CPU with torch 2.15, whose ``F.interpolate`` resizes wrongly to one column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import RasterEncoder, table_positions, table_weights
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_flag,
    read_size,
    require_sizes,
    require_value,
)
from ..layers.blocks import Block, BlockSizes
from ..layers.segments import TileSegments, padding_rows
from ..streams.pooling import PoolingHead
from .head import Head

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Siglip2Config:
    """The sizes of a SigLIP2 NaFlex tower, with or without a pooling head."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int = 16
    num_patches: int = 256
    """The number of entries of the table of positions."""
    use_head: bool = True
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        if self.position_side**2 != self.num_patches:
            raise ValueError(f"config: num_patches={self.num_patches} must be a square")

    @property
    def position_side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return isqrt(self.num_patches)

    @property
    def spatial_merge_size(self) -> int:
        """The side of a token in patches: 1, because each patch is a token."""
        return 1

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: height * width * channels of a patch."""
        return self.patch_size**2 * self.in_channels

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
    def from_hf(cls, config: Mapping[str, object]) -> Siglip2Config:
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
            patch_size=read_size(vision, "patch_size", default=16),
            num_patches=read_size(vision, "num_patches", default=256),
            use_head=read_flag(vision, "vision_use_head", default=True),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-6),
        )


class Siglip2Encoder(RasterEncoder):
    """Encodes packed patches to hidden states and one normed token per patch."""

    def __init__(self, config: Siglip2Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Siglip2Config = config
        self._preprocessor = preprocessor
        sizes = config.block_sizes
        self.patch_embed = nn.Linear(config.patch_dim, config.hidden_size)
        self.pos_embed = nn.Parameter(torch.randn(config.num_patches, config.hidden_size))
        self.blocks: nn.ModuleList = nn.ModuleList(Block(sizes) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.use_head:
            self.head = Head(sizes)

    def _default_preprocessor(self) -> Preprocessor:
        from .siglip2_pixels import NaflexPreprocessor

        return NaflexPreprocessor.siglip2(self.config.patch_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to P tokens.

        Returns:
            ``last_hidden_state`` [P, D] before the last norm, ``pooler_output`` [P, D] after it, no
            DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        return EncoderOutput(hidden, self.norm(hidden), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], and add interpolated positions, [P, D]."""
        pixels = self._admit_pixels(pixel_values, self.pos_embed)
        positions = table_positions(metadata, self.pos_embed, pixels.shape[0])
        patches: Tensor = self.patch_embed(pixels)
        return patches + positions.to(patches.dtype)

    @property
    def pooling_head(self) -> PoolingHead | None:
        """The head that pools the tokens of an item to one vector; None if the model has none."""
        return PoolingHead(self.head) if self.config.use_head else None

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> TileSegments:
        """Return the tensors that all blocks read: offsets of segments, and padding."""
        offsets = metadata["cu_seqlens"]
        return TileSegments(offsets, metadata["max_seqlen"], padding_rows(offsets, len(hidden)))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the weights, per patch, of the rows and columns of the table of positions.

        ``pos_embed_rows`` and ``pos_embed_columns`` [P, s] are the weights of all rows and of all
        columns of the table; the weight of an entry is its row's times its column's.
        P is ``max_input_size``, with padding at the end, or the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.pos_embed.dtype, torch.float32)
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size)
        return table_weights(grids, 1, self.config.position_side, rows, dtype)
