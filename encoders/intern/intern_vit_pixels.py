"""Preprocessing for InternViT: images are cut into square tiles, a frame of a video is one tile.

Source: ``GotOcr2ImageProcessor``, ``InternVLVideoProcessor`` and ``InternVLProcessor`` of
transformers 5.23.0; tiling also ``dynamic_preprocess`` of OpenGVLab/InternVL at commit 1831ceb.

Shapes: s side of a tile in pixels.

Deliberate differences:

- Frames are sampled only on request (``fps=``, ``num_frames=``); ``do_sample_frames``, ``fps`` and
  ``num_frames`` in a repo's files are not read.
- The keyword ``max_tiles`` turns tiling on where a checkpoint has it off.
- Images of OpenGVLab's own repos are resized by torch's filter, as by transformers' class. These
  repos have no processor that cuts images; the code on their pages takes Pillow's filter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypedDict

import torch
from einops import rearrange
from torch import Tensor

from ..data import Grid, Limits, Tiling, VisionInputs
from ..inputs.clips import read_videos
from ..inputs.intake import ImagesLike, VideosLike, read_images
from ..inputs.limits import check_limits
from ..inputs.normalizing import channels_first, finish_path
from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PerChannel,
    ProcessorFiles,
    Section,
    image_section,
    read_mean_std,
    read_positive,
    require_supported,
    video_section,
)
from ..inputs.resizing import CPU, resize
from ..inputs.sampling import sample_frames
from ..inputs.sizes import MOST_TILES, best_tiling, check_area
from ..inputs.staging import (
    StagedItem,
    StagedPath,
    StagedPreprocessor,
    grid_tensor,
    stack_frames,
    to_resize,
)


class _ImageRules(TypedDict, total=False):
    """The fields of ``TilePreprocessor`` (InternVL) that processor files set for images."""

    mean: PerChannel
    std: PerChannel
    dynamic: bool
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool


class _VideoRules(TypedDict, total=False):
    """The fields of ``TilePreprocessor`` (InternVL) that processor files set for videos."""

    video_mean: PerChannel
    video_std: PerChannel
    initial_shift: bool | float


@dataclass(frozen=True)
class TilePreprocessor(StagedPreprocessor):
    """Resizes an image to the grid of s x s tiles nearest its shape, and appends a thumbnail.

    Each frame of a video becomes one tile.
    """

    image_size: int = 448
    patch_size: int = 14
    min_tiles: int = 1
    max_tiles: int = 12
    use_thumbnail: bool = True
    """Whether the whole image is appended as one more tile, unless it is a single tile anyway."""
    dynamic: bool = True
    """Whether images are cut into tiles; otherwise each image is resized to one tile."""
    mean: PerChannel = IMAGENET_MEAN
    std: PerChannel = IMAGENET_STD
    video_mean: PerChannel | None = None
    """The mean of the pixels of videos; None: the same as of images."""
    video_std: PerChannel | None = None
    """The standard deviation of the pixels of videos; None: the same as of images."""
    initial_shift: bool | float = True
    """Where sampling of frames starts: True is half a step into the video, a number is the index of
    a frame, from 0."""
    video_error: ValueError | None = field(default=None, compare=False)
    """The error of a call with a video, if the repo's rules for videos cannot be followed."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_tiles <= self.max_tiles <= MOST_TILES:
            raise ValueError(
                f"min_tiles={self.min_tiles}, max_tiles={self.max_tiles}: must be from 1 to "
                f"{MOST_TILES}, and min_tiles at most max_tiles"
            )
        check_area(self.max_tiles if self.dynamic else 1, self.image_size)

    def with_files(
        self, files: ProcessorFiles, error: Callable[[str], ValueError] = ValueError
    ) -> TilePreprocessor:
        """Return a copy of the preprocessor with the defaults of a repo's processor files.

        The files of -hf repos (GotOcr2ImageProcessor, InternVLVideoProcessor) describe all steps.
        From the file of a repo with code of its own (CLIPFeatureExtractor) only mean and std are
        read, because such a repo describes tiling in config.json.

        Args:
            files: parsed JSON per file name without ``.json``: ``"processor_config"``,
                ``"preprocessor_config"``, ``"video_preprocessor_config"``, those that the repo has.
            error: makes the exception for a bad value from its message.

        Raises:
            ValueError: a value for images that is not implemented, or that disagrees with the
                tower. For a bad value for videos, the first call with a video raises it.
        """
        try:
            rules = _image_rules(files, self.image_size, self.mean, self.std)
            images = replace(self, **rules, video_error=None)
        except ValueError as bad:
            raise error(str(bad)) from bad
        try:
            return replace(images, **_video_rules(files, self.image_size, self.mean, self.std))
        except ValueError as bad:
            return replace(images, video_error=error(str(bad)))

    def without_videos(self, error: ValueError) -> TilePreprocessor:
        """Return a copy of the preprocessor that raises ``error`` when it is given videos."""
        return replace(self, video_error=error)

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the defaults that no file sets, and the keyword that changes some of them."""
        colours = f"mean={self.mean}, std={self.std}"
        if "max_dynamic_patch" in config:  # the configs of chat repos say how images are tiled
            return colours, ""
        return f"image_size={self.image_size}, max_tiles={self.max_tiles}, {colours}", "max_tiles"

    def stage(
        self, images: ImagesLike, videos: VideosLike, limits: Limits, device: torch.device = CPU
    ) -> list[StagedItem]:
        """Decode images and videos, and cut them into tiles; see :class:`StagedPreprocessor`."""
        items, size = [], self.image_size
        for frames, tiling, *mean_std in self._read(images, videos, limits):
            tiles = [
                tile for frame in frames for tile in _cut(to_resize(frame, device), tiling, size)
            ]
            grid, pixels = self._grid(len(tiles)), stack_frames(tiles, device)
            items.append(StagedItem({"image": StagedPath(pixels, grid, *mean_std)}, tiling))
        return items

    def finish(
        self, items: Sequence[StagedItem], dtype: torch.dtype = torch.float32
    ) -> VisionInputs:
        """Normalise the tiles of items, [n, 3, s, s], on the device of their pixels."""
        parts, size = [item.paths["image"] for item in items], self.image_size
        pixels = finish_path(parts, channels_first, 1, (3, size, size), dtype)
        tilings = [item.tiles for item in items if item.tiles is not None]
        return VisionInputs(pixels, grid_tensor([part.grid for part in parts]), tilings)

    def _read(
        self,
        images: ImagesLike,
        videos: VideosLike,
        limits: Limits,
    ) -> list[tuple[list[Tensor], Tiling, PerChannel, PerChannel]]:
        """Return the frames uint8 [3, H, W], the tiling, the mean and the std of each item."""
        for name in ("min_pixels", "max_pixels", "max_soft_tokens"):
            if (value := limits._asdict()[name]) is not None:
                raise ValueError(
                    f"{name}={value}: InternViT resizes to tiles of {self.image_size}x"
                    f"{self.image_size} pixels; bound their number with max_tiles"
                )
        check_limits(limits)
        stills = read_images(images)
        choose = partial(
            sample_frames,
            rule="internvl",
            fps=limits.fps,
            num_frames=limits.num_frames,
            initial_shift=self.initial_shift,
        )
        clips = read_videos(videos, choose, self.video_error)
        mean_std = self.video_mean or self.mean, self.video_std or self.std
        return [
            *(
                ([image], self._tiling(image, limits.max_tiles), self.mean, self.std)
                for image in stills
            ),
            *((clip, (1, 1, False), *mean_std) for clip in clips),
        ]

    def _grid(self, count: int) -> Grid:
        side = self.image_size // self.patch_size
        return count, side, side

    def _tiling(self, image: Tensor, max_tiles: int | None) -> Tiling:
        if not self.dynamic and max_tiles is None:
            return 1, 1, False
        tile_limit = self.max_tiles if max_tiles is None else max_tiles
        height, width = image.shape[1:]
        columns, rows = best_tiling(width, height, self.min_tiles, tile_limit, self.image_size)
        check_area(columns * rows, self.image_size)
        return columns, rows, self.use_thumbnail and columns * rows > 1


def _cut(image: Tensor, tiling: Tiling, size: int) -> list[Tensor]:
    """Resize an image and cut it into tiles."""
    columns, rows, thumbnail = tiling
    canvas = resize(image, rows * size, columns * size)
    grid = rearrange(canvas, "c (r h) (q w) -> r q c h w", r=rows, q=columns)
    tiles = [grid[row, column] for row in range(rows) for column in range(columns)]
    return [*tiles, resize(image, size, size)] if thumbnail else tiles


def _image_rules(
    files: ProcessorFiles, image_size: int, mean: PerChannel, std: PerChannel
) -> _ImageRules:
    """Return the fields of ``TilePreprocessor`` that the files of an InternVL repo set for images.

    Args:
        files: parsed JSON per file name without ``.json``.
        image_size: side of the tower's tiles in pixels, which the files may not contradict.
        mean: mean of each channel if the files have none.
        std: standard deviation of each channel if the files have none.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    entry = image_section(files)
    if entry is None:
        return {}
    label, section = entry
    # A repo with code of its own describes tiling in its config.json.
    if not _describes_tiles(section):
        mean, std = read_mean_std(label, section, mean, std)
        return {"mean": mean, "std": std}
    _check_converted(label, section, image_size)
    mean, std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
    outer = files.get("processor_config", {}).get("processor_class")
    # InternVLProcessor cuts images into tiles even if the section of its image processor says
    # crop_to_patches=false, as published -hf repos do.
    tiled = "InternVLProcessor" in (section.get("processor_class"), outer)
    return {
        "mean": mean,
        "std": std,
        "dynamic": tiled or bool(section.get("crop_to_patches")),
        "min_tiles": read_positive(label, "min_patches", section.get("min_patches"), 1, MOST_TILES),
        "max_tiles": read_positive(
            label, "max_patches", section.get("max_patches"), 12, MOST_TILES
        ),
        "use_thumbnail": True,
    }


def _video_rules(
    files: ProcessorFiles, image_size: int, mean: PerChannel, std: PerChannel
) -> _VideoRules:
    """Return the fields of ``TilePreprocessor`` that the files of an InternVL repo set for videos.

    Arguments and errors are those of :func:`_image_rules`.
    """
    entry = video_section(files)
    if entry is None:
        return {}
    label, section = entry
    if section.get("video_processor_type") or _describes_tiles(section):
        mean, std = CLIP_MEAN, CLIP_STD  # the defaults of the class that the section names
        _check_converted(label, section, image_size)
        require_supported(label, section, {"do_center_crop": False})
    mean, std = read_mean_std(label, section, mean, std)
    shift = True if section.get("initial_shift") is None else section["initial_shift"]
    if not isinstance(shift, int | float) or not 0 <= shift < 1e9:
        raise ValueError(
            f"{label}: initial_shift={shift!r} must be true, false or the number of a frame"
        )
    return {"video_mean": mean, "video_std": std, "initial_shift": shift}


def _describes_tiles(section: Section) -> bool:
    class_name = str(section.get("image_processor_type") or "")
    return class_name.startswith("GotOcr2ImageProcessor") or "crop_to_patches" in section


def _check_converted(label: str, section: Section, image_size: int) -> None:
    require_supported(label, section)
    # 384x384 is the default of GotOcr2ImageProcessor in transformers.
    size = section.get("size") or {"height": 384, "width": 384}
    if size != {"height": image_size, "width": image_size}:
        raise ValueError(
            f"{label}: size={size} but the tower takes tiles of {image_size}x{image_size}: use the "
            "processor files of the checkpoint's own repo"
        )
