"""Preprocessing of images for LFM2-VL: patches of the whole image and of tiles of large images.

Source: ``Lfm2VlImageProcessor`` of transformers 5.23.0, without its padding.

The rule, for an image of ``height`` x ``width`` pixels and tokens of 32x32 pixels:

1. The whole image is resized to whole tokens, within bounds on its area, in about its shape.
2. An image over twice the largest area is also resized to a grid of 512x512 tiles in about its
   shape, and cut into them. The tiles come row by row, and the whole image after them.
3. If that grid has one tile, only this tile is encoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from ..data import Limits
from ..inputs.intake import ImagesLike, VideosLike
from ..inputs.limits import check_limits
from ..inputs.pixel_rules import PixelRules
from ..inputs.processor_files import (
    HALF,
    ProcessorFiles,
    Resample,
    Section,
    read_mean_std,
    read_positive,
    read_resample,
    require_supported,
)
from ..inputs.resizing import CPU, resize
from ..inputs.sizes import MOST_PIXELS, MOST_TILES, best_tiling, check_area
from ..inputs.staging import StagedPath
from ..inputs.views import ViewPreprocessor, Views, patch_rows


@dataclass(frozen=True)
class PatchTilesPreprocessor(ViewPreprocessor):
    """Resizes an image to whole tokens, and cuts a large one into tiles, too.

    A row of ``pixel_values`` is one flattened patch with the axes row, column, channel; patches lie
    row by row. The input path "image" gets each whole image, or the tiles of an image that is not
    encoded whole as well; the input path "tiles" gets all other tiles.
    """

    patch_size: int = 16
    token_size: int = 2
    """Side of a token in patches."""
    min_pixels: int = 64 * 32**2
    max_pixels: int = 256 * 32**2
    """The largest area of a whole image, except that each side has at least one token."""
    tile_size: int = 512
    min_tiles: int = 2
    max_tiles: int = 10
    """The largest number of tiles; 1 leaves images whole."""
    use_thumbnail: bool = True
    """Whether the whole image follows its tiles."""
    resample: Resample = "bilinear"
    """The kind of resampling when images are resized: "bilinear", "bicubic" or "lanczos"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_area(self.max_tiles, self.tile_size)
        if self.tile_size % self.factor:
            raise ValueError(
                f"tile_size={self.tile_size} must be a multiple of {self.factor}, the side of a "
                "token in pixels"
            )

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of a tile, for "image" too, though images have any size."""
        return {"image": self.tile_size, "tiles": self.tile_size}

    @property
    def pads(self) -> bool:
        """Return False: an image is stretched to whole tokens, and never padded."""
        return False

    @property
    def sizing(self) -> tuple[str, ...]:
        """Return the keywords of ``preprocess`` that limit the whole image's area and the tiles."""
        return ("min_pixels", "max_pixels", "max_tiles")

    @property
    def factor(self) -> int:
        """The side of a token in pixels."""
        return self.patch_size * self.token_size

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the defaults without processor files, and the keyword that changes one of them."""
        sizes = f"max_pixels={self.max_pixels}, max_tiles={self.max_tiles}"
        return f"{sizes}, mean={self.mean}, std={self.std}", "max_pixels"

    def with_files(
        self, files: ProcessorFiles, error: Callable[[str], ValueError] = ValueError
    ) -> PatchTilesPreprocessor:
        """Return a copy of the preprocessor with the defaults of a repo's processor files.

        The first LFM2-VL repos have the sizes of tiles at the top of ``processor_config.json`` and
        all other values in ``preprocessor_config.json``.

        Args:
            files: parsed JSON per file name without ``.json``.
            error: makes the exception for a bad value from its message.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        top = files.get("processor_config", {})
        if "tile_size" in top and "preprocessor_config" in files:
            files = {"preprocessor_config": {**files["preprocessor_config"], **top}}
        return super().with_files(files, error)

    def with_section(self, label: str, section: Section) -> PatchTilesPreprocessor:
        """Return a copy with the values that a processor file sets.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        sizes = {
            "do_resize": section.get("do_resize"),  # transformers resizes in any case
            "resample": section.get("resample"),
            "encoder_patch_size": self.patch_size,
            "downsample_factor": self.token_size,
            "max_pixels_tolerance": 2.0,
        }
        require_supported(label, section, sizes)
        mean, std = read_mean_std(label, section, HALF, HALF)
        token, split = self.factor**2, section.get("do_image_splitting", True)

        def read(name: str, default: int, maximum: int) -> int:
            return read_positive(label, name, section.get(name), default, maximum)

        bounds = PixelRules(
            read("min_image_tokens", 64, MOST_PIXELS // token) * token,
            read("max_image_tokens", 256, MOST_PIXELS // token) * token,
        ).bounded(None, None)
        return replace(
            self,
            mean=mean,
            std=std,
            resample=read_resample(label, section, "bilinear"),
            min_pixels=bounds.min_pixels,
            max_pixels=bounds.max_pixels,
            tile_size=read("tile_size", 512, math.isqrt(MOST_PIXELS)),
            min_tiles=read("min_tiles", 2, MOST_TILES),
            max_tiles=read("max_tiles", 10, MOST_TILES) if split else 1,
            use_thumbnail=bool(section.get("use_thumbnail", True)),
        )

    def read(
        self, images: ImagesLike, videos: VideosLike, limits: Limits, device: torch.device = CPU
    ) -> list[Views]:
        """Return the views of each image: the whole image and its tiles.

        Args:
            images: images in any form that ``preprocess`` accepts.
            videos: must be empty, since this tower takes no videos.
            limits: the keywords of ``preprocess``; ``min_pixels``, ``max_pixels`` and ``max_tiles``
                replace the preprocessor's own values unless they are None.
            device: the device of the views in the end. On CUDA they are also made there.

        Raises:
            ValueError: a bad image, a video, or a keyword that this family does not have.
        """
        check_limits(limits)
        rules = PixelRules(self.min_pixels, self.max_pixels)
        bounds = rules.bounded(limits.min_pixels, limits.max_pixels)
        bounded = replace(self, min_pixels=bounds.min_pixels, max_pixels=bounds.max_pixels)
        limits = limits._replace(min_pixels=None, max_pixels=None)
        return ViewPreprocessor.read(bounded, images, videos, limits, device)

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the tiles of an image row by row, and the whole image, all uint8.

        ``max_tiles`` bounds the number of tiles; None takes ``self.max_tiles``.
        """
        height, width = image.shape[1:]
        tile_limit = self.max_tiles if max_tiles is None else max_tiles
        view_size = whole_size(height, width, self.factor, self.min_pixels, self.max_pixels)
        if tile_limit == 1 or self._fits(height, width):
            return Views({"image": [resize(image, *view_size, self.resample)]})
        side = self.tile_size
        columns, rows = best_tiling(width, height, self.min_tiles, tile_limit, side)
        check_area(columns * rows, side)
        canvas = resize(image, rows * side, columns * side, self.resample)
        tiles = list(rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=side, w=side))
        if columns * rows == 1 or not self.use_thumbnail:
            return Views({"image": tiles}, (columns, rows, False))
        paths = {"image": [resize(image, *view_size, self.resample)], "tiles": tiles}
        return Views(paths, (columns, rows, True))

    def _fits(self, height: int, width: int) -> bool:
        """Return whether an image is too small, in pixels, to be cut into tiles."""
        new_height, new_width = (
            max(self.patch_size, round(side / self.factor) * self.factor)
            for side in (height, width)
        )
        return new_height * new_width <= 2 * self.max_pixels

    def rows(
        self, parts: Sequence[StagedPath], side: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the normalised patches of one input path, [P, p*p*3].

        Args:
            parts: the views of each item that has some for this path.
            side: not used here; the side of a view in pixels, for other families.
            dtype: the dtype of the result.
            device: the device of the result if there are no items.
        """
        return patch_rows(parts, self.patch_size, dtype, device, channels_last=True)


def whole_size(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the size that a whole image is resized to.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        factor: both sides of the result are multiples of this number of pixels.
        min_pixels: smallest area of the result.
        max_pixels: largest area of the result, except that each side has at least ``factor``.

    Returns:
        Height and width in about the shape of the image; an image that is a thin line is stretched.

    Raises:
        ValueError: an image so thin that the result is over the limit of ``MOST_PIXELS``.
    """
    new_height, new_width = (max(factor, round(side / factor) * factor) for side in (height, width))
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height, new_width = (
            max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
        )
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height, new_width = (
            math.ceil(side * grow / factor) * factor for side in (height, width)
        )
    if new_height * new_width > MOST_PIXELS:
        raise ValueError(
            f"is {width}x{height} pixels, which makes {new_width}x{new_height}: at most "
            f"{MOST_PIXELS} pixels; crop it"
        )
    return new_height, new_width
