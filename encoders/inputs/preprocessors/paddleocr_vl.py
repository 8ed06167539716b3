"""Images to the patches of PaddleOCR-VL, row by row: its projector merges them after the tower.

Source: ``PaddleOCRVLImageProcessor`` of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...data import Grid
from ..clips import IMAGES_ALONE
from ..pixel_rules import PixelRules, patch_image_rules
from ..processor_files import ProcessorFiles
from ..sizes import smart_resize
from .patches import PatchPreprocessor

_RULES = PixelRules(384**2, 1536**2)
"""The defaults of transformers' class: bounds on the area, mean and standard deviation."""


@dataclass(frozen=True)
class RasterPreprocessor(PatchPreprocessor):
    """Resizes images to whole tokens of 2x2 patches, and cuts patches in raster order."""

    token_size: int = 2
    """The side of a token in patches."""

    @classmethod
    def paddleocr_vl(cls, *, patch_size: int, token_size: int) -> RasterPreprocessor:
        """Return a preprocessor with the defaults of transformers' class for PaddleOCR-VL."""
        refused = ValueError(IMAGES_ALONE)
        return cls(patch_size, 1, 1, _RULES, _RULES, refused, token_size=token_size)

    def with_files(
        self, files: ProcessorFiles, error: Callable[[str], ValueError] = ValueError
    ) -> RasterPreprocessor:
        """Return a copy with the defaults of a repo's processor files.

        Args:
            files: parsed JSON per file name without ``.json``.
            error: makes the exception of a bad value from its message.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        sizes = {
            "patch_size": self.patch_size,
            "temporal_patch_size": 1,
            "merge_size": self.token_size,
        }
        try:
            return replace(self, images=patch_image_rules(files, self.images, sizes))
        except ValueError as bad:
            raise error(str(bad)) from bad

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        factor = self.patch_size * self.token_size
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        height, width = smart_resize(height, width, factor, rules.min_pixels, rules.max_pixels)
        return 1, height // self.patch_size, width // self.patch_size
