"""Preprocessing of images for SigLIP2 NaFlex: as many patches as a limit allows.

Source: ``Siglip2ImageProcessor`` of transformers 5.23.0, without its padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..data import Grid
from ..inputs.patches import PatchPreprocessor
from ..inputs.pixel_rules import PixelRules
from ..inputs.processor_files import (
    HALF,
    ProcessorFiles,
    image_section,
    read_mean_std,
    read_positive,
    read_resample,
    require_supported,
)
from ..inputs.sizes import MOST_PIXELS

_LARGEST_SCALE, _TOLERANCE = 100.0, 1e-5
"""The bisection for the scale of an image begins below ``_LARGEST_SCALE``, and ends when its bounds
are closer than ``_TOLERANCE``; both numbers are those of transformers."""


@dataclass(frozen=True)
class NaflexPreprocessor(PatchPreprocessor):
    """Resizes an image to the most patches that a limit allows; small images are enlarged.

    A row of ``pixel_values`` is one flattened patch with the axes row, column, channel.
    """

    refusals = {
        **PatchPreprocessor.refusals,
        "min_pixels": "this family resizes every image to the most patches that max_pixels allows; "
        "leave it out",
    }

    @classmethod
    def siglip2(cls, patch_size: int, max_patches: int = 256) -> NaflexPreprocessor:
        """Return the preprocessor of the published SigLIP 2 repos, for at most ``max_patches``."""
        rules = _rules(patch_size, max_patches)
        return cls(
            *(patch_size, 1, 1, rules, rules),
            resample="bilinear",
            channels_last=True,
            images_alone=True,
        )

    def _with_images(self, files: ProcessorFiles) -> NaflexPreprocessor:
        entry = image_section(files)
        if entry is None:
            return self
        label, section = entry
        sizes = {"resample": section.get("resample"), "patch_size": self.patch_size}
        require_supported(label, section, sizes)
        area = self.patch_size**2
        max_patches, default = section.get("max_num_patches"), self.images.max_pixels // area
        max_patches = read_positive(
            label, "max_num_patches", max_patches, default, MOST_PIXELS // area
        )
        mean, std = read_mean_std(label, section, HALF, HALF)
        rules = replace(_rules(self.patch_size, max_patches), mean=mean, std=std)
        return replace(self, images=rules, resample=read_resample(label, section, "bilinear"))

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        max_patches = rules.max_pixels // self.patch_size**2
        return 1, *most_patches(height, width, self.patch_size, max_patches)


def most_patches(height: int, width: int, patch: int, max_patches: int) -> tuple[int, int]:
    """Return the rows and columns of patches that an image is resized to.

    Each side is scaled and rounded up to whole patches, with the largest scale, by bisection, that
    makes at most ``max_patches`` patches.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        patch: side of a patch in pixels.
        max_patches: largest number of patches, at least 1.

    Returns:
        Rows and columns, at least one of each.
    """

    def sides(scale: float) -> tuple[int, int]:
        return (
            max(math.ceil(height * scale / patch), 1),
            max(math.ceil(width * scale / patch), 1),
        )

    low, high = _TOLERANCE / 10, _LARGEST_SCALE
    while high - low >= _TOLERANCE:
        scale = (low + high) / 2
        low, high = (scale, high) if math.prod(sides(scale)) <= max_patches else (low, scale)
    return sides(low)


def _rules(patch: int, max_patches: int) -> PixelRules:
    return PixelRules(1, max_patches * patch**2, HALF, HALF)
