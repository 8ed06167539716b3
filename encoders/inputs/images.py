"""Images and videos to ``pixel_values``: all preprocessing of InternViT and of the Qwen towers.

The same numbers as transformers 5.23's torchvision-backed processors on the CPU: images are resized
as uint8 (``F.interpolate``, bicubic, antialiased, which is what torchvision runs), then normalised
in float32 with the rescale folded into mean and std. Neither library is needed.

Source: ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor``, ``Qwen3VLVideoProcessor``,
``GotOcr2ImageProcessor``, ``InternVLVideoProcessor`` and ``InternVLProcessor`` of transformers
5.23.0; tiling also ``dynamic_preprocess`` of OpenGVLab/InternVL.

Shapes: T frames a patch, p patch size, m merge size, S tile size.

Deliberate differences:

- Frames are sampled only on request (``fps=``, ``num_frames=``); ``do_sample_frames``, ``fps`` and
  ``num_frames`` in a repo's files are not read.
- A one-frame video is a pair of equal frames also for Qwen3-VL, where transformers raises.
- ``max_tiles`` turns tiling on where a checkpoint has it off.
- Results are written into one array as they are made, in strips that stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import index
from typing import Any, Protocol, SupportsIndex

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..contract import Grid, VisionInputs
from .intake import ChooseFrames, Video, naming, read_images, read_videos, to_rgb
from .sizes import MOST_TILES, SamplingRule, best_tiling, is_rate, sample_frames
from .sizes import smart_resize, smart_resize_video
from .processor_files import IMAGENET_MEAN, IMAGENET_STD, QWEN2_IMAGES, QWEN2_VIDEOS, Stats
from .processor_files import QWEN3_PUBLISHED_IMAGES, QWEN3_PUBLISHED_VIDEOS
from .processor_files import PixelRules, ProcessorFiles, patch_rules, tile_rules

__all__ = [
    "PatchPreprocessor",
    "PixelRules",
    "Preprocessor",
    "TilePreprocessor",
    "Video",
    "best_tiling",
    "resize",
    "sample_frames",
    "smart_resize",
    "smart_resize_video",
    "to_rgb",
]

_STRIP = 1 << 16
"""Pixels normalised at a time: 768 KiB of float32, which stays in the second-level cache."""


class Preprocessor(Protocol):
    """What an encoder asks of its preprocessing."""

    def __call__(
        self,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VisionInputs:
        """Pixels and grid of images, then videos; see ``VisionEncoder.preprocess``."""
        ...

    def with_files(self, files: ProcessorFiles) -> Preprocessor:
        """A copy with the defaults of a repo's processor files."""
        ...


@dataclass(frozen=True)
class PatchPreprocessor:
    """Qwen towers: resized to multiples of p*m within a budget of pixels, cut into patches.

    Rows of ``pixel_values`` run in merge-block order (see ``grids.raster_maps``); inside a row the
    order is channel, frame, row, column.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    images: PixelRules
    videos: PixelRules

    @classmethod
    def qwen2_vl(
        cls, *, patch_size: int, temporal_patch_size: int, merge_size: int
    ) -> PatchPreprocessor:
        """Qwen2-VL and Qwen2.5-VL: transformers' class defaults, a budget a frame for videos."""
        return cls(patch_size, temporal_patch_size, merge_size, QWEN2_IMAGES, QWEN2_VIDEOS)

    @classmethod
    def qwen3_vl(
        cls, *, patch_size: int, temporal_patch_size: int, merge_size: int
    ) -> PatchPreprocessor:
        """Qwen3-VL, 3.5 and 3.6: the values published with them, one budget for a whole video."""
        images, videos = QWEN3_PUBLISHED_IMAGES, QWEN3_PUBLISHED_VIDEOS
        return cls(patch_size, temporal_patch_size, merge_size, images, videos)

    def with_files(self, files: ProcessorFiles) -> PatchPreprocessor:
        """A copy with the defaults of a repo's processor files.

        Args:
            files: parsed JSON by ``"processor_config"``, ``"preprocessor_config"``,
                ``"video_preprocessor_config"``, whichever the repo has.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        sizes = {
            "patch_size": self.patch_size,
            "temporal_patch_size": self.temporal_patch_size,
            "merge_size": self.merge_size,
        }
        images, videos = patch_rules(files, self.images, self.videos, sizes)
        return replace(self, images=images, videos=videos)

    def __call__(
        self,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VisionInputs:
        """Patches [P, 3*T*p*p] of images, then videos; see ``VisionEncoder.preprocess``."""
        if max_tiles is not None:
            raise ValueError(
                f"max_tiles={max_tiles}: a Qwen tower has no tiles; bound the size with max_pixels"
            )
        _check_keywords(fps, min_pixels=min_pixels, max_pixels=max_pixels, num_frames=num_frames)
        choose = _chooser(
            "qwen3_vl" if self.videos.whole_clip else "qwen2_vl",
            fps,
            num_frames,
            min_frames=self.videos.min_frames,
            max_frames=self.videos.max_frames,
            temporal_patch_size=self.temporal_patch_size,
        )
        stills = [[image] for image in read_images(images)]
        clips = read_videos(videos, choose)
        items: list[tuple[list[Tensor], PixelRules, Grid]] = []
        for kind, frame_lists, own in (
            ("image", stills, self.images),
            ("video", clips, self.videos),
        ):
            rules = own.bounded(min_pixels, max_pixels) if frame_lists else own
            for number, frames in enumerate(frame_lists):
                with naming(f"{kind} {number}"):
                    items.append((frames, rules, self._grid(frames, rules)))
        return self._fill(items)

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        factor, pair = self.patch_size * self.merge_size, self.temporal_patch_size
        low, high = rules.min_pixels, rules.max_pixels
        if rules.whole_clip:
            count = max(len(frames), pair)
            height, width = smart_resize_video(count, height, width, factor, low, high, pair)
        else:
            height, width = smart_resize(height, width, factor, low, high)
        return -(-len(frames) // pair), height // self.patch_size, width // self.patch_size

    def _fill(self, items: Sequence[tuple[list[Tensor], PixelRules, Grid]]) -> VisionInputs:
        grids = [grid for _, _, grid in items]
        p, m, pair = self.patch_size, self.merge_size, self.temporal_patch_size
        counts = [math.prod(grid) for grid in grids]
        pixel_values = torch.empty(sum(counts), 3 * pair * p * p, dtype=torch.float32, device="cpu")
        for rows, (frames, rules, (t, h, w)) in zip(pixel_values.split(counts), items, strict=True):
            self._write(frames, rules, rows.view(t, h // m, w // m, m, m, 3, pair, p, p))
        return VisionInputs(pixel_values, _grid_tensor(grids))

    def _write(self, frames: Sequence[Tensor], rules: PixelRules, out: Tensor) -> None:
        """Resize, normalise and cut one item into ``out`` [t, rows, columns, m, m, 3, T, p, p]."""
        rows, columns, pair = out.shape[1], out.shape[2], out.shape[6]
        side = self.patch_size * self.merge_size
        strip = max(1, _STRIP // (columns * side**2))
        mean, std = _folded(rules.mean, rules.std)
        for step, target in enumerate(out):
            group = [
                resize(frame, rows * side, columns * side)
                for frame in frames[step * pair : (step + 1) * pair]
            ]
            if len(group) > 1:  # one frame is repeated by broadcasting
                group += group[-1:] * (pair - len(group))
            for row in range(0, rows, strip):
                cut = slice(row * side, (row + strip) * side)
                pixels = torch.stack([frame[:, cut] for frame in group]).to(torch.float32)
                patches = rearrange(
                    pixels.sub_(mean).div_(std),
                    "f c (r a p) (s b q) -> r s a b c f p q",
                    a=self.merge_size, b=self.merge_size, p=self.patch_size, q=self.patch_size,
                )  # fmt: skip
                part = target[row : row + strip]
                part.copy_(patches.expand_as(part))


@dataclass(frozen=True)
class TilePreprocessor:
    """InternViT: the whole image resized to a grid of SxS tiles nearest its shape, and a thumbnail.

    A video's frames are one tile each.
    """

    image_size: int = 448
    patch_size: int = 14
    min_tiles: int = 1
    max_tiles: int = 12
    use_thumbnail: bool = True
    """Append the whole image as one more tile, unless it is a single tile anyway."""
    dynamic: bool = True
    """Tile images; otherwise each is squeezed into one tile."""
    mean: Stats = IMAGENET_MEAN
    std: Stats = IMAGENET_STD
    video_mean: Stats | None = None
    """Of videos where they differ from images."""
    video_std: Stats | None = None
    initial_shift: bool | float = True
    """Where sampling starts: True is half a step into the video, a number is a frame."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_tiles <= self.max_tiles <= MOST_TILES:
            raise ValueError(
                f"min_tiles={self.min_tiles}, max_tiles={self.max_tiles}: must be from 1 to "
                f"{MOST_TILES}, the least not over the most"
            )

    def with_files(self, files: ProcessorFiles) -> TilePreprocessor:
        """A copy with the defaults of a repo's processor files.

        The files of -hf repos (GotOcr2ImageProcessor, InternVLVideoProcessor) describe all of it;
        of a remote-code repo's CLIPFeatureExtractor only mean and std count, as its tiling is in
        config.json.

        Args:
            files: parsed JSON by ``"processor_config"``, ``"preprocessor_config"``,
                ``"video_preprocessor_config"``, whichever the repo has.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        return replace(self, **tile_rules(files, self.image_size, self.mean, self.std))

    def __call__(
        self,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VisionInputs:
        """Tiles [n, 3, S, S] of images, then videos; see ``VisionEncoder.preprocess``."""
        for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
            if value is not None:
                raise ValueError(
                    f"{name}={value}: InternViT resizes to tiles of {self.image_size}x"
                    f"{self.image_size} pixels; bound their number with max_tiles"
                )
        _check_keywords(fps, max_tiles=max_tiles, num_frames=num_frames)
        stills = read_images(images)
        choose = _chooser("internvl", fps, num_frames, initial_shift=self.initial_shift)
        clips = read_videos(videos, choose)
        tiles = [self._tiling(image, max_tiles) for image in stills]
        counts = [c * r + thumbnail for c, r, thumbnail in tiles] + [len(clip) for clip in clips]
        size = self.image_size
        pixel_values = torch.empty(sum(counts), 3, size, size, dtype=torch.float32, device="cpu")
        parts = pixel_values.split(counts)
        stats = _folded(self.mean, self.std)
        for image, tiling, out in zip(stills, tiles, parts[: len(stills)], strict=True):
            _write_tiles(image, tiling, out, *stats)
        stats = _folded(self.video_mean or self.mean, self.video_std or self.std)
        for clip, out in zip(clips, parts[len(stills) :], strict=True):
            for frame, tile in zip(clip, out, strict=True):
                _write_tiles(frame, (1, 1, False), tile[None], *stats)
        side = size // self.patch_size
        grids = _grid_tensor([(n, side, side) for n in counts])
        return VisionInputs(pixel_values, grids, tiles + [(1, 1, False)] * len(clips))

    def _tiling(self, image: Tensor, max_tiles: int | None) -> tuple[int, int, bool]:
        if not self.dynamic and max_tiles is None:
            return 1, 1, False
        most = self.max_tiles if max_tiles is None else max_tiles
        height, width = image.shape[1:]
        columns, rows = best_tiling(width, height, self.min_tiles, most, self.image_size)
        return columns, rows, self.use_thumbnail and columns * rows > 1


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """Resize a uint8 image [C, H, W] to [C, height, width] as torchvision does (bicubic)."""
    if image.shape[1:] == (height, width):
        return image
    # Memory laid out [H, W, C], with a batch stride that shows it, takes interpolate's fast path;
    # 640x427 to 640x416: 0.14 ms, and 0.40 with the planes interleaved here, against 0.80.
    if image.stride(0) != 1:
        image = torch.stack(image.unbind(), dim=-1).permute(2, 0, 1)
    batch = image.as_strided((1, *image.shape), (image.numel(), *image.stride()))
    return F.interpolate(
        batch, size=(height, width), mode="bicubic", antialias=True, align_corners=False
    )[0]


def _write_tiles(
    image: Tensor, tiling: tuple[int, int, bool], out: Tensor, mean: Tensor, std: Tensor
) -> None:
    """Resize, cut row by row and normalise one image into ``out`` [tiles, 3, S, S]."""
    columns, rows, thumbnail = tiling
    size = out.shape[-1]
    whole = resize(image, rows * size, columns * size)
    cut = rearrange(whole, "c (r h) (q w) -> r q c h w", r=rows, q=columns)
    tiles = [cut[row, column] for row in range(rows) for column in range(columns)]
    if thumbnail:
        tiles.append(resize(image, size, size))
    for tile, target in zip(tiles, out, strict=True):
        target.copy_(tile).sub_(mean).div_(std)


@lru_cache(maxsize=16)
def _folded(mean: Stats, std: Stats) -> tuple[Tensor, Tensor]:
    """Mean and std [3, 1, 1] with the rescale by 1/255 folded in, so that they apply to 0..255."""
    stats = torch.tensor((mean, std), dtype=torch.float32, device="cpu") * 255.0
    return stats[0].view(3, 1, 1), stats[1].view(3, 1, 1)


def _grid_tensor(grids: Sequence[Grid]) -> Tensor:
    return torch.tensor(grids, dtype=torch.int64, device="cpu").view(-1, 3)


def _chooser(
    rule: SamplingRule,
    fps: float | None,
    num_frames: int | None,
    *,
    min_frames: int = 4,
    max_frames: int = 768,
    temporal_patch_size: int = 2,
    initial_shift: bool | float = True,
) -> ChooseFrames:
    def choose(total: int, source_fps: float | None) -> Sequence[int]:
        return sample_frames(
            total,
            rule,
            fps=fps,
            num_frames=num_frames,
            source_fps=source_fps,
            min_frames=min_frames,
            max_frames=max_frames,
            temporal_patch_size=temporal_patch_size,
            initial_shift=initial_shift,
        )

    return choose


def _check_keywords(fps: float | None = None, **counts: object) -> None:
    for name, value in counts.items():
        if value is not None and (not isinstance(value, SupportsIndex) or index(value) < 1):
            raise ValueError(f"{name}={value}: must be a positive integer")
    if fps is not None and not is_rate(fps):
        raise ValueError(f"fps={fps}: must be a positive number of frames a second")
