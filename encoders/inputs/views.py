"""Images to the views of the DeepSeek families: the whole image, and tiles of it.

Source: ``VLMImageProcessor`` and ``HybridVisionTower`` of deepseek-ai/DeepSeek-VL at commit
681bffb, ``DeepseekVLV2Processor`` of deepseek-ai/DeepSeek-VL2 at commit ef9f91e, and
``DeepseekOCRProcessor`` of deepseek-ai/DeepSeek-OCR at commit e4ac34e.

Shapes: S side of a view in pixels.

Deliberate differences:

- Images are resized by torch's uint8 kernel as in the other families; the sources use PIL, which
  differs by at most one level at most scales.
- DeepSeek-VL2 cuts no image of a prompt with more than two images. Every image is cut here as if
  it were alone; ``max_tiles=1`` leaves images whole.
- DeepSeek-OCR cuts an image into at most six tiles, as its processor for vLLM does. The code beside
  the weights on the Hub makes up to nine; ``max_tiles=9`` does that here.
- transformers' DeepseekVLImageProcessor and DeepseekVLHybridImageProcessor round the shorter side
  to the nearest pixel; the source cuts it off, as is done here for converted repos, too. The second
  also rounds the small view to levels. A ``background_color`` in their files is not read: as in
  these classes, the padding has the colour of the mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..contract import Limits, PathInputs, VisionInputs
from .image_files import naming
from .images import check_limits, folded_stats, grid_tensor, laid_over, padded, resize
from .intake import read_images
from .processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    ProcessorFiles,
    Section,
    Settings,
    Stats,
    check_side,
    image_section,
    read_positive,
    read_stats,
    require_supported,
)
from .sizes import best_candidate, best_tiling, check_area, read_candidates

Own = TypeVar("Own", bound="ViewPreprocessor")


class Views(NamedTuple):
    """The square views that one image becomes."""

    paths: Mapping[str, list[Tensor]]
    """The pixels [3, S, S] of each view, from 0 to 255, by the name of the path that encodes it."""
    tiles: tuple[int, int, bool] = (1, 1, False)
    """How the tiles lie: (columns, rows, whether there is also a view of the whole image)."""


@dataclass(frozen=True)
class ViewPreprocessor(ABC):
    """Turns each image into square views for the paths of a tower; there are no videos."""

    patch_size: int
    mean: Stats = HALF
    std: Stats = HALF
    tiles_several: bool = True
    """Whether images have tiles in a call with several; a ``max_tiles`` of the call cuts each."""

    def __post_init__(self) -> None:
        for side in self.sides.values():
            check_area(1, side)

    @property
    @abstractmethod
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of the views of each path by its name, "image" first."""

    @abstractmethod
    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the views of an image, uint8 [3, H, W]."""

    @property
    def has_tiles(self) -> bool:
        """Whether the keyword ``max_tiles`` bounds the number of tiles that images are cut into."""
        return True

    @property
    def pads(self) -> bool:
        """Whether an image lies whole in the middle of its view, with a border of one colour."""
        return True

    def stats(self, path: str) -> tuple[Stats, Stats]:
        """Return mean and standard deviation with which the pixels of a path are normalised."""
        return self.mean, self.std

    def with_files(
        self: Own, files: ProcessorFiles, error: Callable[[str], ValueError] = ValueError
    ) -> Own:
        """Return a copy with the defaults of a repo's processor files.

        Args:
            files: parsed JSON per file name without ``.json``: ``"processor_config"``,
                ``"preprocessor_config"``, those that the repo has.
            error: makes the exception of a bad value from its message.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        try:
            found = image_section(files)
            return self if found is None else replace(self, **self.rules(*found))
        except ValueError as bad:
            raise error(str(bad)) from bad

    def rules(self, where: str, section: Section) -> Settings:
        """Return the settings of this preprocessor that a section of the processor files gives."""
        require_supported(where, section, {"normalize": True})
        mean, std = read_stats(where, section, self.mean, self.std)
        return {"mean": mean, "std": std}

    def without_videos(self: Own, error: ValueError) -> Own:
        """Return the preprocessor itself: every tower with views refuses videos anyway."""
        return self

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return a text of the defaults that no processor file sets; no keyword sets them."""
        return f"mean={self.mean}, std={self.std}", ""

    def __call__(
        self,
        images: Sequence[object] = (),
        videos: Sequence[object] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VisionInputs:
        """Return the views of images by path; see ``VisionEncoder.preprocess``."""
        limits = (min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        items = self.read(images, videos, Limits(*limits))
        paths = {name: self._path(name, items) for name in self.sides}
        return VisionInputs(*paths.pop("image")[:2], [item.tiles for item in items], paths)

    def read(
        self, images: Sequence[object], videos: Sequence[object], limits: Limits
    ) -> list[Views]:
        """Return the views of each image, once the keywords are known to mean something here."""
        check_limits(limits)
        max_tiles = limits.max_tiles
        for name, value in limits._asdict().items():
            if value is not None and name != "max_tiles":
                raise ValueError(
                    f"{name}={value}: this family takes images in views of one size; leave it out"
                )
        if max_tiles is not None and not self.has_tiles:
            raise ValueError(
                f"max_tiles={max_tiles}: this family's images are cut by their size or not at all; "
                "leave it out"
            )
        if count := len(videos):
            some = f"{count} video{'s' * (count != 1)}"
            raise ValueError(f"{some}: this family takes images alone; pass frames as images")
        items, found = [], read_images(images)
        if len(found) > 1 and max_tiles is None and not self.tiles_several:
            max_tiles = 1
        for number, image in enumerate(found):
            with naming(f"image {number}"):
                items.append(self.views(image, max_tiles))
        return items

    def _path(self, name: str, items: Sequence[Views]) -> PathInputs:
        """Normalise the views of one path; an image without such views has no entry in the grid."""
        counts = [len(item.paths.get(name, ())) for item in items]
        side, patches = self.sides[name], self.sides[name] // self.patch_size
        pixels = torch.empty(sum(counts), 3, side, side, dtype=torch.float32, device="cpu")
        low, scale = folded_stats(*self.stats(name))
        views = (view for item in items for view in item.paths.get(name, ()))
        for view, target in zip(views, pixels, strict=True):
            target.copy_(view).sub_(low).div_(scale)
        grids = grid_tensor([(n, patches, patches) for n in counts if n])
        return PathInputs(pixels, grids, tuple(item for item, n in enumerate(counts) if n))


@dataclass(frozen=True)
class SquarePreprocessor(ViewPreprocessor):
    """DeepSeek-VL-1.3B: the longer side resized to S, padded to a square with the mean colour."""

    image_size: int = 384
    min_size: int = 14
    """The least number of pixels to which the shorter side of an image is resized."""

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of the view of the only path, "image"."""
        return {"image": self.image_size}

    @property
    def has_tiles(self) -> bool:
        """Return False: no image is cut into tiles."""
        return False

    @property
    def colour(self) -> Stats:
        """The red, green and blue of the padding around an image, from 0 to 1."""
        return self.mean

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the padded square of the image as the only view."""
        return Views({"image": [self.square(image)]})

    def square(self, image: Tensor) -> Tensor:
        """Return the image resized and padded to a square of S x S pixels, uint8 [3, S, S]."""
        height, width = image.shape[1:]
        longer, side = max(height, width), self.image_size
        small = resize(
            image,
            max(int(height / longer * side), self.min_size),
            max(int(width / longer * side), self.min_size),
        )
        free_rows, free_columns = side - small.shape[1], side - small.shape[2]
        return laid_over(small, side, side, free_rows // 2, free_columns // 2, self.colour)

    def rules(self, where: str, section: Section) -> Settings:
        """Return the settings in a file: mean, std, smallest side; the size must be the tower's."""
        check_side(where, section, self.image_size)
        require_supported(where, section, {"do_pad": True})
        mean, std = read_stats(where, section, CLIP_MEAN, CLIP_STD)  # DeepseekVLImageProcessor's
        return {"mean": mean, "std": std, "min_size": self.smallest(where, section)}

    def smallest(self, where: str, section: Section) -> int:
        """Return ``min_size`` of a section of a processor file."""
        return read_positive(where, "min_size", section.get("min_size"), 14, self.image_size)


@dataclass(frozen=True)
class HybridPreprocessor(SquarePreprocessor):
    """DeepSeek-VL-7B: a view of 1024x1024 pixels and the same one at 384x384, as two paths.

    ``mean`` and ``std`` are those of the large view, the path "high"; "image" is the small one.
    They are the published towers' own: the processor file has the colour of the padding alone.
    """

    image_size: int = 1024
    mean: Stats = CLIP_MEAN
    std: Stats = CLIP_STD
    low_size: int = 384
    low_mean: Stats = HALF
    low_std: Stats = HALF
    background: Stats = CLIP_MEAN

    @property
    def colour(self) -> Stats:
        """The red, green and blue of the padding around an image, from 0 to 1."""
        return self.background

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of the views of each path, the small view's first."""
        return {"image": self.low_size, "high": self.image_size}

    def stats(self, path: str) -> tuple[Stats, Stats]:
        """Return mean and standard deviation with which the pixels of a path are normalised."""
        return (self.low_mean, self.low_std) if path == "image" else (self.mean, self.std)

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the large view, and the small one, which the source resizes in floats."""
        high = self.square(image)
        low = F.interpolate(
            high[None].to(torch.float32), self.low_size, mode="bilinear", antialias=True
        )
        return Views({"image": [low[0]], "high": [high]})

    def rules(self, where: str, section: Section) -> Settings:
        """Return the fields that the original repo's file, or that of its conversion, sets.

        Raises:
            ValueError: a value that is not implemented, or views of another size.
        """
        if "high_res_size" not in section:  # in the original repo, the towers normalise the pixels
            check_side(where, section, self.image_size)
            require_supported(where, section, {"do_normalize": False})
            colour, _ = read_stats(where, section, CLIP_MEAN, CLIP_STD)
            return {"background": colour, "min_size": self.smallest(where, section)}
        require_supported(where, section, {"resample": 2, "high_res_resample": 3, "do_pad": True})
        check_side(where, section, self.low_size)
        check_side(where, {"size": section["high_res_size"]}, self.image_size)
        high = {f"image_{name}": section.get(f"high_res_image_{name}") for name in ("mean", "std")}
        mean, std = read_stats(where, high, CLIP_MEAN, CLIP_STD)
        low_mean, low_std = read_stats(where, section, CLIP_MEAN, CLIP_STD)
        return {
            "mean": mean,
            "std": std,
            "low_mean": low_mean,
            "low_std": low_std,
            "background": mean,
            "min_size": self.smallest(where, section),
        }


@dataclass(frozen=True)
class CandidatePreprocessor(ViewPreprocessor):
    """DeepSeek-VL2: the whole image, then tiles of the candidate size that wastes least of it.

    S is 384, which is no multiple of the patches' 14 pixels. The last 6 rows and columns of a view,
    which the source's convolution leaves out, are cut off here.
    """

    image_size: int = 384
    candidates: tuple[tuple[int, int], ...] = ((384, 384),)
    """(width, height) in pixels that an image may be resized to, in multiples of a view."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read_candidates(type(self).__name__, self.candidates, self.image_size)

    @property
    def sides(self) -> dict[str, int]:
        """Return the side of all views of the only path: whole image and tiles, cut to whole
        patches."""
        return {"image": self.image_size // self.patch_size * self.patch_size}

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the whole image, then its tiles row by row."""
        side = self.image_size
        within = [
            size
            for size in self.candidates
            if max_tiles is None or size[0] * size[1] <= max_tiles * side * side
        ]
        width, height = best_candidate(image.shape[2], image.shape[1], within)
        canvas = padded(image, height, width, self.mean)
        tiles = rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=side, w=side)
        whole, patches = padded(image, side, side, self.mean), self.sides["image"]
        views = [view[:, :patches, :patches] for view in (whole, *tiles)]
        return Views({"image": views}, (width // side, height // side, True))

    def rules(self, where: str, section: Section) -> Settings:
        """Return the settings in a file: mean, std, and candidate sizes that fit the tower."""
        require_supported(where, section, {"patch_size": self.patch_size, "downsample_ratio": 2})
        sizes = section.get("candidate_resolutions")
        found = self.candidates if sizes is None else read_candidates(where, sizes, self.image_size)
        return {**super().rules(where, section), "candidates": found}


@dataclass(frozen=True)
class OcrPreprocessor(ViewPreprocessor):
    """DeepSeek-OCR: the whole image padded to a square and, if it is large, tiles of 640x640.

    An image with a side over S of a tile is resized to the grid of 2 to ``max_tiles`` tiles whose
    shape is nearest its own; a smaller image has no tiles.
    """

    base_size: int = 1024
    tile_size: int = 640
    max_tiles: int = 6
    tiled: bool = True
    keep_shape: bool = True
    """Pad the whole image to a square; otherwise it is resized to one without keeping its shape."""

    @property
    def sides(self) -> dict[str, int]:
        """Return the sides in pixels of the whole view and, if the mode has tiles, of the tiles."""
        return {"image": self.base_size} | ({"tiles": self.tile_size} if self.tiled else {})

    @property
    def has_tiles(self) -> bool:
        """Whether images are cut into tiles, which depends on the published mode."""
        return self.tiled

    @property
    def pads(self) -> bool:
        """Whether the whole image is padded to a square; some modes stretch it instead."""
        return self.keep_shape

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the view of the whole image and its tiles row by row."""
        base, side = self.base_size, self.tile_size
        if self.keep_shape:
            whole = padded(image, base, base, self.mean)
        else:
            whole = resize(image, base, base)
        most = self.max_tiles if max_tiles is None else max_tiles
        if not self.tiled or max(image.shape[1:]) <= side or most < 2:
            return Views({"image": [whole]})
        columns, rows = best_tiling(image.shape[2], image.shape[1], 2, most, side)
        check_area(columns * rows, side)
        canvas = resize(image, rows * side, columns * side)
        tiles = list(rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=side, w=side))
        return Views({"image": [whole], "tiles": tiles}, (columns, rows, True))
