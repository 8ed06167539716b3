"""Preprocessing of images to square views of a fixed size: the steps that families share.

Shapes: s side of a view in pixels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from ..data import Limits, PathInputs, Tiling, VisionInputs
from .clips import refuse_sampling, refuse_videos
from .image_files import prefix_errors
from .intake import ImagesLike, VideosLike, read_images
from .limits import check_limits
from .normalizing import channels_first, finish_path
from .processor_files import (
    HALF,
    PerChannel,
    ProcessorFiles,
    Resample,
    Section,
    image_section,
    read_mean_std,
    require_supported,
)
from .resizing import CPU, ResizePlan, resize_planned
from .sizes import check_area
from .staging import (
    PlannedImage,
    StagedItem,
    StagedPath,
    StagedPreprocessor,
    grid_tensor,
    stack_frames,
    to_resize,
)

Own = TypeVar("Own", bound="ViewPreprocessor")


class Views(NamedTuple):
    """The square views of one image ("image", "tiles", ...), and how its tiles are arranged."""

    paths: Mapping[str, list[Tensor]]
    """The pixels [3, s, s] of each view, from 0 to 255, by the name of the path that encodes it."""
    tiles: Tiling = (1, 1, False)
    """The arrangement of the tiles: (columns, rows, whether the whole image is also a view)."""
    image_size: tuple[int, int] | None = None
    """(height, width) in pixels of the image as decoded, if its tokens depend on it."""


@dataclass(frozen=True)
class ViewPreprocessor(StagedPreprocessor):
    """Turns each image into square views (the whole image, tiles, ...); there are no videos."""

    patch_size: int
    mean: PerChannel = HALF
    std: PerChannel = HALF
    tiles_several: bool = True
    """Whether images are cut into tiles if a call has several images. If this is False, they are
    cut only in a call that passes ``max_tiles``."""

    def __post_init__(self) -> None:
        for side in self.sides.values():
            check_area(1, side)

    @property
    @abstractmethod
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of each kind of view by its name, "image" first."""

    @abstractmethod
    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the views of one image.

        Args:
            image: uint8 [3, H, W].
            max_tiles: the keyword of ``preprocess``; None takes the preprocessor's own limit.
        """

    @property
    def sizing(self) -> tuple[str, ...]:
        """The keywords of ``preprocess`` that bound the size or the number of an image's views."""
        return ("max_tiles",)

    @property
    def pads(self) -> bool:
        """Whether an image lies whole in the middle of its view, with a border of one colour."""
        return True

    def mean_std(self, path: str) -> tuple[PerChannel, PerChannel]:
        """Return the mean and standard deviation of the pixels of a kind of view, e.g. "tiles"."""
        return self.mean, self.std

    def with_files(
        self: Own, files: ProcessorFiles, error: Callable[[str], ValueError] = ValueError
    ) -> Own:
        """Return a copy of the preprocessor with the defaults of a repo's processor files.

        Args:
            files: parsed JSON per file name without ``.json``: ``"processor_config"``,
                ``"preprocessor_config"``, those that the repo has.
            error: makes the exception for a bad value from its message.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        try:
            entry = image_section(files)
            return self if entry is None else self.with_section(*entry)
        except ValueError as bad:
            raise error(str(bad)) from bad

    def with_section(self: Own, label: str, section: Section) -> Own:
        """Return a copy with the values that a processor file sets.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        require_supported(label, section, {"normalize": True})
        mean, std = read_mean_std(label, section, self.mean, self.std)
        return replace(self, mean=mean, std=std)

    def without_videos(self: Own, error: ValueError) -> Own:
        """Return the preprocessor itself: it rejects every video already, with another error."""
        return self

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the defaults without processor files, and "": no keyword changes them."""
        return f"mean={self.mean}, std={self.std}", ""

    def stage(
        self, images: ImagesLike, videos: VideosLike, limits: Limits, device: torch.device = CPU
    ) -> list[StagedItem]:
        """Decode images and make their views; see :class:`StagedPreprocessor`."""
        return [self._staged(views, device) for views in self.read(images, videos, limits, device)]

    def _staged(self, views: Views, device: torch.device) -> StagedItem:
        paths = {}
        for name, pixels in views.paths.items():
            rows, columns = (side // self.patch_size for side in pixels[0].shape[1:])
            grid, mean_std = (len(pixels), rows, columns), self.mean_std(name)
            paths[name] = StagedPath(stack_frames(pixels, device), grid, *mean_std)
        return StagedItem(paths, views.tiles, views.image_size)

    def finish(
        self, items: Sequence[StagedItem], dtype: torch.dtype = torch.float32
    ) -> VisionInputs:
        """Normalise the views of items for each input path, on the device of their pixels."""
        device = items[0].paths["image"].pixels.device if items else CPU
        paths = {}
        for name, side in self.sides.items():
            users = tuple(n for n, item in enumerate(items) if name in item.paths)
            parts = [items[n].paths[name] for n in users]
            rows = self.rows(parts, side, dtype, device)
            paths[name] = PathInputs(rows, grid_tensor([part.grid for part in parts]), users)
        tilings = [item.tiles for item in items if item.tiles is not None]
        sizes = [item.image_size for item in items if item.image_size is not None]
        return VisionInputs(*paths.pop("image")[:2], tilings, paths, sizes or None)

    def rows(
        self, parts: Sequence[StagedPath], side: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the normalised views of one input path, [n, 3, side, side].

        Args:
            parts: the views of each item that has some for this path.
            side: the side of a view in pixels.
            dtype: the dtype of the result.
            device: the device of the result if there are no items.
        """
        return finish_path(parts, channels_first, 1, (3, side, side), dtype, device)

    def read(
        self, images: ImagesLike, videos: VideosLike, limits: Limits, device: torch.device = CPU
    ) -> list[Views]:
        """Decode images and make the views of each.

        Args:
            images: images in any form that ``preprocess`` accepts.
            videos: must be empty, since these towers take no videos.
            limits: the keywords of ``preprocess``; all not named in ``sizing`` must be None.
            device: the device of the views in the end. On CUDA they are also made there.

        Raises:
            ValueError: a bad image, a video, or a keyword that this family does not have.
        """
        check_limits(limits)
        refuse_sampling(limits)
        for name, value in limits._asdict().items():
            if value is not None and name not in self.sizing:
                raise ValueError(f"{name}={value}: {self._takes()}")
        max_tiles = limits.max_tiles
        refuse_videos(videos)
        items, decoded = [], read_images(images)
        if len(decoded) > 1 and max_tiles is None and not self.tiles_several:
            max_tiles = 1
        for number, image in enumerate(decoded):
            with prefix_errors(f"image {number}"):
                items.append(self.views(to_resize(image, device), max_tiles))
        return items

    def _takes(self) -> str:
        """Return the part of an error that says which keywords for sizes this family takes."""
        *others, last = self.sizing or ("",)
        if not last:
            return "this family takes images in views of fixed sizes; leave it out"
        keywords = f"{', '.join(others)} or {last}" if others else last
        return f"this family has no such limit; pass {keywords} instead"


@dataclass(frozen=True)
class OnePathViews(ViewPreprocessor):
    """Makes views of one size, only for the input path "image"."""

    image_size: int = 224
    resample: Resample = "bicubic"
    """The kind of resampling when images are resized: "bilinear", "bicubic" or "lanczos"."""

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of each kind of view by name, rounded down to whole patches."""
        return {"image": self.image_size // self.patch_size * self.patch_size}

    @property
    def sizing(self) -> tuple[str, ...]:
        """Return no keyword of ``preprocess``: image and checkpoint decide the views."""
        return ()

    @property
    def pads(self) -> bool:
        """Return False: an image is stretched to fill its views, and never padded."""
        return False

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the defaults without processor files, and "": no keyword changes them."""
        return f"resample={self.resample!r}, mean={self.mean}, std={self.std}", ""


class OneView(OnePathViews):
    """Makes one view of an image, which is resized once and perhaps cut."""

    @abstractmethod
    def one_view(self, image: Tensor) -> ResizePlan:
        """Return how an image, uint8 [3, H, W], becomes the view."""

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the only view of an image; there are no tiles."""
        plan = self.one_view(image)
        return Views({"image": list(resize_planned([(image, plan)], lambda image: image))})

    def plan(self, image: Tensor, limits: Limits) -> PlannedImage:
        """Return how an image is resized; see :class:`StagedPreprocessor`."""
        side = self.sides["image"] // self.patch_size
        grid, (mean, std) = (1, side, side), self.mean_std("image")
        size = image.shape[1], image.shape[2]
        return PlannedImage(size, self.one_view(image), grid, mean, std, (1, 1, False))


@dataclass(frozen=True)
class StretchedViews(OneView):
    """Resizes each image to a square, whatever its shape.

    Rows and columns of pixels at the right and bottom that make no whole patch are cut off.
    """

    def one_view(self, image: Tensor) -> ResizePlan:
        """Return how the whole image is resized to a square; there are no tiles."""
        side, size = self.sides["image"], self.image_size
        return ResizePlan(size, size, self.resample, (0, 0, side, side))

    def supported(self, section: Section) -> dict[str, object]:
        """Return the only value of each key of a section that leaves the square as it is.

        A crop in the middle is allowed if it has the size of the square.
        """
        side = self.image_size
        crops = section.get("crop_size") not in (side, {"height": side, "width": side})
        only: dict[str, object] = {"resample": section.get("resample"), "do_pad": False}
        return {**only, "do_center_crop": False} if crops else only


def patch_rows(
    parts: Sequence[StagedPath],
    patch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    channels_last: bool,
) -> Tensor:
    """Return the normalised patches of views, [P, 3*p*p] for patches of side p.

    Args:
        parts: the views of each item that has some for this path, [n, H, W, 3].
        patch_size: the side of a patch in pixels.
        dtype: the dtype of the result.
        device: the device of the result if there are no items.
        channels_last: whether a row has the axes row, column, channel, not channel, row, column.
    """
    row = "(p q) c" if channels_last else "c (p q)"

    def cut(views: Tensor) -> Tensor:
        pattern = f"i n (h p) (w q) c -> (i n h w) {row}"
        return rearrange(views, pattern, p=patch_size, q=patch_size)

    return finish_path(parts, cut, 2 if channels_last else 1, (3 * patch_size**2,), dtype, device)
