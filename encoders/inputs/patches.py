"""Preprocessing for towers over patches of images of any size: Qwen, GLM, ERNIE and Pixtral.

Source: ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor``, ``Qwen3VLVideoProcessor``, and the
image and video processors of GLM-4.1V, GLM-4.6V, GLM-5, MiniMax-M3 and ERNIE-4.5-VL, and
``PixtralImageProcessor`` of transformers 5.23.0.

Shapes: F frames per patch, p patch size, m merge size, P patches.

Deliberate differences:

- Frames are sampled only on request (``fps=``, ``num_frames=``); ``do_sample_frames``, ``fps`` and
  ``num_frames`` in a repo's files are not read.
- No times are drawn on frames, as ERNIE's processor does unless ``draw_on_frames`` is false.
- A video of one frame is encoded as a pair of equal frames for Qwen3-VL and GLM too, where
  transformers raises.
- A clip of MiniMax-M3 is resized as its video processor does by itself; the processor around it
  switches that off, and fails on frames that are not whole tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..data import Grid, Limits, VisionInputs
from .clips import IMAGES_ALONE, read_videos, refuse_sampling
from .image_files import prefix_errors
from .intake import ImagesLike, VideosLike, read_images
from .limits import check_limits
from .normalizing import finish_path
from .pixel_rules import (
    PATCH_RULES,
    PatchRule,
    PixelRules,
    long_side,
    long_side_rules,
    patch_image_rules,
    patch_video_rules,
)
from .processor_files import ProcessorFiles, Resample
from .resizing import CPU, ResizePlan, resize_planned
from .sampling import sample_frames
from .sizes import (
    canvas_size,
    content_size,
    long_side_resize,
    smart_resize,
    smart_resize_video,
)
from .staging import (
    PlannedImage,
    StagedItem,
    StagedPath,
    StagedPreprocessor,
    grid_tensor,
    stack_frames,
    to_resize,
)

Own = TypeVar("Own", bound="PatchPreprocessor")


@dataclass(frozen=True)
class PatchPreprocessor(StagedPreprocessor):
    """Resizes images to whole tokens within bounds on the area, and cuts them into patches.

    Rows of ``pixel_values`` lie in merge-block order (drawn at ``raster_maps`` in
    ``encoders.base.raster``) or, with a ``token_size``, row by row of the image. The axes of one
    row are channel, frame, row, column; with ``channels_last`` they are frame, row, column,
    channel.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    images: PixelRules
    videos: PixelRules
    video_error: ValueError | None = field(default=None, compare=False)
    """The error of a call with a video, if the repo's rules for videos cannot be followed."""
    resample: Resample = "bicubic"
    """The kind of resampling when images are resized: "bicubic" or "bilinear"."""
    channels_last: bool = False
    """Whether the channels of a pixel are next to each other in a flattened patch."""
    images_alone: bool = False
    """Whether the tower takes no videos."""
    token_size: int = 0
    """Side of a token in patches where patches lie row by row; 0: in merge-block order."""
    refusals: ClassVar[Mapping[str, str]] = {
        "max_tiles": "this tower has no tiles; bound the size with max_pixels",
        "max_soft_tokens": "this family has no fixed numbers of tokens; bound the size with "
        "max_pixels",
    }
    """The keywords of ``preprocess`` that mean nothing here -> what to do instead."""

    @classmethod
    def published(
        cls, rule: PatchRule, patch_size: int, merge_size: int, temporal_patch_size: int = 1
    ) -> PatchPreprocessor:
        """Return a preprocessor with the published rules of a family, ``PATCH_RULES[rule]``.

        Args:
            rule: the name of the family.
            patch_size: side of a patch in pixels.
            merge_size: side of a token in patches.
            temporal_patch_size: frames of a patch.
        """
        return cls(patch_size, temporal_patch_size, merge_size, *PATCH_RULES[rule])

    @classmethod
    def row_by_row(cls: type[Own], rule: PatchRule, patch_size: int, token_size: int) -> Own:
        """Return a preprocessor of images for a tower that reads patches row by row.

        Args:
            rule: the name of the family in ``PATCH_RULES``.
            patch_size: side of a patch in pixels.
            token_size: side of a token in patches.
        """
        rules = PATCH_RULES[rule]
        return cls(patch_size, 1, 1, *rules, images_alone=True, token_size=token_size)

    @classmethod
    def pixtral(cls, *, patch_size: int, merge_size: int, longest_edge: int) -> PatchPreprocessor:
        """Return a preprocessor of images with the defaults of transformers' Pixtral processor."""
        rules = long_side(longest_edge)
        return cls(patch_size, 1, merge_size, rules, rules, images_alone=True)

    def with_files(
        self: Own, files: ProcessorFiles, error: Callable[[str], ValueError] = ValueError
    ) -> Own:
        """Return a copy of the preprocessor with the defaults of a repo's processor files.

        Args:
            files: parsed JSON per file name without ``.json``: ``"processor_config"``,
                ``"preprocessor_config"``, ``"video_preprocessor_config"``, those that the repo has.
            error: makes the exception for a bad value from its message.

        Raises:
            ValueError: a value for images that is not implemented, or that disagrees with the
                tower. For a bad value for videos, the first call with a video raises it.
        """
        try:
            images = self._with_images(files)
        except ValueError as bad:
            raise error(str(bad)) from bad
        try:
            return images._with_videos(files)
        except ValueError as bad:
            return replace(images, video_error=error(str(bad)))

    def _with_images(self: Own, files: ProcessorFiles) -> Own:
        """Return a copy with the values that processor files set for images."""
        read_rules = long_side_rules if self.images.longest_edge else patch_image_rules
        return replace(self, images=read_rules(files, self.images, self._sizes))

    def _with_videos(self: Own, files: ProcessorFiles) -> Own:
        """Return a copy with the values that processor files set for videos."""
        if self.images_alone:
            return self
        return replace(
            self, videos=patch_video_rules(files, self.videos, self._sizes), video_error=None
        )

    @property
    def _sizes(self) -> dict[str, int]:
        """The sizes of the tower, under the keys that they have in processor files."""
        return {
            "patch_size": self.patch_size,
            "temporal_patch_size": self.temporal_patch_size,
            "merge_size": self.token_size or self.merge_size,
        }

    def without_videos(self: Own, error: ValueError) -> Own:
        """Return a copy of the preprocessor that raises ``error`` when it is given videos."""
        return replace(self, video_error=error)

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the defaults without processor files, and the keyword that changes one of them."""
        rules = self.images
        min_text = f"min_pixels={rules.min_pixels}, " if rules.min_pixels > 1 else ""
        values = f"{min_text}max_pixels={rules.max_pixels}, mean={rules.mean}, std={rules.std}"
        return values, "max_pixels"

    def stage(
        self, images: ImagesLike, videos: VideosLike, limits: Limits, device: torch.device = CPU
    ) -> list[StagedItem]:
        """Decode and resize images, then videos; see :class:`StagedPreprocessor`."""
        items = self._read(images, videos, limits)
        plans = [
            (frame, self._plan(frame, rules, grid, len(frames)))
            for frames, rules, grid in items
            for frame in frames
        ]
        resized = resize_planned(plans, lambda frame: self._source(to_resize(frame, device)))
        staged = []
        for frames, rules, grid in items:
            pixels = stack_frames(list(islice(resized, len(frames))), device)
            staged.append(StagedItem({"image": StagedPath(pixels, grid, rules.mean, rules.std)}))
        return staged

    def plan(self, image: Tensor, limits: Limits) -> PlannedImage:
        """Return how an image is resized; see :class:`StagedPreprocessor`."""
        rules = self._image_rules(limits)
        grid = self._grid([image], rules)
        plan = self._plan(image, rules, grid, 1)
        size, source = (image.shape[1], image.shape[2]), self._source
        return PlannedImage(
            *(size, plan, grid, rules.mean, rules.std),
            source=source if self.resizes_floats else None,
        )

    def _image_rules(self, limits: Limits) -> PixelRules:
        """Return the rules of images within the bounds of a call."""
        return self.images.bounded(limits.min_pixels, limits.max_pixels)

    def finish(
        self, items: Sequence[StagedItem], dtype: torch.dtype = torch.float32
    ) -> VisionInputs:
        """Normalise items and cut them into patches [P, 3*F*p*p], on the device of their pixels."""
        parts = [item.paths["image"] for item in items]
        width = 3 * self.temporal_patch_size * self.patch_size**2
        rows = finish_path(parts, self._cut, 2 if self.channels_last else 1, (width,), dtype)
        return VisionInputs(rows, grid_tensor([part.grid for part in parts]))

    def _cut(self, frames: Tensor) -> Tensor:
        """Cut items [n, f, H, W, 3] into patches [P, 3, F*p*p] or, channels last, [P, F*p*p, 3]."""
        return cut_frames(
            frames,
            self.patch_size,
            self.merge_size,
            self.temporal_patch_size,
            channels_last=self.channels_last,
        )

    def _read(
        self,
        images: ImagesLike,
        videos: VideosLike,
        limits: Limits,
    ) -> list[tuple[list[Tensor], PixelRules, Grid]]:
        """Return for each item its frames, uint8 [3, H, W], pixel rules and grid (t, h, w)."""
        for name, fix in self.refusals.items():
            if (value := limits._asdict()[name]) is not None:
                raise ValueError(f"{name}={value}: {fix}")
        check_limits(limits)
        if self.images_alone:
            refuse_sampling(limits)
        choose = partial(
            sample_frames,
            rule=self.videos.sampling,
            fps=limits.fps,
            num_frames=limits.num_frames,
            min_frames=self.videos.min_frames,
            max_frames=self.videos.max_frames,
            max_duration=self.videos.max_duration,
            temporal_patch_size=self.temporal_patch_size * self.videos.joined_frames,
        )
        stills = [[image] for image in read_images(images)]
        video_error = ValueError(IMAGES_ALONE) if self.images_alone else None
        clips = read_videos(videos, choose, self.video_error or video_error)
        items: list[tuple[list[Tensor], PixelRules, Grid]] = []
        for kind, frame_lists, defaults in (
            ("image", stills, self.images),
            ("video", clips, self.videos),
        ):
            rules = (
                defaults.bounded(limits.min_pixels, limits.max_pixels) if frame_lists else defaults
            )
            for number, frames in enumerate(frame_lists):
                with prefix_errors(f"{kind} {number}"):
                    items.append((frames, rules, self._grid(frames, rules)))
        return items

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        side, pair = self.token_size or self.merge_size, self.temporal_patch_size
        factor = self.patch_size * side
        low, high = rules.min_pixels, rules.max_pixels
        if rules.longest_edge:
            height, width = long_side_resize(height, width, factor, rules.longest_edge, low, high)
        elif rules.bounds_all_frames:
            fit = canvas_size if rules.canvas else smart_resize_video
            count = max(len(frames), pair)
            height, width = fit(count, height, width, factor, low, high, pair)
        else:
            height, width = smart_resize(height, width, factor, low, high)
        return -(-len(frames) // pair), height // self.patch_size, width // self.patch_size

    @property
    def resizes_floats(self) -> bool:
        """Whether images are resized as float32, not as uint8."""
        return False

    def _source(self, frame: Tensor) -> Tensor:
        """Return what is resized of a frame, uint8 [3, H, W]: the frame, or floats made of it."""
        return frame

    def _plan(self, frame: Tensor, rules: PixelRules, grid: Grid, count: int) -> ResizePlan:
        """Return how a frame of an item of ``count`` frames is resized to ``grid``.

        If ``rules.canvas`` is set, it is resized to fit a black canvas of this size.
        """
        height, width = grid[1] * self.patch_size, grid[2] * self.patch_size
        if not rules.canvas:
            return ResizePlan(height, width, self.resample)
        count = max(count, self.temporal_patch_size)
        old_height, old_width = frame.shape[1:]
        content = content_size(count, old_height, old_width, height, width, rules.min_pixels)
        return ResizePlan(*content, canvas=(height, width))


def cut_frames(
    frames: Tensor,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int = 1,
    *,
    channels_last: bool = False,
) -> Tensor:
    """Cut images, or the frames of clips, into patches, in merge-block order.

    Args:
        frames: n items of f frames, [n, f, H, W, 3] of any dtype. If f is not a multiple of F, the
            last frame of each item is repeated.
        patch_size: side of a patch in pixels, p.
        merge_size: side of a token in patches; H and W are multiples of a token's side.
        temporal_patch_size: frames of a patch, F.
        channels_last: whether the channels of a pixel are next to each other in a patch.

    Returns:
        [P, 3, F*p*p], or [P, F*p*p, 3] with ``channels_last``, of the dtype of the frames.
    """
    count, pair = frames.shape[1], temporal_patch_size
    if count == 1:
        frames = frames.expand(-1, pair, -1, -1, -1)
    elif count % pair:
        last = frames[:, -1:].expand(-1, pair - count % pair, -1, -1, -1)
        frames = torch.cat((frames, last), dim=1)
    items, count, height, width, channels = frames.shape
    size, side = patch_size, merge_size
    t, rows, columns = count // pair, height // (side * size), width // (side * size)
    # Views, because einops takes several times as long to make them.
    parts = frames.view(items, t, pair, rows, side, size, columns, side, size, channels)
    patches, pixels = items * t * rows * columns * side**2, pair * size**2
    if channels_last:
        return parts.permute(0, 1, 3, 6, 4, 7, 2, 5, 8, 9).reshape(patches, pixels, channels)
    return parts.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8).reshape(patches, channels, pixels)
