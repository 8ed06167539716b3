"""Preprocessing for Molmo2: the whole image, then crops that overlap; frames of videos whole.

Source: ``Molmo2ImageProcessor`` and ``Molmo2VideoProcessor`` of transformers 5.23.0.

The rule, for crops of s x s pixels whose margins (four patches on each side) neighbours share:

1. Crops lie in a grid, at most ``max_tiles`` of them, which covers a canvas. An image gets the
   canvas on which it is enlarged least, else the one on which it is reduced least; of several, the
   one of the fewest crops, and of those the flattest. Margins at the edge of the canvas count
   neither for the image nor for the canvas.
2. The image is stretched to the canvas, and crops are cut row by row. The image stretched to one
   crop comes first.

Images are resized on the CPU, also for a GPU: bilinearly, without antialiasing, in float32, and
rounded to 0..255.

Deliberate differences:

- Frames are sampled only on request (``fps=``, ``num_frames=``).
- Frames are always normalised; the class of transformers does it if a file says ``do_rescale`` and
  ``do_normalize``, which it has no defaults for.
- ``preprocessor_config.json`` says nothing about videos: its windows are those of images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs.clip_views import ClipViewPreprocessor
from ..inputs.processor_files import (
    Resample,
    Section,
    check_side,
    read_mean_std,
    read_positive,
    read_resample,
    require_supported,
)
from ..inputs.sizes import MOST_TILES, check_area
from ..inputs.views import OnePathViews, Views


@dataclass(frozen=True)
class OverlapPreprocessor(OnePathViews, ClipViewPreprocessor):
    """Makes a view of the whole image, then crops of it that overlap."""

    image_size: int = 378
    resample: Resample = "bilinear"
    max_tiles: int = 8
    """The most crops of an image, not counting the view of the whole image."""
    margins: tuple[int, int] = (4, 4)
    """The patches at the left (top) and the right (bottom) of a crop that a neighbour has, too."""
    window: int = 2
    """The side in patches of the window that the encoder pools a token of."""
    frame_window: int = 3
    """The side in patches of the window that the encoder pools a token of a frame of."""
    sampling = "molmo2"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_area(self.max_tiles, self.image_size)

    @property
    def sizing(self) -> tuple[str, ...]:
        """Return ``max_tiles``, which bounds the number of crops."""
        return ("max_tiles",)

    def say_defaults(self, config: object) -> tuple[str, str]:
        """Return the defaults without processor files, and the keyword that changes one of them."""
        colours = f"resample={self.resample!r}, mean={self.mean}, std={self.std}"
        return f"max_tiles={self.max_tiles}, {colours}", "max_tiles"

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the view of the whole image, then its crops row by row.

        ``max_tiles`` bounds the number of crops; None takes ``self.max_tiles``.
        """
        side, limit = self.sides["image"], self.max_tiles if max_tiles is None else max_tiles
        if limit > MOST_TILES:
            raise ValueError(f"max_tiles={limit}: at most {MOST_TILES}; models were trained on 8")
        check_area(limit, side)
        image = image.cpu()
        margin = sum(self.margins) * self.patch_size
        height, width = image.shape[1:]
        step = side - margin
        rows, columns = best_grid(height - margin, width - margin, limit, step)
        canvas = _stretch(image, rows * step + margin, columns * step + margin, self.resample)
        crops = [
            canvas[:, top : top + side, left : left + side]
            for top in range(0, rows * step, step)
            for left in range(0, columns * step, step)
        ]
        views = [_stretch(image, side, side, self.resample), *crops]
        return Views({"image": views}, (columns, rows, True))

    def with_section(self, label: str, section: Section) -> OverlapPreprocessor:
        """Return a copy with the values that a processor file sets: mean, std, filter and crops.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or crops of another size than the tower's.
        """
        return self._follow(label, section, self.window)

    def with_frames(self, label: str, section: Section) -> OverlapPreprocessor:
        """Return a copy with the mean, the std and the filter of frames.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes videos.

        Raises:
            ValueError: a value that is not implemented, or frames of another size than the tower's.
        """
        if label == "preprocessor_config.json":
            return self
        return replace(self, frames=self._follow(label, section, self.frame_window))

    def frame_views(self, frame: Tensor, max_tiles: int | None) -> Views:
        """Return the view of one frame, which is stretched as the whole image is."""
        side = self.sides["image"]
        return Views({"image": [_stretch(frame.cpu(), side, side, self.resample)]})

    def _follow(self, label: str, section: Section, window: int) -> OverlapPreprocessor:
        """Return a copy with the values of a section whose windows have this side."""
        expected: dict[str, object] = {
            "resample": section.get("resample"),
            "overlap_margins": list(self.margins),
            "pooling_size": [window, window],
            "patch_size": self.patch_size,
        }
        require_supported(label, section, expected)
        check_side(label, section, self.image_size, 378)  # Molmo2ImageProcessor's default
        mean, std = read_mean_std(label, section, self.mean, self.std)
        resample = read_resample(label, section, "bilinear")
        if resample == "lanczos":
            raise ValueError(f"{label}: resample=1 is not implemented: it must be 2 or 3")
        crops = read_positive(label, "max_crops", section.get("max_crops"), 8, MOST_TILES)
        return replace(self, mean=mean, std=std, resample=resample, max_tiles=crops)


def _stretch(image: Tensor, height: int, width: int, mode: Resample) -> Tensor:
    """Resize an image, uint8 [3, H, W] on the CPU, without antialiasing, to uint8."""
    pixels = image.to(torch.float32)[None].contiguous()
    resized = F.interpolate(pixels, (height, width), mode=mode, align_corners=False)[0]
    return resized.round_().clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=1024)
def best_grid(height: int, width: int, most: int, step: int) -> tuple[int, int]:
    """Return the rows and columns of the crops that fit an image best.

    Scales are compared in float32, as in transformers.

    Args:
        height: height of the image in pixels without margins, which may be negative.
        width: width of the image in pixels without margins.
        most: largest number of crops.
        step: side of a crop in pixels without margins.
    """
    grids = [(rows, n) for rows in range(1, most + 1) for n in range(1, most // rows + 1)]
    grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
    canvases = torch.tensor(grids, device="cpu").to(torch.float32) * step
    scales = (canvases / torch.tensor([height, width], device="cpu").to(torch.float32)).amin(1)
    if bool((scales < 1).all()):
        return grids[int(scales.argmax())]
    return grids[int(torch.where(scales < 1, 1e10, scales).argmin())]
