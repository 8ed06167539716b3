"""Preprocessing for MiniCPM-V: the whole image, and slices of a large one.

Source: ``MiniCPMV4_6ImageProcessor``, ``MiniCPMOcrImageProcessor`` and the video processors beside
them, of transformers 5.23.0.

The rule, for an image of ``height`` x ``width`` pixels and tokens of 56x56 pixels (28x28 in mode
"4x"):

1. An image of more than 448x448 pixels is also resized to a grid of up to nine slices of about that
   area, in about its shape, and cut into them, row by row.
2. The whole image is resized to about 448x448 pixels, in about its shape. It comes before its
   slices.

A frame of a video is an image. Deliberate difference: frames are sampled only on request (``fps=``,
``num_frames=``); from a repo's files only the most frames are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from ..inputs.clip_views import MOST_FRAMES, ClipViewPreprocessor
from ..inputs.processor_files import (
    HALF,
    Section,
    read_mean_std,
    read_positive,
    require_supported,
)
from ..inputs.resizing import resize
from ..inputs.sizes import MOST_PIXELS, MOST_TILES, check_area
from ..inputs.staging import StagedPath
from ..inputs.views import Views, patch_rows

_MODES = {"MiniCPMOcr": "4x", "MiniCPMV4_6": "16x"}
"""Beginning of the names of transformers' classes -> their default of ``downsample_mode``."""


@dataclass(frozen=True)
class SlicePreprocessor(ClipViewPreprocessor):
    """Resizes an image to whole tokens, and cuts a large one into slices, too.

    A row of ``pixel_values`` is one flattened patch with the axes channel, row, column; patches lie
    row by row. The input path "image" gets each whole image, and "tiles" its slices.
    """

    patch_size: int = 14
    token_size: int = 4
    """Side of a token in patches."""
    resolution: int = 448
    """The side of a square with the area, in pixels, of the whole image and of a slice."""
    max_tiles: int = 9
    """The largest number of slices; 1 leaves images whole."""
    max_frames: int = 128
    sampling = "minicpm_v"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_area(self.max_tiles, self.resolution)

    @property
    def sides(self) -> dict[str, int]:
        """Return the side of a square with the area of a view, though views have any shape."""
        return {"image": self.resolution, "tiles": self.resolution}

    @property
    def pads(self) -> bool:
        """Return False: an image is stretched to whole tokens, and never padded."""
        return False

    @property
    def factor(self) -> int:
        """The side of a token in pixels."""
        return self.patch_size * self.token_size

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the defaults without processor files, and the keyword that changes one of them."""
        return f"max_tiles={self.max_tiles}, mean={self.mean}, std={self.std}", "max_tiles"

    def with_section(self, label: str, section: Section) -> SlicePreprocessor:
        """Return a copy with the values that a processor file sets.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        kind = str(section.get("image_processor_type") or section.get("video_processor_type"))
        mode = "16x" if self.token_size == 4 else "4x"
        usual = next((value for name, value in _MODES.items() if kind.startswith(name)), mode)
        only = {
            "patch_size": self.patch_size,
            "downsample_mode": mode,
            "small_image_upsize": "always",  # "adaptive" measures the glyphs in the pixels
        }
        require_supported(label, {"downsample_mode": usual, **section}, only)
        mean, std = read_mean_std(label, section, HALF, HALF)
        slices = read_positive(
            label, "max_slice_nums", section.get("max_slice_nums"), 9, MOST_TILES
        )
        return replace(
            self,
            mean=mean,
            std=std,
            resolution=read_positive(
                *(label, "scale_resolution", section.get("scale_resolution"), 448),
                math.isqrt(MOST_PIXELS),
            ),
            max_tiles=slices if section.get("slice_mode", True) else 1,
        )

    def with_frames(self, label: str, section: Section) -> SlicePreprocessor:
        """Return a copy of the preprocessor with what a processor file sets for videos.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes videos.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        require_supported(label, section, {"stack_frames": 1})  # more lay frames side by side
        most = section.get("max_num_frames")
        count = read_positive(label, "max_num_frames", most, 128, MOST_FRAMES)
        return replace(self, frames=self.with_section(label, section), max_frames=count)

    def frame_views(self, frame: Tensor, max_tiles: int | None) -> Views:
        """Return the views of one frame, those of an image of its size."""
        return self.views(frame, max_tiles)

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the whole image and its slices row by row, all uint8.

        ``max_tiles`` bounds the number of slices; None takes ``self.max_tiles``.
        """
        height, width = image.shape[1:]
        limit = self.max_tiles if max_tiles is None else max_tiles
        grid = slice_grid(height, width, limit, self.resolution)
        size = self._whole_tokens(height, width, grow=grid is None)
        whole = resize(image, *size)
        if grid is None:
            return Views({"image": [whole]})
        rows, columns = grid
        check_area(rows * columns, self.resolution)
        tall, wide = (
            to_multiple(side, count) / count for side, count in ((height, rows), (width, columns))
        )
        part_height, part_width = self._whole_tokens(tall, wide, grow=True)
        canvas = resize(image, rows * part_height, columns * part_width)
        slices = rearrange(canvas, "c (r h) (q w) -> (r q) c h w", r=rows, q=columns)
        return Views({"image": [whole], "tiles": list(slices)}, (columns, rows, True))

    def _whole_tokens(self, height: float, width: float, *, grow: bool) -> tuple[int, int]:
        """Return the size of a view in whole tokens, shrunk or, if ``grow``, grown to its area."""
        if height * width > self.resolution**2 or grow:
            aspect = width / height
            height = int(self.resolution / math.sqrt(aspect))
            width = int(height * aspect)
        return to_multiple(height, self.factor), to_multiple(width, self.factor)

    def rows(
        self, parts: Sequence[StagedPath], side: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the normalised patches of one input path, [P, 3*p*p].

        Args:
            parts: the views of each item that has some for this path.
            side: not used here; the side of a view in pixels, for other families.
            dtype: the dtype of the result.
            device: the device of the result if there are no items.
        """
        return patch_rows(parts, self.patch_size, dtype, device, channels_last=False)


def to_multiple(length: float, unit: int) -> int:
    """Return the multiple of ``unit`` nearest to a length, by Python's ``round``; at least one."""
    return max(round(length / unit) * unit, unit)


def slice_grid(height: int, width: int, most: int, resolution: int) -> tuple[int, int] | None:
    """Return rows and columns of the slices of an image; None if it is not sliced.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        most: the largest number of slices.
        resolution: the side of a square with the area of a slice.

    Returns:
        Of the grids of about as many slices as the image has areas, that nearest to its shape; of
        two as near, the one with more rows.
    """
    count = min(math.ceil(height * width / resolution**2), most)
    if count <= 1:
        return None
    grids = [
        (rows, slices // rows)
        for slices in (count - 1, count, count + 1)
        if 1 < slices <= most
        for rows in range(1, slices + 1)
        if slices % rows == 0
    ]
    shape = math.log(width / height)
    return min(grids, key=lambda grid: (abs(shape - math.log(grid[1] / grid[0])), -grid[0]))
