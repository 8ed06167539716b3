"""Preprocessing of images for DINOv2 and DINOv3: one published size, or any size on request.

Source: ``BitImageProcessor`` and ``DINOv3ViTImageProcessor`` of transformers 5.24.0, the classes
that torchvision backs; for checkpoints of timm, its transforms of PIL images.
``encoders.inputs.fixed_size`` lists the deliberate differences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..data import Limits
from ..inputs.fixed_size import FixedSizePreprocessor, FixedSizeRules
from ..inputs.intake import ImagesLike, VideosLike
from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PIL_TRANSFORMS,
    ProcessorFiles,
    image_section,
)
from ..inputs.resizing import CPU
from ..inputs.sizes import MOST_PIXELS
from ..inputs.staging import PlannedImage, StagedItem, StagedPath

Pixels = TypeVar("Pixels", StagedPath, PlannedImage)


@dataclass(frozen=True)
class DinoPreprocessor(FixedSizePreprocessor):
    """Resizes an image to the published size or, within bounds on the area, to whole patches."""

    in_float: bool = False
    """Whether images are resized as float32 (DINOv3 of transformers), not as uint8."""

    @classmethod
    def dinov2(cls, patch_size: int) -> DinoPreprocessor:
        """Return the preprocessor of the published DINOv2 repos."""
        rules = FixedSizeRules(1, MOST_PIXELS, IMAGENET_MEAN, IMAGENET_STD, short_side=256)
        return cls(patch_size, 1, 1, rules, rules, images_alone=True)

    @classmethod
    def dinov3(cls, patch_size: int) -> DinoPreprocessor:
        """Return the preprocessor of the published DINOv3 repos."""
        rules = FixedSizeRules(1, MOST_PIXELS, IMAGENET_MEAN, IMAGENET_STD)
        return cls(
            *(patch_size, 1, 1, rules, rules), resample="bilinear", images_alone=True, in_float=True
        )

    def stage(
        self, images: ImagesLike, videos: VideosLike, limits: Limits, device: torch.device = CPU
    ) -> list[StagedItem]:
        """Decode and resize images; floats are from 0 to 1, and mean and std are of that scale."""
        items = super().stage(images, videos, limits, device)
        if not self.in_float:
            return items
        return [StagedItem({"image": _of_unit_scale(item.paths["image"])}) for item in items]

    def plan(self, image: Tensor, limits: Limits) -> PlannedImage:
        """Return how an image is resized, with mean and std of the scale of :meth:`stage`."""
        planned = super().plan(image, limits)
        return _of_unit_scale(planned) if self.in_float else planned

    def _with_images(self, files: ProcessorFiles) -> DinoPreprocessor:
        entry = image_section(files)
        if entry is None:
            return self
        if self.in_float and entry[1].get("image_processor_type") != PIL_TRANSFORMS:
            size = {"height": 224, "width": 224}
            return self._follow(
                *(*entry, IMAGENET_MEAN, IMAGENET_STD), resample="bilinear", size=size, crops=False
            )
        size, ours = {"shortest_edge": 224}, replace(self, in_float=False)
        return ours._follow(*entry, CLIP_MEAN, CLIP_STD, resample="bicubic", size=size, crops=True)

    @property
    def resizes_floats(self) -> bool:
        """Whether images are resized as float32 (DINOv3), not as uint8."""
        return self.in_float

    def _source(self, frame: Tensor) -> Tensor:
        """Return a frame, uint8 [3, H, W], or the same as float32 from 0 to 1."""
        return frame.to(torch.float32) * (1 / 255) if self.in_float else frame


def _of_unit_scale(pixels: Pixels) -> Pixels:
    """Divide mean and std by 255, by which ``normalize`` multiplies them."""
    (r, g, b), (r2, g2, b2) = pixels.mean, pixels.std
    return pixels._replace(mean=(r / 255, g / 255, b / 255), std=(r2 / 255, g2 / 255, b2 / 255))
