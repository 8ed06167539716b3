"""Preprocessing for Nemotron: images of any size for Omni, tiles for Nano VL V2, and videos.

Source: ``NemotronH_Omni_Reasoning_V3ImageProcessor`` and ``...VideoProcessor`` of transformers
5.23.0, and for Nano VL V2 ``dynamic_preprocess`` and ``video_to_pixel_values`` of
``nano_nemotron_vl`` of vLLM 0.32.0, which are those of NVIDIA's repos.

Shapes: p side of a patch, s side of a tile in pixels.

Deliberate differences:

- Omni's processor shrinks images further if those of a call have too many tokens together for the
  language model; here each image is resized as if it were alone.
- Frames are sampled only on request (``fps=``, ``num_frames=``).
- The last frame of an odd clip of Omni is repeated here; the source's model does that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from ..data import Grid, VisionInputs
from ..inputs.clip_views import ClipViewPreprocessor
from ..inputs.patches import PatchPreprocessor
from ..inputs.pixel_rules import PixelRules, check_sizes
from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    PerChannel,
    ProcessorFiles,
    Section,
    image_section,
    read_mean_std,
    read_positive,
    require_supported,
    video_section,
)
from ..inputs.resizing import resize
from ..inputs.sizes import MOST_PIXELS, MOST_TILES, best_tiling, check_area
from ..inputs.staging import StagedItem, StagedPath
from ..inputs.views import OnePathViews, Views, patch_rows


@dataclass(frozen=True)
class NemotronPreprocessor(PatchPreprocessor):
    """Resizes images, as float32, to an even number of patches per side within bounds.

    The frames of a video are resized to about one number of patches. If several are embedded
    together, a row of ``pixel_values`` has columns for an image and others for these frames.
    """

    keeps_shape: bool = True
    """Whether frames of videos keep about their shape; otherwise they become squares."""

    @classmethod
    def nemotron(
        cls,
        patch_size: int,
        low: int = 1024,
        high: int = 13312,
        *,
        video_frames: int = 2,
        video_patches: int = 1024,
        video_keeps_shape: bool = True,
    ) -> NemotronPreprocessor:
        """Return the preprocessor of the published repos.

        Args:
            patch_size: side of a patch in pixels.
            low: fewest patches of an image.
            high: most patches of an image.
            video_frames: frames that are embedded together.
            video_patches: about the number of patches of a frame.
            video_keeps_shape: ``keeps_shape`` of the result.
        """
        area = patch_size**2
        images = PixelRules(low * area, high * area, CLIP_MEAN, CLIP_STD)
        videos = PixelRules(
            *(1, video_patches * area, CLIP_MEAN, CLIP_STD),
            sampling="nemotron",
            joined_frames=video_frames,
        )
        return cls(patch_size, 1, 1, images, videos, keeps_shape=video_keeps_shape)

    def _with_images(self, files: ProcessorFiles) -> NemotronPreprocessor:
        entry = image_section(files)
        if entry is None:
            return self
        label, section = entry
        require_supported(label, section, {"downsample_ratio": 0.5})
        check_sizes(label, section, {"patch_size": self.patch_size})
        area, own = self.patch_size**2, self.images
        low, high = (
            read_positive(label, name, section.get(name), default // area, MOST_PIXELS // area)
            for name, default in (
                ("min_num_patches", own.min_pixels),
                ("max_num_patches", own.max_pixels),
            )
        )
        high = max(low, high)
        tokens = read_positive(label, "max_model_len", section.get("max_model_len"), 16384)
        if 4 * (tokens - 4) < high:
            raise ValueError(
                f"{label}: max_model_len={tokens} is not implemented: it must hold the tokens of "
                f"max_num_patches={high}"
            )
        mean, std = _read_colours(label, section, "image", "norm")
        return replace(self, images=PixelRules(low * area, high * area, mean, std))

    def _with_videos(self, files: ProcessorFiles) -> NemotronPreprocessor:
        entry, own, area = video_section(files), self.videos, self.patch_size**2
        if entry is None:
            return self
        label, section = entry
        require_supported(label, section, {"downsample_ratio": 0.5})
        check_sizes(label, section, {"patch_size": self.patch_size})
        target = section.get("video_target_num_patches")
        default, most = own.max_pixels // area, MOST_PIXELS // area
        patches = read_positive(label, "video_target_num_patches", target, default, most)
        mean, std = _read_colours(label, section, "norm", "image")
        videos = replace(own, max_pixels=patches * area, mean=mean, std=std)
        keeps_shape = bool(section.get("video_maintain_aspect_ratio", self.keeps_shape))
        return replace(self, videos=videos, keeps_shape=keeps_shape, video_error=None)

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        area = self.patch_size**2
        low, high = rules.min_pixels // area, rules.max_pixels // area
        if rules.sampling == self.videos.sampling:
            side = max(math.isqrt(high) // 2 * 2, 2)
            grid = even_grid_near(height, width, high) if self.keeps_shape else (side, side)
            return len(frames) // rules.joined_frames, *grid
        return 1, *even_grid(height / self.patch_size, width / self.patch_size, low, high)

    def finish(
        self, items: Sequence[StagedItem], dtype: torch.dtype = torch.float32
    ) -> VisionInputs:
        """Normalise items and cut them into patches [P, columns], on the device of their pixels."""
        inputs, joined = super().finish(items, dtype), self.videos.joined_frames
        frames = inputs.pixel_values
        if joined == 1:
            return inputs
        size = frames.shape[1]
        grids = [(t, h * w) for t, h, w in inputs.grid_thw.tolist()]
        rows = frames.new_zeros(sum(t * patches for t, patches in grids), size * (1 + joined))
        source = start = 0
        for item, (t, patches) in zip(items, grids, strict=True):
            count, stop = len(item.paths["image"].pixels), start + t * patches
            of_item = frames[source : source + count * patches]
            if count == 1:  # an image
                rows[start:stop, :size] = of_item
            else:
                pairs = of_item.view(t, joined, patches, size).transpose(1, 2)
                rows[start:stop, size:].view(t, patches, joined, size).copy_(pairs)
            source, start = source + count * patches, stop
        return inputs._replace(pixel_values=rows)

    @property
    def resizes_floats(self) -> bool:
        """Return True: images are resized as float32 that is not clamped to 0 and 255."""
        return True

    def _source(self, frame: Tensor) -> Tensor:
        """Return a frame, uint8 [3, H, W], as float32."""
        return frame.to(torch.float32)


@dataclass(frozen=True)
class NemotronTilesPreprocessor(OnePathViews, ClipViewPreprocessor):
    """Resizes an image, as float32, to the grid of tiles nearest its shape, and cuts it.

    The whole image follows its tiles if they are several. A frame of a video becomes one tile. A
    row of ``pixel_values`` is a patch.
    """

    mean: PerChannel = CLIP_MEAN
    std: PerChannel = CLIP_STD
    image_size: int = 512
    max_tiles: int = 12
    use_thumbnail: bool = True
    """Whether the whole image follows its tiles."""
    sampling = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_area(self.max_tiles, self.image_size)

    @property
    def sizing(self) -> tuple[str, ...]:
        """Return the keyword of ``preprocess`` that bounds the number of tiles."""
        return ("max_tiles",)

    def with_section(self, label: str, section: Section) -> NemotronTilesPreprocessor:
        """Return a copy with the values that a processor file sets.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        require_supported(label, section, {"downsample_ratio": 0.5})
        check_sizes(label, section, {"patch_size": self.patch_size, "image_size": self.image_size})
        most = read_positive(label, "max_num_tiles", section.get("max_num_tiles"), 12, MOST_TILES)
        mean, std = _read_colours(label, section, "norm", "image")
        thumbnail = bool(section.get("use_thumbnail", self.use_thumbnail))
        return replace(self, mean=mean, std=std, max_tiles=most, use_thumbnail=thumbnail)

    def with_frames(self, label: str, section: Section) -> NemotronTilesPreprocessor:
        """Return a copy with the colours that a processor file sets for videos.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes videos.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """
        return replace(self, frames=self.with_section(label, section))

    def frame_views(self, frame: Tensor, max_tiles: int | None) -> Views:
        """Return the only view of a frame, which is stretched to a tile."""
        side = self.image_size
        return Views({"image": [resize(frame.to(torch.float32), side, side, self.resample)]})

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the tiles of an image row by row, then the whole image, float32 from 0 to 255.

        ``max_tiles`` bounds the number of tiles; None takes ``self.max_tiles``.
        """
        most, side = self.max_tiles if max_tiles is None else max_tiles, self.image_size
        columns, rows = best_tiling(image.shape[2], image.shape[1], 1, most, side)
        check_area(columns * rows, side)
        source = image.to(torch.float32)
        canvas = resize(source, rows * side, columns * side, self.resample)
        tiles = [*rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=side, w=side)]
        whole = self.use_thumbnail and len(tiles) > 1
        if whole:
            tiles.append(resize(source, side, side, self.resample))
        return Views({"image": tiles}, (columns, rows, whole))

    def rows(
        self, parts: Sequence[StagedPath], side: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the normalised patches of the tiles, [P, 3*p*p].

        Args:
            parts: the tiles of each item.
            side: not used here; the side of a view in pixels, for other families.
            dtype: the dtype of the result.
            device: the device of the result if there are no items.
        """
        return patch_rows(parts, self.patch_size, dtype, device, channels_last=False)


def even_grid_near(height: int, width: int, patches: int) -> tuple[int, int]:
    """Return the rows and columns, both even, of about ``patches`` patches of a frame's shape."""
    rows = max(round(math.sqrt(patches / (width / height))), 1)
    columns = max(round(math.sqrt(patches * (width / height))), 1)
    more = rows + rows % 2, columns + columns % 2
    if more[0] * more[1] <= patches:
        return more
    return max(rows - rows % 2, 2), max(columns - columns % 2, 2)


def _read_colours(
    label: str, section: Section, first: str, second: str
) -> tuple[PerChannel, PerChannel]:
    """Return mean and standard deviation in a processor file.

    Args:
        label: name of the section in errors.
        section: a section of a processor file.
        first: how the names begin that are read, "image" or NVIDIA's own "norm".
        second: how the names begin that are read if the section has none of the first.
    """
    colours = {
        f"image_{kind}": section.get(f"{first}_{kind}", section.get(f"{second}_{kind}"))
        for kind in ("mean", "std")
    }
    return read_mean_std(label, {**section, **colours}, CLIP_MEAN, CLIP_STD)


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
