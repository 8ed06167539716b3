"""Preprocessing of images for Llama 4: square tiles, then the whole image.

Source: ``Llama4ImageProcessor`` of transformers 5.23.0.

The rule, for tiles of s x s pixels:

1. A canvas is a grid of at most ``max_tiles`` tiles. An image gets the canvas on which it is
   enlarged least, else the one on which it is reduced least; of several, the smallest.
2. The image is resized, keeping its aspect ratio. It is never enlarged beyond s pixels, unless
   ``largest`` is set; it then gets the canvas on which it is enlarged most, and fills it.
3. It lies in the top left corner of the canvas, which is black, and the canvas is cut into tiles
   row by row. If there are several, the image stretched to one tile follows.

Deliberate difference: pixels are normalised in float32. The source rounds them to bfloat16 after
each step, which makes a difference of at most one of 255 levels in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from ..inputs.processor_files import (
    Resample,
    Section,
    check_side,
    read_mean_std,
    read_positive,
    read_resample,
    require_supported,
)
from ..inputs.resizing import lay_over, resize
from ..inputs.sizes import MOST_TILES, check_area
from ..inputs.views import OnePathViews, Views


@dataclass(frozen=True)
class CanvasPreprocessor(OnePathViews):
    """Lays an image on the canvas of tiles that fits it best, and cuts the canvas into tiles."""

    image_size: int = 336
    resample: Resample = "bilinear"
    max_tiles: int = 16
    """The most tiles of a canvas, not counting the tile that shows the whole image."""
    largest: bool = False
    """Whether an image gets the canvas on which it is enlarged most, not least."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_area(self.max_tiles, self.image_size)

    @property
    def sizing(self) -> tuple[str, ...]:
        """Return ``max_tiles``, which bounds the number of tiles of a canvas."""
        return ("max_tiles",)

    def say_defaults(self, config: object) -> tuple[str, str]:
        """Return the defaults without processor files, and the keyword that changes one of them."""
        colours = f"resample={self.resample!r}, mean={self.mean}, std={self.std}"
        return f"max_tiles={self.max_tiles}, {colours}", "max_tiles"

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the tiles of an image row by row and, if there are several, the whole image.

        ``max_tiles`` bounds the number of tiles; None takes ``self.max_tiles``.
        """
        size, tile_limit = self.image_size, self.max_tiles if max_tiles is None else max_tiles
        if tile_limit > MOST_TILES:
            raise ValueError(
                f"max_tiles={tile_limit}: at most {MOST_TILES}; models were trained on 16"
            )
        check_area(tile_limit, size)
        height, width = image.shape[1:]
        rows, columns = best_canvas(height, width, tile_limit, size, self.largest)
        small = resize(image, *self.covered_size(height, width, rows, columns), self.resample)
        canvas = lay_over(small, rows * size, columns * size, 0, 0, (0.0, 0.0, 0.0))
        tiles = [*rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=size, w=size)]
        if len(tiles) > 1:
            tiles.append(resize(image, size, size, self.resample))
        return Views({"image": tiles}, (columns, rows, len(tiles) > 1))

    def covered_size(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return height and width in pixels of the part of a canvas that an image covers.

        The part lies at the top left of the canvas.

        Args:
            height: height of the image in pixels.
            width: width of the image in pixels.
            rows: number of rows of tiles of the canvas.
            columns: number of columns of tiles of the canvas.
        """
        size = self.image_size
        max_height, max_width = rows * size, columns * size
        if not self.largest:
            max_height = min(max(height, size), max_height)
            max_width = min(max(width, size), max_width)
        width_scale, height_scale = max_width / width, max_height / height
        if width_scale < height_scale:
            return max(min(math.floor(height * width_scale), max_height), 1), max_width
        return max_height, max(min(math.floor(width * height_scale), max_width), 1)

    def with_section(self, label: str, section: Section) -> CanvasPreprocessor:
        """Return a copy with the values that a processor file sets, such as mean, std and tiles.

        ``label`` names the section of the file in errors.
        """
        require_supported(
            label, section, {"resample": section.get("resample"), "add_global_tile": True}
        )
        check_side(label, section, self.image_size, 336)  # Llama4ImageProcessor's default
        mean, std = read_mean_std(label, section, self.mean, self.std)
        tiles = read_positive(label, "max_patches", section.get("max_patches"), 16, MOST_TILES)
        largest = section.get("resize_to_max_canvas")
        if largest not in (None, True, False):
            raise ValueError(f"{label}: resize_to_max_canvas={largest!r} must be true or false")
        return replace(
            self,
            mean=mean,
            std=std,
            resample=read_resample(label, section, "bilinear"),
            max_tiles=tiles,
            largest=bool(largest),
        )


def best_canvas(
    height: int, width: int, max_tiles: int, tile: int, largest: bool
) -> tuple[int, int]:
    """Return the rows and columns of the canvas that fits an image best.

    Scales are compared in float32, as in transformers.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        max_tiles: largest number of tiles.
        tile: side of a tile in pixels.
        largest: whether the image is enlarged as much as a canvas allows.
    """
    tilings = [
        (rows, n) for rows in range(1, max_tiles + 1) for n in range(1, max_tiles // rows + 1)
    ]
    grids = torch.tensor(tilings, device="cpu")
    image = torch.tensor([height, width], dtype=torch.float32, device="cpu")
    scales = ((grids * tile).to(torch.float32) / image).amin(1)
    enlarged = scales[scales >= 1]
    if not len(enlarged):
        best_scale = scales.max()
    else:
        best_scale = enlarged.max() if largest else enlarged.min()
    fitting = grids[scales == best_scale]
    rows, columns = fitting[fitting.prod(1).argmin()].tolist()
    return rows, columns
