"""Preprocessing of images for SAM 3: one square view, whatever the image's shape.

Source: ``Sam3ImageProcessor`` of transformers 5.24.0.

Shapes: s side of a view in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..inputs.processor_files import (
    Resample,
    Section,
    check_class,
    check_side,
    read_mean_std,
    read_resample,
    require_supported,
)
from ..inputs.views import StretchedViews


@dataclass(frozen=True)
class Sam3Preprocessor(StretchedViews):
    """Resizes each image to a square, by the processor files of SAM 3."""

    resample: Resample = "bilinear"

    def with_section(self, label: str, section: Section) -> Sam3Preprocessor:
        """Return a copy with the mean, the std and the resampling that a processor file sets.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or another size than the tower's.
        """
        check_class(label, section, "Sam3")
        check_side(label, section, self.image_size, 1008)  # the default of the class
        require_supported(label, section, self.supported(section))
        mean, std = read_mean_std(label, section, self.mean, self.std)
        resample = read_resample(label, section, "bilinear")
        return replace(self, mean=mean, std=std, resample=resample)
