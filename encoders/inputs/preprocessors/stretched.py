"""Images to square views without keeping their shape: SigLIP and Gemma 3.

Source: ``SiglipImageProcessor`` and ``Gemma3ImageProcessor`` of transformers 5.23.0.

Shapes: S side of a view in pixels.

Deliberate differences:

- A view is cut to whole patches; the source's tower never reads the pixels beyond them.
- Gemma 3's pan and scan, which is off by default, is refused where a file switches it on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract import Limits, VisionInputs
from ..images import StagedItem, grid_tensor, normalize, resize, stack_frames
from ..processor_files import (
    Section,
    Settings,
    check_side,
    read_resample,
    read_stats,
    require_supported,
)
from .views import ViewPreprocessor, Views


@dataclass(frozen=True)
class StagedViews(ViewPreprocessor):
    """Views of one path, which can be normalised on another device.

    See :class:`StagedPreprocessor`.
    """

    image_size: int = 224
    resample: str = "bicubic"
    """The kind of resampling when images are resized: "bilinear", "bicubic" or "lanczos"."""

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of the views, cut to whole patches, of the path "image"."""
        return {"image": self.image_size // self.patch_size * self.patch_size}

    @property
    def has_tiles(self) -> bool:
        """Return False: no keyword bounds the number of views."""
        return False

    @property
    def pads(self) -> bool:
        """Return False: an image is stretched to fill its views, and never padded."""
        return False

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return a text of the defaults that no processor file sets; no keyword sets them."""
        return f"resample={self.resample!r}, mean={self.mean}, std={self.std}", ""

    def stage(
        self,
        images: Sequence[object],
        videos: Sequence[object],
        limits: Limits,
        pinned: bool = False,
    ) -> list[StagedItem]:
        """Decode and resize images.

        Args:
            images: images of any kind that :func:`read_images` takes.
            videos: no videos, which towers of views do not take.
            limits: no keywords, since none of them means anything here.
            pinned: whether pixels are to lie in page-locked memory.

        Returns:
            Items whose pixels are uint8 [views, S, S, 3], cut to whole patches.

        Raises:
            ValueError: a bad image, a video, or a keyword.
        """
        patches = self.image_size // self.patch_size
        return [
            StagedItem(
                stack_frames(item.paths["image"], pinned),
                (len(item.paths["image"]), patches, patches),
                self.mean,
                self.std,
                item.tiles,
            )
            for item in self.read(images, videos, limits)
        ]

    def finish(self, items: Sequence[StagedItem]) -> VisionInputs:
        """Normalise items on the device that their pixels are on.

        Args:
            items: the items of ``stage``, whose pixels may have been moved to a device.

        Returns:
            The views, float32 [n, 3, S, S] with the bits of a call, and the grid on the CPU.
        """
        views = [item.pixels.permute(0, 3, 1, 2).contiguous() for item in items]
        side = self.sides["image"]
        pixels = torch.empty(0, 3, side, side)
        if views:
            pixels = normalize(torch.cat(views), items[0].mean, items[0].std)
        tilings = [item.tiles for item in items if item.tiles is not None]
        return VisionInputs(pixels, grid_tensor([item.grid for item in items]), tilings)


@dataclass(frozen=True)
class StretchPreprocessor(StagedViews):
    """Resizes each image to S x S pixels, whatever its shape, and cuts off parts of patches."""

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the whole image as the only view."""
        side = self.sides["image"]
        view = resize(image, self.image_size, self.image_size, self.resample)
        return Views({"image": [view[:, :side, :side]]})

    def rules(self, where: str, section: Section) -> Settings:
        """Return the settings in a processor file: mean, std and resampling; the size must be the
        tower's."""
        check_side(where, section, self.image_size)
        named = str(section.get("image_processor_type") or "")
        usual = "bilinear" if named.startswith("Gemma3") else "bicubic"
        resample = read_resample(where, section, usual)
        more = {"resample": section.get("resample"), "do_pan_and_scan": False}
        require_supported(where, section, more)
        mean, std = read_stats(where, section, self.mean, self.std)
        return {"mean": mean, "std": std, "resample": resample}
