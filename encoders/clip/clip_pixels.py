"""Preprocessing of images for CLIP: one square view, the centre of the image.

Source: ``CLIPImageProcessor`` of transformers 5.24.0; for checkpoints of timm and open_clip, their
transforms of PIL images (timm 1.0.31, open_clip 3.3.0).

Shapes: s side of a view in pixels.

Deliberate differences:

- A view is cropped to whole patches; the source's tower never reads the pixels beyond them.
- An image so long and narrow that resizing its short side makes over 2^28 pixels is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    PerChannel,
    Section,
    check_class,
    read_mean_std,
    read_resample,
    require_supported,
)
from ..inputs.resizing import ResizePlan
from ..inputs.sizes import fit_short_side, middle
from ..inputs.views import OneView


@dataclass(frozen=True)
class CentreCropPreprocessor(OneView):
    """Resizes the short side of each image, and takes the square in the middle."""

    mean: PerChannel = CLIP_MEAN
    std: PerChannel = CLIP_STD
    short_side: int | None = None
    """The length in pixels to which the short side is resized; None: the side of a view."""
    stretch: bool = False
    """Whether images are stretched to a square instead, so that nothing is cut off."""

    def one_view(self, image: Tensor) -> ResizePlan:
        """Return how the square in the middle of an image is made; there are no tiles."""
        size, side, (height, width) = self.image_size, self.sides["image"], image.shape[1:]
        if self.stretch:
            return ResizePlan(size, size, self.resample, (0, 0, side, side))
        height, width = fit_short_side(height, width, self.short_side or size)
        rounds = self.resample.startswith("pillow")  # torchvision's transforms
        corner = middle((height, width), (size, size), rounds=rounds)
        return ResizePlan(height, width, self.resample, (*corner, side, side))

    def with_section(self, label: str, section: Section) -> CentreCropPreprocessor:
        """Return a copy with the sizes, the mean, the std and the resampling of a processor file.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or another size than the tower's.
        """
        check_class(label, section, "CLIP", "Bit")
        size, side = section.get("size", 224), self.image_size
        square = {"height": side, "width": side}
        stretch = size == square
        expected = {"resample": section.get("resample"), "use_square_size": False, "do_pad": False}
        crops = {} if stretch else {"do_center_crop": True}
        require_supported(label, section, {**expected, **crops})
        crop = section.get("crop_size", 224)
        short = size.get("shortest_edge") if isinstance(size, Mapping) and len(size) == 1 else size
        keeps = crop in (side, square) or (stretch and not section.get("do_center_crop", True))
        fits = stretch or (type(short) is int and short >= side)
        if not (keeps and fits):
            raise ValueError(
                f"{label}: size={size!r} and crop_size={crop!r} but the tower takes views of "
                f"{side}x{side}: use the processor files of the checkpoint's own repo"
            )
        mean, std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
        return replace(
            self,
            mean=mean,
            std=std,
            resample=read_resample(label, section, "bicubic"),
            short_side=short if isinstance(short, int) and short != side else None,
            stretch=stretch,
        )
