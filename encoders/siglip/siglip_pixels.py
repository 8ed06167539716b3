"""Preprocessing of images for SigLIP and Gemma 3: one square view, whatever the image's shape.

Source: ``SiglipImageProcessor`` and ``Gemma3ImageProcessor`` of transformers 5.23.0.

Shapes: s side of a view in pixels.

Deliberate differences:

- A view is cropped to whole patches; the source's tower never reads the pixels beyond them.
- Gemma 3's pan and scan, which is off by default, is rejected where a file switches it on.
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
class StretchPreprocessor(StretchedViews):
    """Resizes each image to a square, by the processor files of SigLIP and Gemma 3."""

    def with_section(self, label: str, section: Section) -> StretchPreprocessor:
        """Return a copy with the mean, the std and the resampling that a processor file sets.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or another size than the tower's.
        """
        check_class(label, section, "Siglip", "Gemma3")
        class_name = str(section.get("image_processor_type") or "")
        usual: Resample = self.resample
        if class_name.startswith("Gemma3"):
            usual = "bilinear"
        elif class_name.startswith("Siglip"):
            usual = "bicubic"
        check_side(label, section, self.image_size, 224)  # the default of both classes
        # A number is the shorter side in SiglipImageProcessor, and both sides in Gemma 3's.
        if isinstance(section.get("size"), int) and not class_name.startswith("Gemma3"):
            raise ValueError(
                f"{label}: size={section['size']!r} is the length of the shorter side, but the "
                'tower takes squares: write it as {"height": .., "width": ..}'
            )
        resample = read_resample(label, section, usual)
        require_supported(label, section, {**self.supported(section), "do_pan_and_scan": False})
        mean, std = read_mean_std(label, section, self.mean, self.std)
        return replace(self, mean=mean, std=std, resample=resample)
