"""DeepSeek-OCR's encoder, also Unlimited-OCR's: SAM-B, a 16-fold compressor, CLIP-L over its map.

A view goes through SAM (windows, relative positions, four blocks with global attention), whose
feature map two strided convolutions make 4x4 times smaller. CLIP reads that map in place of patch
embeddings. CLIP's output and the map, side by side, are projected to the language model's width.
An image is one view of the whole of it and, if it is large, tiles; their tokens make one sequence:
the rows of all tiles as one picture, then of the whole image, each row with a learned newline
behind it, then a learned separator.

Source: ``DeepseekOCRForCausalLM``, ``ImageEncoderViT``, ``VitModel`` and ``DeepseekOCRProcessor``
of deepseek-ai/DeepSeek-OCR at commit e4ac34e; ``UnlimitedOcrModel`` of transformers 5.23.0 and, for
the tiles of several images, ``unlimited_ocr.py`` of vLLM 0.33.0.
Repo ids: deepseek-ai/DeepSeek-OCR, baidu/Unlimited-OCR.

Shapes: B views, n = h*w/16 cells of a view of h*w patches, D width of CLIP and SAM side by side.

Deliberate differences: those of ``encoders.deepseek.sam`` and ``encoders.deepseek.clip_vit``, and

- The mode is chosen with ``at_mode``; the source has it in a settings file. The default is
  "gundam", the source's.
- Unlimited-OCR tiles an image, into up to 32 tiles, if it is alone in its call, as in vLLM;
  transformers also tiles each of several images, which ``max_tiles=32`` does here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..base.paths_encoder import PathsEncoder, extras_of_paths, tilings_of
from ..base.raster import maps_of_sequences
from ..base.tile_encoder import TileEncoder
from ..base.vision_encoder import InnerStack
from ..data import EncoderOutput, GridLike, Metadata, Output, VisionInputs, output_like
from ..hf_config import find_section, read_size, require_divisible, require_sizes, require_value
from ..layers.assembly import SEPARATOR, Picture, assemble, stitch
from ..layers.blocks import BlockSizes, nested_sizes
from ..layers.products import convolve
from ..layers.segments import BlockContext
from .clip_vit import ClipVit
from .sam import Sam, SamSizes, read_channels

if TYPE_CHECKING:
    from ..contract import Preprocessor


class Mode(NamedTuple):
    """A mode of DeepSeek-OCR: the sizes at which an image and its tiles are encoded."""

    base_size: int
    """Side of the view of the whole image in pixels."""
    tile_size: int = 640
    tiled: bool = False
    keep_shape: bool = True
    """Whether the whole image is padded to a square; if not, it is stretched to one."""


ModeName: TypeAlias = Literal["tiny", "small", "base", "large", "gundam"]
"""The name of a mode, the sizes at which an image is encoded, in the repo of DeepSeek-OCR."""
MODES: Mapping[ModeName, Mode] = {
    "tiny": Mode(512, keep_shape=False),
    "small": Mode(640, keep_shape=False),
    "base": Mode(1024),
    "large": Mode(1280),
    "gundam": Mode(1024, tiled=True),
}
ORDER = ("tiles", "image", SEPARATOR)
"""The order in which an image's views and learned tokens stand in its token sequence."""


@dataclass(frozen=True)
class DeepseekOCRConfig:
    """Sizes of SAM, the compressor and CLIP, and the mode: how an image becomes views."""

    sam: SamSizes
    clip_vit: BlockSizes
    positions: int
    """The number of rows of CLIP's table of positions, whose first is the class token's."""
    out_hidden_size: int
    downsample_channels: tuple[int, ...] = (512, 1024)
    mode: ModeName = "gundam"
    max_tiles: int = field(default=6, compare=False)
    """Most tiles per image; not compared between configs, as it is no part of the architecture."""
    tiles_several: bool = field(default=True, compare=False)
    """Whether images are tiled if a call has more than one; not compared between configs."""

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        object.__setattr__(self, "sam", nested_sizes(SamSizes, self.sam))
        object.__setattr__(self, "clip_vit", nested_sizes(BlockSizes, self.clip_vit))
        if self.mode not in tuple(MODES):
            raise ValueError(f"mode={self.mode!r}: must be one of {', '.join(map(repr, MODES))}")
        if self.downsample_channels[-1] != self.clip_vit.hidden_size:
            raise ValueError(
                f"config: downsample_channels end in {self.downsample_channels[-1]}, and CLIP "
                f"reads features of width {self.clip_vit.hidden_size}: they must be equal"
            )

    @property
    def depth(self) -> int:
        """Number of blocks of CLIP."""
        return self.clip_vit.depth

    @property
    def hidden_size(self) -> int:
        """The number of columns of ``last_hidden_state``: CLIP's columns, then SAM's."""
        return self.clip_vit.hidden_size + self.downsample_channels[-1]

    @property
    def patch_size(self) -> int:
        """Side of a patch of SAM in pixels."""
        return self.sam.patch_size

    @property
    def in_channels(self) -> int:
        """The number of colour channels of the pixels."""
        return self.sam.in_channels

    @property
    def tile_size(self) -> int:
        """Side of the view of the whole image in pixels."""
        return MODES[self.mode].base_size

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> DeepseekOCRConfig:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        towers = vision.get("width")
        names = ("sam_vit_b", "clip-l-14-224")
        sam, clip = (towers.get(x) if isinstance(towers, Mapping) else None for x in names)
        if not isinstance(sam, Mapping) or not isinstance(clip, Mapping):
            raise ValueError(
                f"config: width must describe 'sam_vit_b' and 'clip-l-14-224', and is {towers!r}"
            )
        projector = find_section(config, "projector_config")
        require_value(vision, "model_name", "deeplip_b_l")
        require_value(projector, "projector_type", "linear")
        require_value(config, "tile_tag", "2D")
        classes = config.get("architectures")
        unlimited = config.get("model_type") in ("unlimited-ocr", "unlimited_ocr") or (
            isinstance(classes, Sequence) and "UnlimitedOCRForCausalLM" in classes
        )
        width = read_size(clip, "width")
        image, patch = read_size(clip, "image_size"), read_size(clip, "patch_size")
        require_divisible("image_size", image, "patch_size", patch)
        return cls(
            sam=SamSizes.from_hf({"image_size": vision.get("image_size"), **sam}),
            clip_vit=BlockSizes(
                depth=read_size(clip, "layers", limit=1024),
                hidden_size=width,
                intermediate_size=read_size(clip, "intermediate_size", default=4 * width),
                num_heads=read_size(clip, "heads"),
                activation="quick_gelu",
                layer_norm_eps=1e-5,
            ),
            positions=1 + (image // patch) ** 2,
            out_hidden_size=read_size(projector, "n_embed"),
            downsample_channels=read_channels(sam, "downsample_channels"),
            max_tiles=32 if unlimited else 6,
            tiles_several=not unlimited,
        )


class DeepseekOCREncoder(PathsEncoder):
    """Encodes a whole image (input path "image") and tiles of it ("tiles") with one tower."""

    config: DeepseekOCRConfig
    paths: Mapping[str, DeepseekOCRTower]

    def __init__(self, config: DeepseekOCRConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        tower = DeepseekOCRTower(config)
        self._share_modules(tower)
        self.image_newline = nn.Parameter(torch.randn(config.out_hidden_size))
        self.view_seperator = nn.Parameter(torch.randn(config.out_hidden_size))  # sic in checkpoint
        self._preprocessor = preprocessor
        self._set_mode(config, tower)

    def at_mode(self, mode: ModeName) -> DeepseekOCREncoder:
        """Return a copy of this encoder, with shared weights, that encodes images at other sizes.

        Args:
            mode: "tiny" (one view of 512x512 pixels), "small" (640x640), "base" (1024x1024),
                "large" (1280x1280), or "gundam" (1024x1024, and tiles of 640x640 of images that
                are larger than a tile).

        Raises:
            ValueError: an unknown mode.
        """
        encoder = copy.copy(self)  # the copy shares modules, parameters and hooks
        encoder._set_mode(replace(self.config, mode=mode), self.paths["image"])
        encoder._preprocessor = self._preprocessor and _in_mode(self._preprocessor, MODES[mode])
        return encoder

    def _default_preprocessor(self) -> Preprocessor:
        from .deepseek_ocr_pixels import OcrPreprocessor

        max_tiles, several = self.config.max_tiles, self.config.tiles_several
        plain = OcrPreprocessor(self.config.patch_size, max_tiles=max_tiles, tiles_several=several)
        return _in_mode(plain, MODES[self.config.mode])

    def _set_mode(self, config: DeepseekOCRConfig, tower: DeepseekOCRTower) -> None:
        mode, self.config = MODES[config.mode], config
        sides = {"image": mode.base_size} | ({"tiles": mode.tile_size} if mode.tiled else {})
        self.paths = {name: tower.at(side) for name, side in sides.items()}

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Join the features of the views of each image to one sequence.

        Returns:
            For each item ``last_hidden_state`` [rows, D] and ``pooler_output`` [tokens, out], both
            with the tiles first, then the whole image.
        """
        items = zip(self.split_paths(outputs, inputs), self._pictures(inputs), strict=True)
        results = []
        for item, pictures in items:
            rows = {name: part.last_hidden_state for name, part in item.items()}
            tokens = {name: part.pooler_output for name, part in item.items()}
            hidden = self._sequence(rows, pictures)
            pooled = self._sequence(tokens, pictures, learned=True)
            image, extras = item["image"], extras_of_paths(item)
            results.append(output_like(image, hidden, pooled, image.deepstack_features, extras))
        return results

    def _sequence(
        self,
        views: Mapping[str, Tensor | None],
        pictures: Mapping[str, Picture],
        learned: bool = False,
    ) -> Tensor | None:
        """Join the features ``views`` of an item, by input path, to one sequence.

        ``pictures`` say how the tiles of a path are arranged. With ``learned``, the learned
        newlines and separator are inserted. Returns None if features are None.
        """
        maps = {}
        for name, rows in views.items():
            if rows is None:  # a graph wrapper leaves this field out
                return None
            maps[name] = stitch(rows.flatten(0, -2), pictures[name].cell, pictures[name].columns)
        if learned:
            return assemble(maps, ORDER, self.image_newline, self.view_seperator)
        return torch.cat([maps[name].flatten(0, 1) for name in ORDER if name in maps])

    def _pictures(self, inputs: VisionInputs) -> list[dict[str, Picture]]:
        """Return how the tokens of "image" and "tiles" are arranged, for each item."""
        items: list[dict[str, Picture]] = [{} for _ in inputs.grid_thw]
        tilings = tilings_of(inputs)
        for name, (_, grid_thw, numbers) in inputs.paths.items():
            for item, (_, h, w) in zip(numbers, grid_thw.tolist(), strict=True):
                columns, rows = (1, 1) if name == "image" else tilings[item]
                items[item][name] = Picture((compressed_side(h), compressed_side(w)), columns, rows)
        return items

    def _check_inputs(self, inputs: VisionInputs) -> None:
        super()._check_inputs(inputs)
        tilings_of(inputs)

    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Return the map "image" of each item and, if it has tiles, "tiles", each [1, h, w, D]."""
        return maps_of_sequences(features, ORDER, self._pictures(inputs))


class DeepseekOCRTower(TileEncoder):
    """The tower of DeepSeek-OCR: SAM, compressor, CLIP and projector, for views of one size."""

    prefix_rows = 1
    _largest_batch = 16

    def __init__(self, config: DeepseekOCRConfig) -> None:
        super().__init__()
        self.config: DeepseekOCRConfig = config
        self.sam_model = Compressor(config.sam, config.downsample_channels)
        self.vision_model = ClipVit(config.clip_vit, config.positions)
        self.projector = Projector(config.hidden_size, config.out_hidden_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views, each to n cells of the compressed map.

        Returns:
            ``last_hidden_state`` [B, n, D] (CLIP, then SAM), ``pooler_output`` [B*n, out] without
            newlines, no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        features = self._compress(pixel_values)
        rows = self.vision_model.embed_patches(features)
        for block in self.steps(self.blocks, rows, metadata):
            rows = block(rows)
        hidden = torch.cat((rows[:, 1:], features.flatten(1, 2)), dim=-1)
        return EncoderOutput(hidden, self.projector(hidden).flatten(0, 1), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as a class token and n cells, [B, 1+n, width of CLIP]."""
        return self.vision_model.embed_patches(self._compress(pixel_values))

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks of CLIP, which run after those of SAM."""
        return self.vision_model.blocks

    @property
    def inner_stacks(self) -> Mapping[str, InnerStack]:
        """The transformer blocks of SAM, which users select by the name "sam"."""
        return {"sam": InnerStack(self.sam_model.blocks, self._embed_views)}

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> BlockContext:
        """Return segment offsets for CLIP's blocks, None for SAM's (``hidden`` [B, h, w, D])."""
        return super()._block_context(hidden, metadata) if hidden.ndim == 3 else None

    def _row_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of the compressor's map for a view of ``h`` x ``w`` patches."""
        return compressed_side(h), compressed_side(w)

    def _compress(self, pixel_values: Tensor) -> Tensor:
        """Run SAM and compressor on views [B, C, H, W]; return [B, h/4, w/4, width of CLIP]."""
        hidden = self._embed_views(pixel_values)
        for block in self.steps(self.sam_model.blocks, hidden, {}):
            hidden = block(hidden)
        return self.sam_model.compress(hidden)

    def _embed_views(self, pixel_values: Tensor) -> Tensor:
        """Return the rows [B, h, w, width of SAM] that SAM's first block reads."""
        return self.sam_model.embed_patches(
            self._admit_tiles(pixel_values, self.sam_model.pos_embed)
        )


class Compressor(Sam):
    """SAM with two convolutions behind its neck that make the map 4x4 times smaller."""

    def __init__(self, sizes: SamSizes, channels: tuple[int, ...]) -> None:
        super().__init__(sizes)
        inner = sizes.neck_channels
        self.net_2 = nn.Conv2d(inner, channels[0], 3, stride=2, padding=1, bias=False)
        self.net_3 = nn.Conv2d(channels[0], channels[1], 3, stride=2, padding=1, bias=False)

    def compress(self, hidden: Tensor) -> Tensor:
        """Turn SAM's last hidden state [B, h, w, SAM's width] into [B, h/4, w/4, CLIP's width]."""
        return convolve(self.net_3, convolve(self.net_2, self.neck(hidden))).permute(0, 2, 3, 1)


class Projector(nn.Module):
    """One linear layer to the width of the language model."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _in_mode(preprocessor: Preprocessor, mode: Mode) -> Preprocessor:
    """Return a copy of an ``OcrPreprocessor`` for ``mode``; others are returned unchanged."""
    from .deepseek_ocr_pixels import OcrPreprocessor

    if not isinstance(preprocessor, OcrPreprocessor):
        return preprocessor
    return replace(preprocessor, **mode._asdict())


def compressed_side(patches: int) -> int:
    """Return the side of the compressor's map for views of ``patches`` patches: a quarter of it."""
    return -(-patches // 4)
