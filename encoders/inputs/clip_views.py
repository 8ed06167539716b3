"""Preprocessing of videos for towers over views: each frame becomes a view, as an image does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..data import Limits
from .clips import read_videos
from .intake import ImagesLike, VideosLike
from .limits import check_limits
from .processor_files import ProcessorFiles, Section, video_section
from .resizing import CPU
from .sampling import SamplingRule, sample_frames
from .staging import StagedItem, to_resize
from .views import ViewPreprocessor, Views

MOST_FRAMES = 10_000
"""The largest number of frames that a processor file may name."""
Own = TypeVar("Own", bound="ClipViewPreprocessor")


@dataclass(frozen=True)
class ClipViewPreprocessor(ViewPreprocessor):
    """Turns each image, and each frame of a video, into square views."""

    sampling: ClassVar[SamplingRule]
    """The rule by which frames of a video are chosen if the user passes a number or rate."""
    max_frames: int = 768
    """The most frames that ``fps`` takes of a video, for rules that have such a bound."""
    frames: ClipViewPreprocessor | None = None
    """The rules for frames of videos; None: those of the family, by the rules for images."""
    video_error: ValueError | None = field(default=None, compare=False)
    """The error of a call with a video, if the repo's rules for videos cannot be followed."""

    @abstractmethod
    def frame_views(self, frame: Tensor, max_tiles: int | None) -> Views:
        """Return the views of one frame of a video.

        Args:
            frame: uint8 [3, H, W].
            max_tiles: the keyword of ``preprocess``, for families that cut frames into tiles.
        """

    @abstractmethod
    def with_frames(self: Own, label: str, section: Section) -> Own:
        """Return a copy of the preprocessor with what a processor file sets for videos.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes videos.

        Raises:
            ValueError: a value that is not implemented, or that disagrees with the tower.
        """

    def with_files(
        self: Own, files: ProcessorFiles, error: Callable[[str], ValueError] = ValueError
    ) -> Own:
        """Return a copy of the preprocessor with the defaults of a repo's processor files.

        Args:
            files: parsed JSON per file name without ``.json``.
            error: makes the exception for a bad value from its message.

        Raises:
            ValueError: a value for images that is not implemented, or that disagrees with the
                tower. For a bad value for videos, the first call with a video raises it.
        """
        images, entry = super().with_files(files, error), video_section(files)
        if entry is None:
            return images
        try:
            rules = images.with_frames(*entry)
            frames = None if rules.frames == images else rules.frames
            return replace(rules, frames=frames, video_error=None)
        except ValueError as bad:
            return replace(images, video_error=error(str(bad)))

    def without_videos(self: Own, error: ValueError) -> Own:
        """Return a copy of the preprocessor that raises ``error`` when it is given videos."""
        return replace(self, video_error=error)

    def stage(
        self, images: ImagesLike, videos: VideosLike, limits: Limits, device: torch.device = CPU
    ) -> list[StagedItem]:
        """Decode images and videos, and make their views; see :class:`StagedPreprocessor`."""
        check_limits(limits)
        items = super().stage(images, (), limits._replace(fps=None, num_frames=None), device)
        choose = partial(
            sample_frames,
            rule=self.sampling,
            fps=limits.fps,
            num_frames=limits.num_frames,
            max_frames=self.max_frames,
        )
        rules = self.frames or self
        for clip in read_videos(videos, choose, self.video_error):
            views = [
                rules.frame_views(to_resize(frame, device), limits.max_tiles) for frame in clip
            ]
            items.append(rules._staged(_joined(views), device))
        return items


def _joined(frames: Sequence[Views]) -> Views:
    """Return the views of all frames of a clip, which have one size, as those of one item."""
    paths = {
        name: [view for frame in frames for view in frame.paths[name]] for name in frames[0].paths
    }
    return frames[0]._replace(paths=paths)
