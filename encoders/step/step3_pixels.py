"""Preprocessing of images for the Step towers: a view of the whole image, and tiles.

Source: ``ImagePatcher`` and ``Step3VisionProcessor`` of vLLM 0.33.0, a copy of StepFun's own
processor (transformers' ``Step3p7ImageProcessor`` differs from it, see below).

The rule, for an image of ``long`` x ``short`` pixels:

1. An image under 32 pixels on one side with an aspect ratio over 4 is laid on a black square, in
   the top left corner. An image whose ``long`` is over 3024 pixels is scaled down to that.
2. The crop is a square. If ``long`` is below 728, it is ``short`` for an aspect ratio over 1.5,
   else there are no tiles. From 728 on it is 504, or ``min(short, 504)`` for a ratio over 4.
3. Each side that is at least a crop long is resized to a multiple of the crop: up if over a
   fifth of a crop is left over, else down. Crops cover the image row by row, and are black where
   they reach beyond it. Each is resized to 504x504, and the whole image to 728x728.

Deliberate differences:

- Images are resized as uint8, as in transformers; StepFun's code resizes the last time as floats,
  and the results differ by rounding to one of 255 levels.
- The rule above is StepFun's in four cases in which transformers differs: a crop that reaches
  beyond the image (transformers stretches the part inside over the tile), images of exactly
  728x728 pixels (transformers makes no tiles of them), elongated images over 3024 pixels, and sides
  of which exactly a fifth of a crop is left over (the rounding of the quotient decides).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    PerChannel,
    Section,
    read_mean_std,
    require_supported,
)
from ..inputs.resizing import resize
from ..inputs.sizes import MOST_PIXELS, MOST_TILES, check_area
from ..inputs.views import ViewPreprocessor, Views

LARGEST = 3024
"""The most pixels of the longer side of an image, which is scaled down to it before it is cut."""


class Crops(NamedTuple):
    """The size in pixels that an image is resized to, and the side of its square crops (tiles)."""

    width: int
    """Width of the resized image in pixels."""
    height: int
    """Height of the resized image in pixels."""
    side: int
    """The side of a crop in pixels; 0 means that the image has no tiles."""

    @property
    def columns(self) -> int:
        """The number of columns of crops; 0 if the image is not cut."""
        return max(self.width // self.side, 1) if self.side else 0

    @property
    def rows(self) -> int:
        """The number of rows of crops; 0 if the image is not cut."""
        return max(self.height // self.side, 1) if self.side else 0


def plan_crops(width: int, height: int, image_size: int = 728, tile_size: int = 504) -> Crops:
    """Return the size that an image is resized to, and the side of its crops.

    Args:
        width: width of the image in pixels, at most 3024.
        height: height of the image in pixels, at most 3024.
        image_size: side of the whole view in pixels; an image whose longer side is below it is cut
            into tiles only if its aspect ratio is over 1.5.
        tile_size: side of a tile in pixels.
    """
    long, short = max(width, height), min(width, height)
    if long < image_size:
        side = short if long / short > 1.5 else 0
    else:
        side = min(short, tile_size) if long / short > 4 else tile_size
    if not side:
        return Crops(width, height, 0)
    return Crops(_snap(width, side), _snap(height, side), side)


def _snap(length: int, crop: int) -> int:
    """Return the length in pixels that a side is resized to."""
    if length < crop:
        return length
    count = length // crop
    return crop * (count + (length / crop - count > 0.2))


@dataclass(frozen=True)
class CropPreprocessor(ViewPreprocessor):
    """Cuts an image into tiles and resizes the whole image to one view (Step towers).

    The input path "image" gets the view of each whole image, the input path "tiles" all tiles. How
    many tiles an image has depends only on its size.
    """

    patch_size: int = 14
    mean: PerChannel = CLIP_MEAN
    std: PerChannel = CLIP_STD
    image_size: int = 728
    tile_size: int = 504
    tiled: bool = True
    """Whether the preprocessor cuts images into tiles at all."""

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of the whole view ("image") and of a tile ("tiles")."""
        return {"image": self.image_size, "tiles": self.tile_size}

    @property
    def sizing(self) -> tuple[str, ...]:
        """Return no keyword of ``preprocess``: the size of an image decides its tiles."""
        return ()

    def with_section(self, label: str, section: Section) -> CropPreprocessor:
        """Return a copy with the mean and std that a processor file of transformers sets.

        Nothing is read from other files, since StepFun's code has fixed values. ``label`` names the
        section of the file in errors.
        """
        if not str(section.get("image_processor_type")).startswith("Step3p7ImageProcessor"):
            return self
        size = {"height": self.image_size, "width": self.image_size}
        sizes = {"size": size, "patch_size": self.tile_size, "max_image_size": LARGEST}
        require_supported(label, section, {"resample": 2, **sizes})
        mean, std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
        return replace(self, mean=mean, std=std)

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the whole view and the tiles row by row, all uint8; ``max_tiles`` is not used."""
        image = _shrink(_pad_to_square(image))
        height, width = image.shape[1:]
        whole_view = resize(image, self.image_size, self.image_size, "bilinear")
        crops = Crops(width, height, 0)
        if self.tiled:
            crops = plan_crops(width, height, self.image_size, self.tile_size)
        if not crops.side:
            return Views({"image": [whole_view]})
        tiles = self._cut(image, crops)
        return Views({"image": [whole_view], "tiles": tiles}, (crops.columns, crops.rows, True))

    def _cut(self, image: Tensor, crops: Crops) -> list[Tensor]:
        """Return the tiles of an image, uint8 [3, s, s] each, row by row."""
        side, columns, rows = crops.side, crops.columns, crops.rows
        if columns * rows > MOST_TILES:
            raise ValueError(
                f"is {image.shape[2]}x{image.shape[1]} pixels after scaling, which makes "
                f"{columns * rows} tiles: at most {MOST_TILES}; crop it"
            )
        check_area(columns * rows, self.tile_size)
        resized = resize(image, crops.height, crops.width, "bilinear")
        right, bottom = columns * side - crops.width, rows * side - crops.height
        canvas = F.pad(resized, (0, max(right, 0), 0, max(bottom, 0)))
        parts = [part for band in canvas.split(side, 1)[:rows] for part in band.split(side, 2)]
        return [resize(part, self.tile_size, self.tile_size, "bilinear") for part in parts]


def _pad_to_square(image: Tensor) -> Tensor:
    """Lay a thin image on a black square, in the top left corner; return other images unchanged.

    An image is thin if one side is under 32 pixels and the other is over 4 times as long.

    Raises:
        ValueError: the square has more than ``MOST_PIXELS``.
    """
    height, width = image.shape[1:]
    long, short = max(width, height), min(width, height)
    if short >= 32 or long / short <= 4:
        return image
    if long * long > MOST_PIXELS:
        raise ValueError(
            f"is {width}x{height} pixels: a thin image is laid on a square, and one of "
            f"{long * long} pixels is over the limit of {MOST_PIXELS}; crop it"
        )
    return F.pad(image, (0, long - width, 0, long - height))


def _shrink(image: Tensor) -> Tensor:
    """Scale an image down to at most 3024 pixels per side; return a smaller one unchanged.

    Sides are rounded down.

    Raises:
        ValueError: the shorter side would have no pixel.
    """
    height, width = image.shape[1:]
    scale = LARGEST / max(width, height)
    if scale >= 1:
        return image
    size = int(height * scale), int(width * scale)
    if not all(size):
        raise ValueError(
            f"is {width}x{height} pixels: nothing is left of it at {LARGEST} pixels; crop it"
        )
    return resize(image, *size, "bilinear")
