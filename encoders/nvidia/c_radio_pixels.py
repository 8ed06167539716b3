"""Preprocessing of images for C-RADIO: stretched to one size, or of any size in Nemotron.

Source: ``CLIPImageProcessor`` of transformers 5.23.0 with the settings of NVIDIA's repos, and
``input_conditioner`` of ``RadioModel``: pixels are from 0 to 1 when the source's model takes them,
and the model normalises them. ``encoders.inputs.fixed_size`` lists the deliberate differences.
Nemotron's is ``NemotronH_Omni_Reasoning_V3ImageProcessor``, which normalises pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data import Grid
from ..inputs.fixed_size import FixedSizePreprocessor, FixedSizeRules
from ..inputs.patches import PatchPreprocessor
from ..inputs.pixel_rules import PixelRules, check_sizes
from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    ProcessorFiles,
    image_section,
    read_mean_std,
    read_positive,
    require_supported,
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
        if section.get("do_normalize", True):
            raise ValueError(
                f"{label}: do_normalize={section.get('do_normalize')!r} is not implemented: it "
                "must be false, because the model itself normalises pixels"
            )
        model = {"do_normalize": True, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
        size = {"shortest_edge": 224}
        return self._follow(
            *(label, {**section, **model}, CLIP_MEAN, CLIP_STD),
            resample="bicubic",
            size=size,
            crops=True,
        )


@dataclass(frozen=True)
class NemotronPreprocessor(PatchPreprocessor):
    """Resizes an image, as float32, to an even number of patches per side within bounds."""

    @classmethod
    def nemotron(cls, patch_size: int) -> NemotronPreprocessor:
        """Return the preprocessor of the published repos: 1,024 to 13,312 patches."""
        rules = PixelRules(1024 * patch_size**2, 13312 * patch_size**2, CLIP_MEAN, CLIP_STD)
        return cls(patch_size, 1, 1, rules, rules, images_alone=True)

    def _with_images(self, files: ProcessorFiles) -> NemotronPreprocessor:
        entry = image_section(files)
        if entry is None:
            return self
        label, section = entry
        require_supported(label, section, {"downsample_ratio": 0.5})
        check_sizes(label, section, {"patch_size": self.patch_size})
        area = self.patch_size**2
        low, high = (
            read_positive(label, name, section.get(name), default, MOST_PIXELS // area)
            for name, default in (("min_num_patches", 1024), ("max_num_patches", 13312))
        )
        tokens = read_positive(label, "max_model_len", section.get("max_model_len"), 16384)
        if 4 * (tokens - 4) < high:
            raise ValueError(
                f"{label}: max_model_len={tokens} is not implemented: it must hold the tokens of "
                f"max_num_patches={high}"
            )
        section = {
            **section,
            "image_mean": section.get("norm_mean", section.get("image_mean")),
            "image_std": section.get("norm_std", section.get("image_std")),
        }
        mean, std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
        return replace(self, images=PixelRules(low * area, high * area, mean, std))

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        area = self.patch_size**2
        low, high = rules.min_pixels // area, rules.max_pixels // area
        return 1, *even_grid(height / self.patch_size, width / self.patch_size, low, high)

    @property
    def resizes_floats(self) -> bool:
        """Return True: images are resized as float32 that is not clamped to 0 and 255."""
        return True

    def _source(self, frame: Tensor) -> Tensor:
        """Return a frame, uint8 [3, H, W], as float32."""
        return frame.to(torch.float32)


def even_grid(height: float, width: float, low: int, high: int) -> tuple[int, int]:
    """Return the rows and columns of patches, both even, that an image is resized to.

    Args:
        height: height of the image in patches.
        width: width of the image in patches.
        low: smallest number of patches; it does not count if ``high`` is not larger.
        high: largest number of patches, but that each side has two at least.

    Raises:
        ValueError: an image so long and narrow that it has no row or no column left.
    """
    rows, columns = round(height + 0.5), round(width + 0.5)  # round takes halves to even numbers
    factor = min(math.sqrt(high / (rows * columns)), 1.0)
    rows, columns = math.floor(factor * rows), math.floor(factor * columns)
    if not rows or not columns:
        raise ValueError(
            f"is {width:g}x{height:g} patches, too long and narrow for at most {high}: crop it"
        )
    if high > low and rows * columns < low:
        factor = math.sqrt(low / (rows * columns))
        rows, columns = math.ceil(factor * rows), math.ceil(factor * columns)
    if rows % 2:
        rows += 1 if (rows + 1) * columns <= high else -1
    rows = max(2, rows)
    if columns % 2:
        columns += 1 if rows * (columns + 1) <= high else -1
    return rows, max(2, columns)
