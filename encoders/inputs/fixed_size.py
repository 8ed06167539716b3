"""Preprocessing of images for towers whose images have one published size, or any on request.

The published size is one that images are stretched to, or that the middle of an image is taken of
after its short side was resized (``CLIPImageProcessor``, ``BitImageProcessor`` and
``DINOv3ViTImageProcessor`` of transformers 5.24.0, and for checkpoints of timm its transforms of
PIL images).

Deliberate differences:

- With ``min_pixels`` or ``max_pixels``, an image keeps its shape: its sides are rounded to whole
  patches, and nothing is cut off. The source has one size for all images of a call.
- Pixels at the right and bottom that make no whole patch are cut off; the source's tower never
  reads them.
- An image so long and narrow that resizing its short side makes over 2^28 pixels is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from ..data import Grid
from .patches import PatchPreprocessor
from .pixel_rules import PixelRules
from .processor_files import (
    PerChannel,
    Resample,
    Section,
    check_class,
    read_mean_std,
    read_positive,
    read_resample,
    require_supported,
)
from .resizing import ResizePlan
from .sizes import MOST_PIXELS, fit_short_side, middle

_LONGEST = 1 << 14
"""The longest side in pixels that a processor file may set."""
_FIX = "crop the image, or pass max_pixels"
"""The advice about an image that is too long and narrow for the published size."""
Own = TypeVar("Own", bound="FixedSizePreprocessor")


@dataclass(frozen=True)
class FixedSizeRules(PixelRules):
    """Rules that give every image one size, unless a call bounds the area of an image."""

    height: int = 224
    width: int = 224
    short_side: int | None = None
    """The length to which the short side is resized before the middle of the image is taken; None:
    images are stretched to height x width."""
    is_fixed: bool = True
    """Whether ``height`` and ``width`` hold; else the bounds on the area of an image do."""

    def bounded(self, min_pixels: int | None, max_pixels: int | None) -> FixedSizeRules:
        """Return a copy with other bounds, which then hold instead of the published size.

        Args:
            min_pixels: smallest area in pixels; None keeps the area of these rules.
            max_pixels: largest area in pixels; None keeps the area of these rules.

        Raises:
            ValueError: the smallest area is larger than the largest.
        """
        rules = super().bounded(min_pixels, max_pixels)
        assert isinstance(rules, FixedSizeRules)
        return rules if min_pixels is max_pixels is None else replace(rules, is_fixed=False)


@dataclass(frozen=True)
class FixedSizePreprocessor(PatchPreprocessor):
    """Resizes an image to the published size or, within bounds on the area, to whole patches."""

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the defaults without processor files, and the keyword that changes one of them."""
        rules = self.images
        assert isinstance(rules, FixedSizeRules)
        size = f"{rules.width}x{rules.height} pixels"
        if rules.short_side:
            size = f"the middle {size} of images whose short side is {rules.short_side}"
        return f"{size}, mean={rules.mean}, std={rules.std}", "max_pixels"

    def _follow(
        self: Own,
        label: str,
        section: Section,
        mean: PerChannel,
        std: PerChannel,
        *,
        resample: Resample,
        size: Section,
        crops: bool,
    ) -> Own:
        """Return a copy with the values that a section of a processor file sets; the keywords,
        ``mean`` and ``std`` are those of a section that says nothing. A number as size is that of
        both sides in a class that does not crop, and else that of the shorter side."""
        check_class(label, section, *(("CLIP", "Bit") if crops else ("DINOv3ViT",)))
        expected: dict[str, object] = {"resample": section.get("resample"), "do_pad": False}
        centre = section.get("do_center_crop", crops)
        if centre is not None:
            expected["do_center_crop"] = bool(centre)
        require_supported(label, section, expected)
        mean, std = read_mean_std(label, section, mean, std)
        given = section.get("size", size)
        if isinstance(given, int) and not crops:
            given = {"height": given, "width": given}
        height, width, short_side = _read_sizes(
            label, given, section.get("crop_size", 224), bool(centre)
        )
        for side in (height, width):
            if side < self.patch_size:
                raise ValueError(
                    f"{label}: images of {width}x{height} pixels have no patch of "
                    f"{self.patch_size}x{self.patch_size}: use the processor files of the "
                    "checkpoint's own repo"
                )
        rules = FixedSizeRules(
            *(1, MOST_PIXELS, mean, std), height=height, width=width, short_side=short_side
        )
        return replace(self, images=rules, resample=read_resample(label, section, resample))

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        assert isinstance(rules, FixedSizeRules)
        if not rules.is_fixed:
            return super()._grid(frames, rules)
        if rules.short_side:
            _, height, width = frames[0].shape
            fit_short_side(height, width, rules.short_side, _FIX)  # rejects huge images early
        return 1, rules.height // self.patch_size, rules.width // self.patch_size

    def _plan(self, frame: Tensor, rules: PixelRules, grid: Grid, count: int) -> ResizePlan:
        """Return how a frame is resized by ``rules``, and which part of it makes whole patches."""
        assert isinstance(rules, FixedSizeRules)
        if not rules.is_fixed:
            return super()._plan(frame, rules, grid, count)
        height, width, top, left = rules.height, rules.width, 0, 0
        if rules.short_side:
            _, old_height, old_width = frame.shape
            height, width = fit_short_side(old_height, old_width, rules.short_side, _FIX)
            rounds = self.resample.startswith("pillow")  # torchvision's transforms
            kept = rules.height, rules.width
            top, left = middle((height, width), kept, rounds=rounds)
        window = top, left, grid[1] * self.patch_size, grid[2] * self.patch_size
        return ResizePlan(height, width, self.resample, window)


def _read_sizes(
    label: str, size: object, crop_size: object, crops: bool
) -> tuple[int, int, int | None]:
    """Return the height and width of all images, and the short side before they are cropped."""
    if not crops and isinstance(size, Mapping) and set(size) == {"height", "width"}:
        height, width = (
            read_positive(label, name, size[name], 224, _LONGEST) for name in ("height", "width")
        )
        return height, width, None
    short_side = size.get("shortest_edge") if isinstance(size, Mapping) and len(size) == 1 else size
    if not crops or type(short_side) is not int:
        raise ValueError(
            f"{label}: size={size!r} is not implemented: it must be shortest_edge with a centre "
            "crop, or height and width without one"
        )
    short_side = read_positive(label, "size", short_side, 224, _LONGEST)
    crop = {"height": crop_size, "width": crop_size} if isinstance(crop_size, int) else crop_size
    if not isinstance(crop, Mapping) or set(crop) != {"height", "width"}:
        raise ValueError(f"{label}: crop_size={crop_size!r} must be height and width")
    height, width = (
        read_positive(label, name, crop[name], 224, _LONGEST) for name in ("height", "width")
    )
    if max(height, width) > short_side:
        raise ValueError(
            f"{label}: crop_size={crop_size!r} is over size={size!r}, and images are not padded: "
            "use the processor files of the checkpoint's own repo"
        )
    return height, width, short_side
