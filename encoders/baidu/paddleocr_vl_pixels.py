"""Preprocessing of images for PaddleOCR-VL: patches row by row, merged after the tower.

Source: ``PaddleOCRVLImageProcessor`` of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..data import Grid
from ..inputs.patches import PatchPreprocessor
from ..inputs.pixel_rules import PADDLEOCR_IMAGES, PixelRules
from ..inputs.sizes import smart_resize


@dataclass(frozen=True)
class RasterPreprocessor(PatchPreprocessor):
    """Resizes images to whole tokens of 2x2 patches, and cuts patches in raster order."""

    @classmethod
    def paddleocr_vl(cls, *, patch_size: int, token_size: int) -> RasterPreprocessor:
        """Return a preprocessor with the defaults of transformers' class for PaddleOCR-VL."""
        rules = PADDLEOCR_IMAGES
        return cls(patch_size, 1, 1, rules, rules, images_alone=True, token_size=token_size)

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        factor = self.patch_size * self.token_size
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        height, width = smart_resize(height, width, factor, rules.min_pixels, rules.max_pixels)
        return 1, height // self.patch_size, width // self.patch_size
