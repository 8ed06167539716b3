"""Images to the patches of SigLIP2 NaFlex: as many as a limit allows, in about the image's shape.

Source: ``Siglip2ImageProcessor`` of transformers 5.23.0, without its padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...data import Grid, Limits
from ..clips import IMAGES_ALONE
from ..pixel_rules import PixelRules
from ..processor_files import (
    HALF,
    ProcessorFiles,
    image_section,
    read_mean_std,
    read_positive,
    read_resample,
    require_supported,
)
from ..sizes import MOST_PIXELS
from .patches import PatchPreprocessor

_LARGEST_SCALE, _TOLERANCE = 100.0, 1e-5
"""The search for the scale of an image begins below the first number, and ends when its two bounds
are closer than the second; both numbers are the source's."""


@dataclass(frozen=True)
class NaflexPreprocessor(PatchPreprocessor):
    """Resizes an image to the most patches that a limit allows; small images are enlarged.

    A row of ``pixel_values`` is one flattened patch with the axes row, column, channel.
    """

    @classmethod
    def siglip2(cls, patch_size: int, most: int = 256) -> NaflexPreprocessor:
        """Return the preprocessor of the published SigLIP 2 repos: at most ``most`` patches."""
        rules = _rules(patch_size, most)
        refused = ValueError(IMAGES_ALONE)
        return cls(patch_size, 1, 1, rules, rules, refused, "bilinear", channels_last=True)

    def with_files(
        self, files: ProcessorFiles, error: Callable[[str], ValueError] = ValueError
    ) -> NaflexPreprocessor:
        """Return a copy with the defaults of a repo's processor files.

        Args:
            files: parsed JSON per file name without ``.json``.
            error: makes the exception of a bad value from its message.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        try:
            found = image_section(files)
            return self if found is None else self._with_section(*found)
        except ValueError as bad:
            raise error(str(bad)) from bad

    def _with_section(self, where: str, section: Mapping[str, object]) -> NaflexPreprocessor:
        require_supported(
            where,
            section,
            {"resample": section.get("resample"), "patch_size": self.patch_size},
        )
        area = self.patch_size**2
        most = read_positive(
            where,
            "max_num_patches",
            section.get("max_num_patches"),
            self.images.max_pixels // area,
            MOST_PIXELS // area,
        )
        mean, std = read_mean_std(where, section, HALF, HALF)
        rules = replace(_rules(self.patch_size, most), mean=mean, std=std)
        resample = read_resample(where, section, "bilinear")
        return replace(self, images=rules, resample=resample)

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the settings that hold without processor files, as a text, and the keyword of
        ``preprocess`` that changes one of them."""
        rules = self.images
        return f"max_pixels={rules.max_pixels}, mean={rules.mean}, std={rules.std}", "max_pixels"

    def _read(
        self, images: Sequence[object], videos: Sequence[object], limits: Limits
    ) -> list[tuple[list[Tensor], PixelRules, Grid]]:
        if limits.min_pixels is not None:
            raise ValueError(
                f"min_pixels={limits.min_pixels}: this family resizes every image to the most "
                "patches that max_pixels allows; leave it out"
            )
        return super()._read(images, videos, limits)

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        most = rules.max_pixels // self.patch_size**2
        return 1, *most_patches(height, width, self.patch_size, most)


def most_patches(height: int, width: int, patch: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of patches that an image is resized to.

    Each side is scaled and rounded up to whole patches, with the largest scale, by bisection, that
    makes at most ``most`` patches.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        patch: side of a patch in pixels.
        most: largest number of patches, at least 1.

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
        low, high = (scale, high) if math.prod(sides(scale)) <= most else (low, scale)
    return sides(low)


def _rules(patch: int, most: int) -> PixelRules:
    return PixelRules(1, most * patch**2, HALF, HALF)
