"""Preprocessing of images and videos for Muse-Glimmer: whole tokens in nearly the image's shape.

Source: ``MuseGlimmerImageProcessor`` and ``MuseGlimmerVideoProcessor`` of transformers 5.24.0.

Shapes: F frames per patch, p patch size, P patches.

Deliberate differences:

- Frames are sampled only on request (``fps=``, ``num_frames=``); ``fps`` and ``num_frames`` in a
  repo's files are not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ..data import Grid, VisionInputs
from ..inputs.normalizing import finish_path
from ..inputs.patches import PatchPreprocessor, cut_frames
from ..inputs.pixel_rules import PixelRules, check_sizes
from ..inputs.processor_files import (
    HALF,
    ProcessorFiles,
    Resample,
    Section,
    image_section,
    read_mean_std,
    read_positive,
    require_supported,
    video_section,
)
from ..inputs.sizes import MOST_PIXELS
from ..inputs.staging import StagedItem, grid_tensor

_IMAGE, _FRAME, _FRAMES = 4096, 144, 96
"""The most tokens of an image and of a frame pair, and the most frames of a video."""


@dataclass(frozen=True)
class CellPreprocessor(PatchPreprocessor):
    """Resizes an image to the grid of tokens whose shape is nearest to its own.

    Patches lie row by row. The axes of one row of ``pixel_values`` are frame, channel, row, column.
    """

    resample: Resample = "lanczos"

    refusals = {
        **PatchPreprocessor.refusals,
        "min_pixels": "this family keeps small images as they are; leave it out",
    }

    @classmethod
    def muse(cls, patch_size: int, token_size: int, frames: int) -> CellPreprocessor:
        """Return a preprocessor with the published rules.

        Args:
            patch_size: side of a patch in pixels.
            token_size: side of a token in patches.
            frames: frames of a patch.
        """
        cell = (patch_size * token_size) ** 2
        images = PixelRules(1, _IMAGE * cell, HALF, HALF)
        videos = PixelRules(
            *(1, _FRAME * cell, HALF, HALF), max_frames=_FRAMES, sampling="muse_glimmer"
        )
        return cls(patch_size, frames, 1, images, videos, token_size=token_size)

    def finish(
        self, items: Sequence[StagedItem], dtype: torch.dtype = torch.float32
    ) -> VisionInputs:
        """Normalise items and cut them into patches [P, F*3*p*p], on the device of their pixels."""
        parts = [item.paths["image"] for item in items]
        width = 3 * self.temporal_patch_size * self.patch_size**2
        rows = finish_path(parts, self._cut, 2, (width,), dtype)
        return VisionInputs(rows, grid_tensor([part.grid for part in parts]))

    def _cut(self, frames: Tensor) -> Tensor:
        """Cut items [n, f, H, W, 3] into patches [P, F, 3, p*p]; the last frame fills a group."""
        count = self.temporal_patch_size
        patches = cut_frames(frames, self.patch_size, 1, count)
        return patches.unflatten(2, (count, -1)).transpose(1, 2).contiguous()

    def _with_images(self, files: ProcessorFiles) -> CellPreprocessor:
        rules = self._rules(image_section(files), self.images, "max_image_tokens")
        return replace(self, images=rules)

    def _with_videos(self, files: ProcessorFiles) -> CellPreprocessor:
        rules = self._rules(video_section(files), self.videos, "max_video_frame_tokens")
        return replace(self, videos=rules, video_error=None)

    def _rules(
        self, entry: tuple[str, Section] | None, defaults: PixelRules, most: str
    ) -> PixelRules:
        """Return the rules that a section sets; ``most`` is its key for the most tokens."""
        if entry is None:
            return defaults
        label, section = entry
        require_supported(label, section, {"resample": 1})
        check_sizes(label, section, self._sizes)
        cell = self._cell**2
        number = defaults.max_pixels // cell
        number = read_positive(label, most, section.get(most), number, MOST_PIXELS // cell)
        mean, std = read_mean_std(label, section, HALF, HALF)
        return replace(defaults, max_pixels=number * cell, mean=mean, std=std)

    @property
    def _cell(self) -> int:
        """The side of a token in pixels."""
        return self.patch_size * self.token_size

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        most = max(rules.max_pixels // self._cell**2, 1)
        rows, columns = nearest_grid(height, width, self._cell, most)
        count = -(-len(frames) // self.temporal_patch_size)
        return count, rows * self.token_size, columns * self.token_size


def nearest_grid(height: int, width: int, cell: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of tokens whose ratio is nearest to that of an image's sides.

    Both are rounded up or down from the exact numbers, which are shrunk if they make more tokens
    than ``most``. Of several grids that are as near, as of all squares for a square image, the
    source takes the first of a Python set; the same set is made here.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        cell: side of a token in pixels.
        most: the largest number of tokens.
    """
    rows, columns = height / cell, width / cell
    ratio = columns / rows
    if rows * columns > most:
        rows = (most / ratio) ** 0.5
        columns = rows * ratio
    down, across = ((math.floor(size), math.ceil(size)) for size in (rows, columns))
    pairs = {*product(down, across)}
    grids = [grid for grid in pairs if min(grid) >= 1 and grid[0] * grid[1] <= most]
    if not grids:
        return max(1, round(rows)), max(1, round(columns))
    return min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))
