"""Preprocessing of images for SAM 3: one square view, whatever the image's shape.

Source: ``Sam3ImageProcessor`` of transformers 5.24.0.

Shapes: s side of a view in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..inputs.images import resize
from ..inputs.processor_files import (
    Resample,
    Section,
    check_side,
    read_mean_std,
    read_resample,
    require_supported,
)
from ..inputs.views import OnePathViews, Views


@dataclass(frozen=True)
class Sam3Preprocessor(OnePathViews):
    """Resizes each image to a square of whole patches, whatever its shape."""

    resample: Resample = "bilinear"

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the whole image, resized to a square, as the only view; there are no tiles."""
        side = self.sides["image"]
        view = resize(image, self.image_size, self.image_size, self.resample)
        return Views({"image": [view[:, :side, :side]]})

    def with_section(self, label: str, section: Section) -> Sam3Preprocessor:
        """Return a copy with the mean, the std and the resampling that a processor file sets.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or another size than the tower's.
        """
        check_side(label, section, self.image_size, 1008)  # the default of the class
        require_supported(label, section, {"resample": section.get("resample")})
        mean, std = read_mean_std(label, section, self.mean, self.std)
        resample = read_resample(label, section, "bilinear")
        return replace(self, mean=mean, std=std, resample=resample)
