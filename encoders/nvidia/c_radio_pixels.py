"""Preprocessing of images for C-RADIO: stretched to one size, or of any size on request.

Source: ``CLIPImageProcessor`` of transformers 5.23.0 with the settings of NVIDIA's repos, and
``input_conditioner`` of ``RadioModel``: pixels are from 0 to 1 when the source's model takes them,
and the model normalises them; for checkpoints of timm, its transforms of PIL images.
``encoders.inputs.fixed_size`` lists the deliberate differences.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..inputs.fixed_size import FixedSizePreprocessor, FixedSizeRules
from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    PIL_TRANSFORMS,
    ProcessorFiles,
    image_section,
)
from ..inputs.sizes import MOST_PIXELS


@dataclass(frozen=True)
class CRadioPreprocessor(FixedSizePreprocessor):
    """Resizes an image to the published size or, within bounds on the area, to whole patches."""

    @classmethod
    def c_radio(cls, patch_size: int, height: int, width: int) -> CRadioPreprocessor:
        """Return the preprocessor of the published repos, for images of ``height`` x ``width``."""
        rules = FixedSizeRules(1, MOST_PIXELS, CLIP_MEAN, CLIP_STD, height=height, width=width)
        return cls(patch_size, 1, 1, rules, rules, images_alone=True)

    def _with_images(self, files: ProcessorFiles) -> CRadioPreprocessor:
        entry = image_section(files)
        if entry is None:
            return self
        label, section = entry
        if section.get("image_processor_type") != PIL_TRANSFORMS:  # those of timm normalise pixels
            if section.get("do_normalize", True):
                raise ValueError(
                    f"{label}: do_normalize={section.get('do_normalize')!r} is not implemented: it "
                    "must be false, because the model itself normalises pixels"
                )
            model = {"do_normalize": True, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
            section = {**section, **model}
        size = {"shortest_edge": 224}
        return self._follow(
            *(label, section, CLIP_MEAN, CLIP_STD),
            resample="bicubic",
            size=size,
            crops=True,
        )
