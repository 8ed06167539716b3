"""Videos that a user passes: which items are videos, and their frames as uint8 RGB tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from torch import Tensor

from ..data import Limits
from .image_files import prefix_errors
from .intake import ImageLike, Video, VideoLike, VideosLike, is_one_image, is_picture, to_rgb
from .video_files import VideoFrames

IMAGES_ALONE = "this tower takes images alone: pass the frames of a video as images"
"""The message of the error that preprocessors which take only images raise for a video."""


def refuse_sampling(limits: Limits) -> None:
    """Raise a ValueError if ``fps`` or ``num_frames`` was passed for a tower without videos."""
    for name in ("fps", "num_frames"):
        if (value := limits._asdict()[name]) is not None:
            raise ValueError(
                f"{name}={value}: this tower takes images alone, which have no frames to choose "
                "from; leave it out"
            )


class ChooseFrames(Protocol):
    """A function that chooses the frames of a video to encode."""

    def __call__(self, total: int, *, source_fps: float | None) -> Sequence[int]:
        """Return the indices, from 0, of the frames to encode.

        Args:
            total: number of frames of the video.
            source_fps: frames per second at which the video was recorded; None if unknown.
        """
        ...


def read_item(item: object) -> tuple[list[ImageLike], list[VideoLike]]:
    """Tell whether an item of a stream is an image or a clip: return ([image], []) or ([], [clip]).

    A :class:`Video`, a list of frames and an array or tensor of four dimensions are clips. A dict
    is a row of a ``datasets`` column: {"bytes", "path"}, {"image": ...} or {"video": ...}.

    Raises:
        ValueError: a dict without any of these keys.
    """
    if isinstance(item, Mapping):
        for name in ("video", "image", "bytes", "path"):
            if item.get(name) is not None:
                return ([], [item[name]]) if name == "video" else read_item(item[name])
        raise ValueError(
            f"a dict with {', '.join(map(repr, item)) or 'no keys'}: it needs 'image', 'video', "
            "'bytes' or 'path'; else pass the image itself"
        )
    if isinstance(item, np.ndarray | Tensor):
        is_clip = item.ndim == 4
    else:
        is_clip = isinstance(item, Video | Sequence) and not is_one_image(item)
    # Whether it really is an image or a clip is checked later, when it is converted to tensors.
    return ([], [cast("VideoLike", item)]) if is_clip else ([cast("ImageLike", item)], [])


def read_video(file: str | os.PathLike[str]) -> Video:
    """Open a video file; ``encoder.encode(videos=[read_video(file)])`` encodes it.

    Args:
        file: a file in a format that FFmpeg reads; its first video stream is taken. Playlists and
            other files that list further files are refused.

    Returns:
        ``frames``, a :class:`VideoFrames`, and their ``fps``.

    Raises:
        ValueError: PyAV is missing, or the file does not exist, is no video, is damaged or has no
            frames.
    """
    frames = VideoFrames(Path(file))
    return Video(frames, frames.fps)


def read_videos(
    videos: VideosLike,
    choose: ChooseFrames,
    error: ValueError | None = None,
) -> list[list[Tensor]]:
    """Convert the chosen frames of every video with :func:`to_rgb`.

    Args:
        videos: an iterable of videos, or one of these: a :class:`Video`, the path of a video file,
            numpy [F, H, W, C], a tensor [F, C, H, W], or a list or tuple of PIL images, which is
            one clip. In an iterable a video may also be a sequence of images of any kind.
        choose: chooses the frames of a video; it is called once per video.
        error: an error to raise at the first video, before it is read; None if videos are allowed.

    Returns:
        The frames of each video, uint8 [3, H, W] per frame.

    Raises:
        ValueError: a bad frame, frames of different sizes, no frames, something that is no video,
            or ``error``.
    """
    clips = []
    for number, video in enumerate(_listed(videos)):
        if error is not None:
            raise error.with_traceback(None)
        with prefix_errors(f"video {number}"):
            clips.append(_read_video(video, choose))
    return clips


def refuse_videos(videos: VideosLike) -> None:
    """Raise a ValueError if there is a video, for a tower that takes only images."""
    for _ in _listed(videos):
        raise ValueError(IMAGES_ALONE)


def _listed(videos: VideosLike) -> Iterable[object]:
    several: object = [videos] if _is_one_video(videos) else videos
    is_array = isinstance(several, np.ndarray | Tensor)
    if (is_one_image(several) and not is_array) or not isinstance(several, Iterable):
        raise ValueError(
            f"videos is one {type(videos).__name__}: pass a video, or a list of videos"
        )
    return several


def _is_one_video(videos: object) -> bool:
    if isinstance(videos, np.ndarray | Tensor):
        return videos.ndim == 4
    if isinstance(videos, list | tuple):
        return bool(videos) and all(map(is_picture, videos))
    return isinstance(videos, Video | str | os.PathLike)


def _read_video(video: object, choose: ChooseFrames) -> list[Tensor]:
    if isinstance(video, str | os.PathLike):
        video = read_video(video)
    frames, fps = (video.frames, video.fps) if isinstance(video, Video) else (video, None)
    if isinstance(frames, np.ndarray | Tensor):
        if frames.ndim != 4:
            layout = "[F, H, W, C]" if isinstance(frames, np.ndarray) else "[F, C, H, W]"
            raise ValueError(
                f"shape {tuple(frames.shape)}: a video array has four dimensions {layout}; pass "
                "videos=[video] with one such array, or with a list of images"
            )
    elif is_one_image(frames) or not isinstance(frames, Iterable):
        raise ValueError(
            f"is of type {type(frames).__name__}, not a video: pass the path of a video file, or "
            "frames, videos=[[frame, frame, ...]]"
        )
    elif not isinstance(frames, Sequence):  # list() would decode all frames of a lazy Sequence
        frames = list(frames)
    if not len(frames):
        raise ValueError("has no frames: a video needs at least one")
    pixels: list[Tensor] = []
    for number in choose(len(frames), source_fps=fps):
        with prefix_errors(f"frame {number}"):
            frame = to_rgb(frames[number])
            if pixels and frame.shape != pixels[0].shape:
                raise ValueError(
                    f"is {_size(frame)} pixels, the first {_size(pixels[0])}: all frames of a "
                    "video must have one size; resize them, or pass them as images"
                )
        pixels.append(frame)
    return pixels


def _size(pixels: Tensor) -> str:
    return f"{pixels.shape[2]}x{pixels.shape[1]}"
