"""Images to the whole view and the tiles of the Step towers.

Source: ``ImagePatcher`` and ``Step3VisionProcessor`` of vLLM 0.33.0, a copy of StepFun's own
processor (transformers' ``Step3p7ImageProcessor`` differs from it, see below).

The rule, for an image of ``long`` x ``short`` pixels:

1. An image under 32 pixels on one side with an aspect ratio over 4 is laid on a black square, in
   the top left corner. An image over 3024 pixels is scaled down to that.
2. The window is a square. If ``long`` is below 728, it is ``short`` for an aspect ratio over 1.5,
   else there are no tiles. From 728 on it is 504, or ``min(short, 504)`` for a ratio over 4.
3. Each side that is at least a window long is resized to a multiple of the window: up if over a
   fifth of a window is left over, else down. Windows cover the image row by row, and are black
   where they leave it. Each is resized to 504x504, and the whole image to 728x728.

Deliberate differences:

- Images are resized as uint8, as transformers does; StepFun's code resizes the last time as floats,
  and the results differ by rounding to one of 255 levels.
- Unlike transformers, the rule above is followed where a window leaves the image (transformers
  stretches the rest of the image over the tile), for images of exactly 728 pixels (transformers
  makes no tiles of 728x728), and for long images over 3024 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract import PathInputs, VisionInputs
from .image_files import naming
from .images import check_keywords, folded_stats, grid_tensor, resize
from .intake import read_images
from .processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    ProcessorFiles,
    Stats,
    image_section,
    read_stats,
    require_supported,
)
from .sizes import MOST_PIXELS, MOST_TILES, check_area

LARGEST = 3024
"""Longest side in pixels before an image is cut."""


class Windows(NamedTuple):
    """How an image is cut into tiles."""

    width: int
    """Of the resized image, in pixels."""
    height: int
    side: int
    """Side of a window in pixels; 0 means no tiles."""

    @property
    def columns(self) -> int:
        """Windows per row."""
        return max(self.width // self.side, 1) if self.side else 0

    @property
    def rows(self) -> int:
        """Rows of windows."""
        return max(self.height // self.side, 1) if self.side else 0


def plan_windows(width: int, height: int, image_size: int = 728, tile_size: int = 504) -> Windows:
    """Return how an image is cut; thin and large images were padded and scaled before.

    Args:
        width: of the image in pixels, at most 3024.
        height: of the image in pixels, at most 3024.
        image_size: side of the whole view in pixels; images below it are cut if they are long.
        tile_size: side of a tile in pixels.
    """
    long, short = max(width, height), min(width, height)
    if long < image_size:
        side = short if long / short > 1.5 else 0
    else:
        side = min(short, tile_size) if long / short > 4 else tile_size
    if not side:
        return Windows(width, height, 0)
    return Windows(_snap(width, side), _snap(height, side), side)


def _snap(length: int, window: int) -> int:
    """The multiple of a window that a side is resized to; a side below a window stays."""
    if length < window:
        return length
    whole = length // window
    return window * (whole + (length / window - whole > 0.2))


@dataclass(frozen=True)
class WindowPreprocessor:
    """Cuts an image into tiles and resizes the whole image to one view (Step towers).

    The path "image" gets the whole view of each item, the path "tiles" the tiles of those items
    that have tiles.
    """

    image_size: int = 728
    tile_size: int = 504
    patch_size: int = 14
    tiled: bool = True
    """Whether images are cut into tiles at all."""
    mean: Stats = CLIP_MEAN
    std: Stats = CLIP_STD

    def __post_init__(self) -> None:
        for side in (self.image_size, self.tile_size):
            check_area(1, side)

    def with_files(
        self, files: ProcessorFiles, error: Callable[[str], ValueError] = ValueError
    ) -> WindowPreprocessor:
        """Return a copy with the defaults of a repo's processor files.

        StepFun's repos have none that describe images; those that transformers saves do.

        Args:
            files: parsed JSON per file name without ``.json``, those that the repo has.
            error: makes the exception of a bad value from its message.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        try:
            rules = _file_rules(files, self.image_size, self.tile_size)
        except ValueError as bad:
            raise error(str(bad)) from bad
        return replace(self, **rules)

    def __call__(
        self,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VisionInputs:
        """Return the whole views [items, 3, S, S] and the tiles; see ``VisionEncoder.preprocess``.

        Raises:
            ValueError: an image that cannot be read, a video, or a keyword: sizes are fixed.
        """
        limits: Mapping[str, Any] = {
            "min_pixels": min_pixels,
            "max_pixels": max_pixels,
            "max_tiles": max_tiles,
            "num_frames": num_frames,
        }
        check_keywords(limits, fps)
        for name, value in {**limits, "fps": fps}.items():
            if value is not None:
                raise ValueError(
                    f"{name}={value}: a Step tower cuts images by their size alone; resize the "
                    "image to have fewer tiles"
                )
        if len(videos):
            raise ValueError("a Step tower takes no videos: pass their frames as images")
        cut = []
        for number, image in enumerate(read_images(images)):
            with naming(f"image {number}"):
                cut.append(self._cut(image))
        wholes = [whole for whole, _, _ in cut]
        parts = [tile for _, tiles, _ in cut for tile in tiles]
        counts = [len(tiles) for _, tiles, _ in cut]
        tilings = [
            (windows.columns, windows.rows, True) if windows.side else (1, 1, False)
            for _, _, windows in cut
        ]
        pixels, grids, _ = self._path(wholes, self.image_size, [1] * len(wholes))
        tiles = self._path(parts, self.tile_size, counts)
        return VisionInputs(pixels, grids, tilings, {"tiles": tiles})

    def _path(self, views: Sequence[Tensor], side: int, counts: Sequence[int]) -> PathInputs:
        """Normalise views of one size; ``counts`` says how many each item has."""
        mean, std = folded_stats(self.mean, self.std)
        pixels = torch.empty(len(views), 3, side, side, dtype=torch.float32, device="cpu")
        for view, target in zip(views, pixels, strict=True):
            target.copy_(view).sub_(mean).div_(std)
        patches = side // self.patch_size
        grids = grid_tensor([(count, patches, patches) for count in counts if count])
        return PathInputs(pixels, grids, tuple(item for item, count in enumerate(counts) if count))

    def _cut(self, image: Tensor) -> tuple[Tensor, list[Tensor], Windows]:
        """Return the whole view, the tiles and how they lie, all uint8."""
        image = _scaled(_squared(image))
        height, width = image.shape[1:]
        whole = resize(image, self.image_size, self.image_size, "bilinear")
        windows = Windows(width, height, 0)
        if self.tiled:
            windows = plan_windows(width, height, self.image_size, self.tile_size)
        if not windows.side:
            return whole, [], windows
        side, columns, rows = windows.side, windows.columns, windows.rows
        if columns * rows > MOST_TILES:
            raise ValueError(
                f"is {width}x{height} pixels after scaling, which makes {columns * rows} tiles: at "
                f"most {MOST_TILES}; crop it"
            )
        check_area(columns * rows, self.tile_size)
        sized = resize(image, windows.height, windows.width, "bilinear")
        beyond = (
            0,
            max(columns * side - windows.width, 0),
            0,
            max(rows * side - windows.height, 0),
        )
        black = F.pad(sized, beyond) if any(beyond) else sized
        tiles = [
            resize(
                black[:, row * side : (row + 1) * side, column * side : (column + 1) * side],
                self.tile_size,
                self.tile_size,
                "bilinear",
            )
            for row in range(rows)
            for column in range(columns)
        ]
        return whole, tiles, windows


def _squared(image: Tensor) -> Tensor:
    """Lay an image that is a thin line on a black square, in the top left corner."""
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


def _scaled(image: Tensor) -> Tensor:
    """Scale an image down to a longest side of 3024 pixels, cutting off fractions."""
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


def _file_rules(files: ProcessorFiles, image_size: int, tile_size: int) -> dict[str, Any]:
    """Read the fields of ``WindowPreprocessor`` that the files of a Step repo set.

    StepFun's own code reads no value from a file; the files that transformers saves with its class
    are read.

    Args:
        files: parsed JSON per file name without ``.json``.
        image_size: side of the view of the whole image in pixels.
        tile_size: side of a tile in pixels.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    found = image_section(files)
    named = "" if found is None else str(found[1].get("image_processor_type") or "")
    if found is None or not named.startswith("Step3p7ImageProcessor"):
        return {}
    where, section = found
    size = {"height": image_size, "width": image_size}
    expected = {"resample": 2, "size": size, "patch_size": tile_size, "max_image_size": 3024}
    require_supported(where, section, expected)
    mean, std = read_stats(where, section, CLIP_MEAN, CLIP_STD)
    return {"mean": mean, "std": std}
