"""DeepSeek-VL2's encoder: SigLIP-SO400M over a view of the whole image and tiles of it.

Every view of 27x27 patches is padded to 28x28 and its 2x2 blocks are projected to 14x14 tokens. The
tokens of an image make one sequence: the rows of the whole image, a learned separator, the rows of
all tiles as one picture; a learned newline ends each row.

Source: ``DeepseekVLV2ForCausalLM``, ``MlpProjector``, ``VisionTransformer`` and
``DeepseekVLV2Processor`` of deepseek-ai/DeepSeek-VL2 at commit ef9f91e. No installed package has
this model: its sequence of tokens is not verified against an upstream implementation, but against a
second one in the tests. The tower is that of transformers 5.23.0's ``SiglipVisionModel``.
Repo ids: deepseek-ai/deepseek-vl2-tiny, deepseek-ai/deepseek-vl2-small, deepseek-ai/deepseek-vl2.

Shapes: B views, n patches of a view, D width.

Deliberate differences: those of ``deepseek_siglip.py``, and

- GELU of the tower is the tanh form, as in the source; timm's tower of that name, which vLLM runs,
  has the exact form, a relative L2 of 4.7e-4 away.
- A view has 378x378 pixels: of the published 384x384, the patch embedding never reads the last 6
  rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.paths_encoder import PathsEncoder
from ..base.raster import maps_of_sequences
from ..base.tile_encoder import TileEncoder
from ..data import (
    EncoderOutput,
    GridLike,
    Metadata,
    Output,
    PartialOutput,
    VisionInputs,
    output_like,
)
from ..hf_config import (
    find_section,
    read_field,
    read_ratio,
    read_size,
    require_sizes,
    require_value,
)
from ..layers.assembly import SEPARATOR, Picture, assemble, stitch
from ..layers.blocks import BlockSizes
from .deepseek_siglip import Siglip

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class DeepseekVL2Config:
    """The sizes of the tower and its projector, and how an image becomes views."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    projector_size: int
    """The number of columns between the linear layers of the projector."""
    projector_depth: int = 2
    image_size: int = 384
    patch_size: int = 14
    in_channels: int = 3
    global_first: bool = True
    """Whether the tokens of the whole image come before the tokens of its tiles."""
    candidate_resolutions: tuple[tuple[int, int], ...] = ((384, 384),)
    """The widths and heights in pixels to which an image may be resized before it is tiled."""

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_sizes({"patches per side": self.image_size // self.patch_size})

    @property
    def tile_size(self) -> int:
        """Side of a view in pixels, rounded down to whole patches."""
        return self.image_size // self.patch_size * self.patch_size

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        return BlockSizes(
            self.depth, self.hidden_size, self.intermediate_size, self.num_heads, "gelu_tanh", 1e-6
        )

    @property
    def order(self) -> tuple[str, ...]:
        """The order in which an image's views and learned tokens stand in its token sequence."""
        order = ("image", SEPARATOR, "tiles")
        return order if self.global_first else order[::-1]

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> DeepseekVL2Config:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        from ..inputs.sizes import read_candidates

        vision = find_section(config, "vision_config")
        projector = find_section(config, "projector_config")
        require_value(vision, "model_name", "siglip_so400m_patch14_384")
        require_value(vision, "class_token", False)
        require_value(vision, "global_pool", "map")
        require_value(vision, "ignore_head", True)
        require_value(projector, "projector_type", "downsample_mlp_gelu")
        require_value(projector, "token_pooling", False)
        require_value(projector, "downsample_ratio", 2)
        require_value(config, "tile_tag", "2D")
        require_value(config, "global_view_pos", "head", "tail")
        width, out = read_size(vision, "width"), read_size(projector, "n_embed", default=2048)
        image_size = read_size(vision, "image_size", default=384)
        return cls(
            depth=read_size(vision, "layers", limit=1024),
            hidden_size=width,
            intermediate_size=int(width * read_ratio(vision, "mlp_ratio", default=4.0)),
            num_heads=read_size(vision, "heads", default=16),
            out_hidden_size=out,
            projector_size=out * read_size(projector, "mlp_ratio", default=1, limit=64),
            # With a depth of 1, the source makes two layers, too.
            projector_depth=max(read_size(projector, "depth", default=2, limit=16), 2),
            image_size=image_size,
            patch_size=read_size(vision, "patch_size", default=16),
            global_first=config.get("global_view_pos", "head") == "head",
            candidate_resolutions=read_candidates(
                "config",
                read_field(config, "candidate_resolutions", default=[[image_size, image_size]]),
                image_size,
            ),
        )


class DeepseekVL2Encoder(PathsEncoder):
    """Encodes the whole image and its tiles with one tower, and joins their tokens."""

    paths: Mapping[str, DeepseekVL2Tower]

    def __init__(self, config: DeepseekVL2Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        tower = DeepseekVL2Tower(config)
        self._share_modules(tower)
        self.image_newline = nn.Parameter(torch.randn(config.out_hidden_size))
        self.view_seperator = nn.Parameter(torch.randn(config.out_hidden_size))  # sic in checkpoint
        self.config: DeepseekVL2Config = config
        self._preprocessor = preprocessor
        self.paths = {"image": tower}

    def _default_preprocessor(self) -> Preprocessor:
        from .deepseek_vl2_pixels import CandidatePreprocessor

        return CandidatePreprocessor(
            self.config.patch_size,
            image_size=self.config.image_size,
            candidates=self.config.candidate_resolutions,
        )

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Join the tokens of the views of each image to one sequence.

        Returns:
            For each item ``last_hidden_state`` [views, n, D], the whole image first, and
            ``pooler_output`` [tokens, out] in the order of ``config.order``.
        """
        items = zip(self.split_paths(outputs, inputs), self._pictures(inputs), strict=True)
        results = []
        for item, pictures in items:
            hidden, pooled, deepstack, extras = PartialOutput(*item["image"])
            tokens = self._sequence(pooled, pictures)
            results.append(output_like(item["image"], hidden, tokens, deepstack, extras))
        return results

    def _sequence(self, tokens: Tensor | None, pictures: Mapping[str, Picture]) -> Tensor | None:
        if tokens is None:  # a graph wrapper leaves this field out
            return None
        rows = dict(
            zip(pictures, tokens.split([prod(p.grid) for p in pictures.values()]), strict=True)
        )
        views = {name: stitch(rows[name], p.cell, p.columns) for name, p in pictures.items()}
        return assemble(views, self.config.order, self.image_newline, self.view_seperator)

    def _pictures(self, inputs: VisionInputs) -> list[dict[str, Picture]]:
        """Return how the tokens of each item's whole image and tiles lie; check their number."""
        tiles, grids = inputs.tiles or [], inputs.grid_thw.tolist()
        if len(tiles) != len(grids):
            raise ValueError(
                f"tiles has {len(tiles)} items, and grid_thw {len(grids)}: pass what "
                "preprocess returned"
            )
        items = []
        for (columns, rows, _), (views, h, w) in zip(tiles, grids, strict=True):
            if views != 1 + columns * rows:
                raise ValueError(
                    f"an item has {views} views, and the whole image with {columns}x{rows} tiles "
                    f"makes {1 + columns * rows}: pass what preprocess returned"
                )
            cell = token_grid(h, w)
            items.append({"image": Picture(cell), "tiles": Picture(cell, columns, rows)})
        return items

    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Return per item the maps "image" and "tiles", each [1, rows, columns, D]."""
        pictures = self._pictures(inputs)
        if features.ndim == 3:
            maps = self.paths["image"].feature_maps(features, inputs.grid_thw)
            return [
                {
                    "image": views[:1],
                    "tiles": rearrange(
                        views[1:], "(r c) h w d -> 1 (r h) (c w) d", r=item["tiles"].rows
                    ),
                }
                for views, item in zip(maps, pictures, strict=True)
            ]
        return maps_of_sequences(features, self.config.order, pictures)


class DeepseekVL2Tower(TileEncoder):
    """The SigLIP tower and the projector of DeepSeek-VL2, which encode views of one size."""

    def __init__(self, config: DeepseekVL2Config) -> None:
        super().__init__()
        self.config: DeepseekVL2Config = config
        positions = (config.tile_size // config.patch_size) ** 2
        self.vision = Siglip(config.block_sizes, positions, config.patch_size, config.in_channels)
        self.projector = Projector(config)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n patches each.

        Returns:
            ``last_hidden_state`` [B, n, D] after the last norm, ``pooler_output`` [tokens, out]
            without newlines, no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        hidden = self.vision.norm(hidden)
        h, w = (size // self.config.patch_size for size in pixel_values.shape[2:])
        tokens = self.projector(unfold_2x2(hidden.unflatten(1, (h, w))))
        return EncoderOutput(hidden, tokens.flatten(0, 1), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as patches with positions, [B, n, D]."""
        return self.vision.embed_patches(self._admit_tiles(pixel_values, self.vision.pos_embed))

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks of SigLIP."""
        return self.vision.blocks

    def _token_grid(self, h: int, w: int) -> tuple[int, int]:
        return token_grid(h, w)


class Projector(nn.Module):
    """Linear layers with exact GELU between them."""

    def __init__(self, config: DeepseekVL2Config) -> None:
        super().__init__()
        widths = [4 * config.hidden_size, *[config.projector_size] * (config.projector_depth - 1)]
        layers: list[nn.Module] = []
        for columns, rows in zip(widths, [*widths[1:], config.out_hidden_size], strict=True):
            layers += [nn.Linear(columns, rows), nn.GELU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def unfold_2x2(patches: Tensor) -> Tensor:
    """Put 2x2 patches side by side, as ``F.unfold`` does: each channel's four values together.

    Args:
        patches: [B, h, w, D]; an odd side is padded with zeros at the right or at the bottom.

    Returns:
        [B, tokens, 4D].
    """
    h, w = patches.shape[1:3]
    padded = F.pad(patches, (0, 0, 0, w % 2, 0, h % 2))
    return rearrange(padded, "b (h p) (w q) d -> b (h w) (d p q)", p=2, q=2)


def token_grid(h: int, w: int) -> tuple[int, int]:
    """Return rows and columns of tokens of a view: half of ``h`` and ``w``, rounded up."""
    return -(-h // 2), -(-w // 2)
