"""DeepSeek-VL and Janus: SigLIP-L alone (1.3B, Janus), or SigLIP-L and SAM-B over one image (7B).

The 1.3B and Janus encode a view of 384x384 pixels and project each patch. The 7B also encodes a
view of 1024x1024 pixels with SAM, whose features two strided convolutions bring to the same 24x24
grid, once from the last block and once from the first block with global attention; both towers are
projected to half the width, put side by side and projected once more.

Source: ``MultiModalityCausalLM``, ``CLIPVisionTower``, ``HybridVisionTower`` and ``MlpProjector``
of deepseek-ai/DeepSeek-VL at commit 681bffb; ``DeepseekVLModel``, ``DeepseekVLHybridModel`` and
``JanusModel`` of transformers 5.23.0.
Repo ids: deepseek-ai/deepseek-vl-{1.3b,7b}-{base,chat}, and deepseek-community's repos of these
names and deepseek-community/Janus-Pro-{1B,7B}, which are in transformers' format.

Shapes: B views, n patches of a view, D width, N = B*n tokens of a path.

Deliberate differences: those of ``deepseek_siglip.py`` and ``sam.py``, and

- ``HybridVisionTower`` has two norms that it never calls; they are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.paths_encoder import PathsEncoder, extras_of_paths
from ..base.tile_encoder import TileEncoder
from ..data import EncoderOutput, GridLike, Metadata, Output, VisionInputs, output_like
from ..hf_config import (
    find_section,
    read_ratio,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.blocks import BlockSizes, nested_sizes
from ..layers.products import convolve
from .deepseek_siglip import Siglip, read_siglip
from .sam import Neck, Sam, SamSizes, read_channels

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class DeepseekVLConfig:
    """The sizes of the SigLIP tower, and the width that its features are projected to."""

    out_hidden_size: int
    depth: int = 24
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_heads: int = 16
    image_size: int = 384
    patch_size: int = 16
    in_channels: int = 3

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("image_size", self.image_size, "patch_size", self.patch_size)

    @property
    def tile_size(self) -> int:
        """Side of a view in pixels."""
        return self.image_size

    @property
    def block_sizes(self) -> BlockSizes:
        """The depth, widths, number of heads, activation and epsilon of the transformer blocks."""
        return BlockSizes(
            self.depth, self.hidden_size, self.intermediate_size, self.num_heads, "gelu", 1e-6
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> DeepseekVLConfig:
        """Read the ``config.json`` of the 1.3B model or Janus, the original or transformers' one.

        Raises:
            ValueError: a config value that is not supported.
        """
        vision = find_section(config, "vision_config.params", "vision_config")
        if config.get("model_type") == "janus" or "use_qk_norm" in vision:
            return cls(read_size(vision, "projection_dim", default=2048), **_read_janus(vision))
        aligner = find_section(config, "aligner_config.params")
        # Pixels are normalised by the processor, not by the tower.
        require_value(vision, "pixel_mean", None)
        require_value(vision, "pixel_std", None)
        require_value(aligner, "projector_type", "mlp_gelu")
        require_value(aligner, "depth", 2)
        section = {**find_section(config, "vision_config"), **vision}
        return cls(read_width(config), **read_siglip(section, converted="text_config" in config))


@dataclass(frozen=True)
class DeepseekVLHybridConfig:
    """Sizes of the SigLIP tower (``low``) and of the SAM tower (``high``) of DeepSeek-VL 7B."""

    low: DeepseekVLConfig
    high: SamSizes
    downsample_channels: tuple[int, ...] = (512, 1024)

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", nested_sizes(DeepseekVLConfig, self.low))
        object.__setattr__(self, "high", nested_sizes(SamSizes, self.high))
        blocks = self.high.global_blocks
        if blocks[0] != min(blocks):
            raise ValueError(
                f"config: global_attn_indexes={list(blocks)} must begin with the lowest number: "
                "features are also read after the first block of the list (transformers) or of the "
                "tower (DeepSeek), which must be the same block"
            )

    @property
    def out_hidden_size(self) -> int:
        """The number of columns of a token; each of the two towers is projected to half of it."""
        return 2 * self.low.out_hidden_size

    @property
    def hidden_size(self) -> int:
        """Width of both towers' features side by side."""
        return self.low.hidden_size + self.downsample_channels[-1]

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> DeepseekVLHybridConfig:
        """Read the ``config.json`` of the 7B model, in the original or transformers' format.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        from ..inputs.processor_files import CLIP_MEAN, CLIP_STD, HALF

        vision = find_section(config, "vision_config")
        width = read_width(config)
        if width % 2:
            raise ValueError(
                f"config: width {width} of the language model must be even: each tower makes half"
            )
        if "text_config" in config:
            sam = SamSizes.from_hf(find_section(config, "high_res_vision_config"))
            siglip = DeepseekVLConfig(width // 2, **read_siglip(vision, converted=True))
            return cls(siglip, sam, (2 * sam.neck_channels, 4 * sam.neck_channels))
        params = find_section(config, "vision_config.params")
        low, high = (
            find_section(config, f"vision_config.params.{name}_res_cfg") for name in ("low", "high")
        )
        aligner = find_section(config, "aligner_config.params")
        require_value(params, "concat_type", "tuple")
        require_value(aligner, "projector_type", "low_high_hybrid_split_mlp_gelu")
        require_value(aligner, "depth", 2)
        require_value(high, "model_name", "sam_b_downsample")
        for section, mean, std in ((low, HALF, HALF), (high, CLIP_MEAN, CLIP_STD)):
            require_value(section, "pixel_mean", list(mean))
            require_value(section, "pixel_std", list(std))
        return cls(
            DeepseekVLConfig(width // 2, **read_siglip({**vision, **low}, converted=False)),
            SamSizes.from_hf(high),
            read_channels(high, "downsample_channels"),
        )


def read_width(config: Mapping[str, object]) -> int:
    """Return the language model's width; transformers' configs omit Llama's default, 4,096."""
    if "text_config" in config:
        return read_size(find_section(config, "text_config"), "hidden_size", default=4096)
    return read_size(find_section(config, "aligner_config.params"), "n_embed")


def _read_janus(vision: Mapping[str, object]) -> dict[str, int]:
    """Return the sizes of SigLIP in the vision section of a config of Janus for transformers."""
    require_value(vision, "use_qk_norm", False)
    require_value(vision, "attention_bias", True)
    require_value(vision, "depth", 2)  # of the aligner
    width = read_size(vision, "hidden_size", default=1024)
    inner = int(width * read_ratio(vision, "mlp_ratio", default=4.0))
    return read_siglip({**vision, "intermediate_size": inner}, converted=False)


class SiglipViews(TileEncoder):
    """SigLIP over views of one size, with a token per patch; subclasses set ``aligner``."""

    aligner: nn.Module
    """Projects features [B, n, D] to the width of tokens."""

    def __init__(self, config: DeepseekVLConfig) -> None:
        super().__init__()
        self.config: DeepseekVLConfig = config
        positions = (config.image_size // config.patch_size) ** 2
        self.vision = Siglip(config.block_sizes, positions, config.patch_size, config.in_channels)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n patches each to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D] after the last norm, ``pooler_output`` [N, out], no
            DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        hidden = self.vision.norm(hidden)
        return EncoderOutput(hidden, self.aligner(hidden).flatten(0, 1), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as patches with positions, [B, n, D]."""
        return self.vision.embed_patches(self._admit_tiles(pixel_values, self.vision.pos_embed))

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks of SigLIP."""
        return self.vision.blocks


class DeepseekVLEncoder(SiglipViews):
    """Encodes views of 384x384 pixels to hidden states and one projected token per patch."""

    def __init__(self, config: DeepseekVLConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__(config)
        self._preprocessor = preprocessor
        self.aligner = Aligner(config.hidden_size, config.out_hidden_size)

    def _default_preprocessor(self) -> Preprocessor:
        from .deepseek_vl_pixels import SquarePreprocessor

        return SquarePreprocessor(self.config.patch_size, image_size=self.config.image_size)


class DeepseekVLHybridEncoder(PathsEncoder):
    """Encodes an image at 384x384 pixels (input path "image") and at 1024x1024 ("high")."""

    def __init__(
        self, config: DeepseekVLHybridConfig, preprocessor: Preprocessor | None = None
    ) -> None:
        super().__init__()
        low = config.low
        self.config: DeepseekVLHybridConfig = config
        self._preprocessor = preprocessor
        self.low = LowResolution(low)
        self.high = HighResolution(config)
        self.paths = {"image": self.low, "high": self.high}
        self.aligner = nn.Linear(config.out_hidden_size, config.out_hidden_size)

    def _default_preprocessor(self) -> Preprocessor:
        from .deepseek_vl_pixels import HybridPreprocessor

        low, high = self.config.low, self.config.high
        return HybridPreprocessor(
            low.patch_size, image_size=high.image_size, low_size=low.image_size
        )

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Put the features of both paths side by side, "high" first, and project them to tokens.

        Returns:
            For each item ``last_hidden_state`` [views, n, D of "high" + D of "image"] and
            ``pooler_output`` [views*n, out].

        Raises:
            ValueError: an item without the same number of views in both paths.
        """
        views, high_views = (path.grid_thw[:, 0].tolist() for path in inputs.paths.values())
        if views != high_views:
            raise ValueError(
                f"path 'image' has {sum(views)} views of {len(views)} items, and path 'high' "
                f"{sum(high_views)} of {len(high_views)}: pass what preprocess returned"
            )
        if not outputs:
            return []
        low, high = outputs["image"], outputs["high"]
        halves = _concatenate(high.pooler_output, low.pooler_output)
        tokens = None if halves is None else self.aligner(F.gelu(halves))
        hidden = _concatenate(high.last_hidden_state, low.last_hidden_state)
        extras = extras_of_paths(outputs)
        joined = output_like(low, hidden, tokens, low.deepstack_features, extras)
        return self.low.split(joined, inputs.grid_thw)

    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Return one feature map [1, h, w, D] per item, as a dict with the key "image"."""
        maps = self.low.feature_maps(features, inputs.grid_thw)
        return [{"image": item} for item in maps]


class LowResolution(SiglipViews):
    """The input path "image" of DeepSeek-VL 7B: SigLIP over the 384x384 view, and a projection."""

    def __init__(self, config: DeepseekVLConfig) -> None:
        super().__init__(config)
        self.aligner = nn.Linear(config.hidden_size, config.out_hidden_size)


class HighResolution(TileEncoder):
    """The 1024x1024 tower of DeepSeek-VL 7B: SAM, maps resized to SigLIP's grid, a projection."""

    config: SamSizes
    _largest_batch = 16

    def __init__(self, config: DeepseekVLHybridConfig) -> None:
        super().__init__()
        sizes = config.high
        self.config = sizes
        self.grid = config.low.image_size // config.low.patch_size
        """The side of the grid of the small view (SigLIP's) in patches."""
        self.out, self.width = config.low.out_hidden_size, config.downsample_channels[-1]
        self.sam = Sam(sizes)
        self.neck_hd = Neck(sizes)
        pairs = pairwise((sizes.neck_channels, *config.downsample_channels))
        self.downsamples = nn.Sequential(  # each halves height and width of a map
            *(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in pairs)
        )
        self.hd_alpha_downsamples = nn.Parameter(torch.zeros(1))
        self.aligner = nn.Linear(self.width, self.out)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views to N = B*n half-width tokens.

        Returns:
            ``last_hidden_state`` [B, n, D] on the grid of the small view, ``pooler_output``
            [N, out/2], no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        first = min(self.config.global_blocks)
        steps = self.steps(self.blocks, hidden, metadata, read_after=(first,))
        for number, block in enumerate(steps):
            hidden = block(hidden)
            if number == first:
                early = hidden
        maps = self._on_grid(self.sam.neck(hidden))
        maps = maps + self._on_grid(self.neck_hd(early)) * self.hd_alpha_downsamples
        hidden = maps.flatten(2).transpose(1, 2)
        return EncoderOutput(hidden, self.aligner(hidden).flatten(0, 1), ())

    def _on_grid(self, maps: Tensor) -> Tensor:
        """Resize SAM's maps [B, C, h, w] in float32, then convolve them to SigLIP's grid."""
        precise = maps.to(torch.promote_types(maps.dtype, torch.float32))
        side = 4 * self.grid
        precise = F.interpolate(precise, size=(side, side), mode="bilinear", align_corners=False)
        maps = precise.to(maps.dtype)
        for layer in self.downsamples:
            maps = convolve(layer, maps)
        return maps

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks of SAM."""
        return self.sam.blocks

    @property
    def num_features(self) -> int:
        """The number of columns of ``last_hidden_state``."""
        return self.width

    @property
    def out_features(self) -> int:
        """The number of columns of ``pooler_output``."""
        return self.out

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> None:
        """Return None: in SAM every view attends to itself, without offsets or angles."""

    def in_input_order(self, rows: Tensor, metadata: Metadata) -> Tensor:
        """Return rows [B, h*w, ..] of rows [B, h, w, ..], as SAM's blocks have them."""
        return rows.flatten(1, 2)

    def _row_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of the features: SigLIP's grid, for views of any size."""
        return self.grid, self.grid

    def _row_maps(self, rows: Tensor, h: int, w: int) -> Tensor:
        patches = rows.shape[1] == h * w  # or else rows of the final map
        return torch.unflatten(rows, 1, (h, w) if patches else self._row_grid(h, w))

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as patches with positions, [B, h, w, width of SAM]."""
        return self.sam.embed_patches(self._admit_tiles(pixel_values, self.sam.pos_embed))


class Aligner(nn.Module):
    """Two linear layers with exact GELU between them."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, out), nn.GELU(), nn.Linear(out, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _concatenate(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return two features concatenated by column, or None if one of them is None."""
    return None if left is None or right is None else torch.cat((left, right), dim=-1)
