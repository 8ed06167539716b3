"""Preprocessing for the LLaVA families: a view of the whole image, and tiles of it.

For LLaVA-OneVision, a frame of a video is one view, as the whole image is.

Source: ``LlavaNextImageProcessor``, ``LlavaOnevisionImageProcessor`` and
``LlavaOnevisionVideoProcessor`` of transformers 5.24.0.

Shapes: s side of a view in pixels.

Deliberate differences:

- Views are cropped to whole patches; the source's tower never reads the pixels beyond them.
- Each image of a call is cut into tiles, as the source does with a flat list of images. In a list
  of lists, LLaVA-OneVision's does not cut images that share a list.
- ``max_tiles`` bounds the number of tiles; the source has no such limit.
- Frames are sampled only on request (``fps=``, ``num_frames=``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

from einops import rearrange
from torch import Tensor

from ..data import CLIP_SIZE
from .clip_views import ClipViewPreprocessor
from .processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    PerChannel,
    Resample,
    Section,
    read_mean_std,
    read_resample,
    require_supported,
)
from .resizing import BLACK, lay_over, resize
from .sizes import best_candidate, read_candidates
from .views import ViewPreprocessor, Views

Own = TypeVar("Own", bound="AnyResPreprocessor")
_USUAL = (
    (224, 224, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))),
    (384, None, tuple((384 * h, 384 * w) for h in range(1, 7) for w in range(1, 7))),
)
"""``size``, ``crop_size`` and pinpoints of the classes of LLaVA-NeXT and of LLaVA-OneVision."""


@dataclass(frozen=True)
class AnyResPreprocessor(ViewPreprocessor):
    """Makes a view of the whole image, then tiles of the best of several sizes."""

    mean: PerChannel = CLIP_MEAN
    std: PerChannel = CLIP_STD
    image_size: int = 336
    pinpoints: tuple[tuple[int, int], ...] = ((336, 672), (672, 336), (672, 672))
    """The (height, width) in pixels that an image may be resized to, multiples of ``image_size``.
    """
    resample: Resample = "bicubic"
    """The kind of resampling when images are resized: "bilinear", "bicubic" or "lanczos"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read_candidates(
            type(self).__name__, self.pinpoints, self.image_size, "image_grid_pinpoints"
        )

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of each kind of view by name, rounded down to whole patches."""
        return {"image": self.image_size // self.patch_size * self.patch_size}

    @property
    def pads(self) -> bool:
        """Return False: the whole image is stretched, and maps of its tiles have no border."""
        return False

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the view of the whole image, then its tiles row by row.

        Sizes of more than ``max_tiles`` tiles are left out; None leaves out none. An image for
        which no size is left has no tiles.
        """
        side, patches = self.image_size, self.sides["image"]
        height, width = image.shape[1:]
        whole = self._whole(image)
        sizes = [(w, h) for h, w in self.pinpoints]
        allowed = [
            (w, h) for w, h in sizes if max_tiles is None or w * h <= max_tiles * side * side
        ]
        if not allowed:
            return Views({"image": [whole]}, image_size=(height, width))
        wide, tall = best_candidate(width, height, allowed)
        canvas = self._on_canvas(image, tall, wide)
        tiles = rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=side, w=side)
        views = [whole, *(tile[:, :patches, :patches] for tile in tiles)]
        return Views({"image": views}, (wide // side, tall // side, True), (height, width))

    def _whole(self, image: Tensor) -> Tensor:
        """Return the view of a whole image, or of a frame."""
        side, patches = self.image_size, self.sides["image"]
        return resize(image, side, side, self.resample)[:, :patches, :patches]

    def _on_canvas(self, image: Tensor, height: int, width: int) -> Tensor:
        """Resize an image, keeping its shape, and lay it in the middle of a black canvas."""
        down, across = height / image.shape[1], width / image.shape[2]
        if across < down:
            inner = min(ceil(image.shape[1] * across), height), width
        else:
            inner = height, min(ceil(image.shape[2] * down), width)
        top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
        resized = resize(image, *inner, self.resample)
        return lay_over(resized, height, width, top, left, BLACK)

    def with_section(self: Own, label: str, section: Section) -> Own:
        """Return a copy with the mean, the std, the resampling and the sizes of a processor file.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or another size than the tower's.
        """
        class_name = str(section.get("image_processor_type") or "")
        side, (usual, usual_crop, pinpoints) = self.image_size, _USUAL["Onevision" in class_name]
        square = {"height": side, "width": side}
        size, crop = section.get("size", usual), section.get("crop_size", usual_crop) or square
        if size not in (side, square, {"shortest_edge": side}) or crop not in (side, square):
            raise ValueError(
                f"{label}: size={size!r} and crop_size={crop!r} but the tower takes views of "
                f"{side}x{side}: use the processor files of the checkpoint's own repo"
            )
        require_supported(label, section, {"resample": section.get("resample")})
        mean, std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
        sizes = section.get("image_grid_pinpoints", pinpoints if class_name else None)
        return replace(
            self,
            mean=mean,
            std=std,
            resample=read_resample(label, section, "bicubic"),
            pinpoints=self.pinpoints
            if sizes is None
            else read_candidates(label, sizes, side, "image_grid_pinpoints"),
        )


@dataclass(frozen=True)
class AnyResClipPreprocessor(AnyResPreprocessor, ClipViewPreprocessor):
    """Makes views of images as its base class does, and one view of each frame of a video."""

    sampling = "uniform"

    def frame_views(self, frame: Tensor, max_tiles: int | None) -> Views:
        """Return the view of one frame, which is resized as a whole image is."""
        return Views({"image": [self._whole(frame)]}, image_size=CLIP_SIZE)

    def with_frames(self, label: str, section: Section) -> AnyResClipPreprocessor:
        """Return a copy with the mean, the std and the resampling of frames.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes videos.

        Raises:
            ValueError: a value that is not implemented, or another size than the tower's.
        """
        size = {"size": {"height": 384, "width": 384}, "crop_size": None}  # of the class
        section, side = {**size, **section}, self.image_size
        frames = self.with_section(label, section)
        if section["size"] != {"height": side, "width": side}:  # its class resizes the shorter side
            raise ValueError(
                f"{label}: size={section['size']!r} is the length of the shorter side, but the "
                'tower takes squares: write it as {"height": .., "width": ..}'
            )
        return replace(self, frames=frames)
