"""Preprocessing for Idefics3 and SmolVLM: square tiles of an image, then the whole of it.

A frame of a video is one view: it is resized as the whole of an image.

Source: ``Idefics3ImageProcessor``, ``SmolVLMImageProcessor`` and ``SmolVLMVideoProcessor`` of
transformers 5.23.0.

Shapes: s side of a tile in pixels.

Deliberate differences:

- A tile is cropped to whole patches; the source's tower never reads the pixels beyond them.
- Images are not padded to the largest number of tiles of a batch.
- The processor of Idefics3 takes no videos; here their frames are views as SmolVLM's.
- Frames are sampled only on request (``fps=``, ``num_frames=``); from a repo's files only the most
  frames are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from einops import rearrange
from torch import Tensor

from ..inputs.clip_views import MOST_FRAMES, ClipViewPreprocessor
from ..inputs.processor_files import (
    Section,
    read_mean_std,
    read_positive,
    read_resample,
    require_supported,
)
from ..inputs.resizing import resize
from ..inputs.sizes import check_area
from ..inputs.views import OnePathViews, Views

MOST_PER_SIDE = 4096
"""The most pixels of the longer side to which transformers' processor resizes an image."""


@dataclass(frozen=True)
class SplitPreprocessor(OnePathViews, ClipViewPreprocessor):
    """Resizes an image until its longer side is a number of tiles, and cuts it into tiles."""

    image_size: int = 512
    longest_edge: int = 2048
    """The number of pixels to which the longer side of an image is resized before it is cut."""
    split: bool = True
    """Whether images are cut into tiles; otherwise only the whole image is encoded."""
    max_frames: int = 64
    sampling = "smolvlm"

    def __post_init__(self) -> None:
        super().__post_init__()
        tiles = -(-min(self.longest_edge, MOST_PER_SIDE) // self.image_size)
        check_area(tiles**2 if self.split else 1, self.image_size)

    def frame_views(self, frame: Tensor, max_tiles: int | None) -> Views:
        """Return the view of one frame, which is resized as the whole of an image."""
        return replace(self, split=False).views(frame, None)

    def with_frames(self, label: str, section: Section) -> SplitPreprocessor:
        """Return a copy of the preprocessor with what a processor file sets for videos.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes videos.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        sampling = section.get("video_sampling")
        sampling = sampling if isinstance(sampling, Mapping) else {}  # as SmolVLM2 is published
        frames = self.with_section(label, {"size": sampling.get("video_size"), **section})
        most = section.get("num_frames", sampling.get("max_frames"))
        count = read_positive(label, "num_frames", most, self.max_frames, MOST_FRAMES)
        return replace(self, frames=frames, max_frames=count)

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the tiles of an image row by row, then the whole image; ignores ``max_tiles``."""
        size, side = self.image_size, self.sides["image"]
        height, width = fit_longest(image.shape[1], image.shape[2], self.longest_edge)
        image = resize(image, height, width, self.resample)
        if not self.split:
            return Views({"image": [resize(image, size, size, self.resample)[:, :side, :side]]})
        height, width = whole_tiles(height, width, size)
        image = resize(image, height, width, self.resample)
        whole_view = resize(image, size, size, self.resample)
        tiles = rearrange(image, "c (r h) (q w) -> (r q) c h w", h=size, w=size)
        rows, columns = height // size, width // size
        if rows == columns == 1:
            return Views({"image": [whole_view[:, :side, :side]]})
        views = [view[:, :side, :side] for view in (*tiles, whole_view)]
        return Views({"image": views}, (columns, rows, True))

    def with_section(self, label: str, section: Section) -> SplitPreprocessor:
        """Return a copy with the values that a processor file sets, such as mean and resampling.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or tiles of another size than the tower's.
        """
        require_supported(label, section, {"resample": section.get("resample")})
        tile = _longest(label, section, "max_image_size", 364)
        if tile != self.image_size:
            raise ValueError(
                f"{label}: max_image_size={tile} but the tower takes tiles of {self.image_size}: "
                "use the processor files of the checkpoint's own repo"
            )
        mean, std = read_mean_std(label, section, self.mean, self.std)
        return replace(
            self,
            mean=mean,
            std=std,
            resample=read_resample(label, section, "lanczos"),
            longest_edge=_longest(label, section, "size", 4 * 364),
            split=bool(section.get("do_image_splitting", True)),
        )


def _longest(label: str, section: Section, name: str, default: int) -> int:
    """Return the ``longest_edge`` in pixels of a size in a processor file, such as "size"."""
    size = section.get(name)
    if size is None:
        return default
    value = size.get("longest_edge") if isinstance(size, Mapping) else None
    if value is None:
        raise ValueError(f"{label}: {name}={size!r} must have longest_edge, a number of pixels")
    return read_positive(label, name, value, default, MOST_PER_SIDE)


def fit_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size to which an image is resized before it is resized to whole tiles.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        longest: the longer side of the result in pixels, unless it is over 4096.

    Returns:
        Height and width in about the shape of the image; the shorter side is rounded up to an even
        number.
    """
    aspect = width / height
    if width >= height:
        short = int(longest / aspect)
        new_height, new_width = max(short + short % 2, 1), longest
    else:
        short = int(longest * aspect)
        new_height, new_width = longest, max(short + short % 2, 1)
    aspect = new_width / new_height
    if new_width >= new_height and new_width > MOST_PER_SIDE:
        new_height, new_width = int(MOST_PER_SIDE / aspect), MOST_PER_SIDE
    elif new_height > new_width and new_height > MOST_PER_SIDE:
        new_height, new_width = MOST_PER_SIDE, int(MOST_PER_SIDE * aspect)
    return max(new_height, 1), max(new_width, 1)


def whole_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Round height and width in pixels up to multiples of ``tile``, in about the same shape."""
    aspect = width / height
    if width >= height:
        new_width = math.ceil(width / tile) * tile
        return math.ceil(int(new_width / aspect) / tile) * tile, new_width
    new_height = math.ceil(height / tile) * tile
    return new_height, math.ceil(int(new_height * aspect) / tile) * tile
