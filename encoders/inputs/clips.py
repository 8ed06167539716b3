"""Videos that a user passes: which items are videos, and their frames as uint8 RGB tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, Protocol, TypeGuard, cast

import numpy as np
from torch import Tensor

from ..data import Limits
from .decoders import DecoderFrames, DecordReader, TorchcodecDecoder
from .gpu_decoding import DeviceImage
from .image_files import FileLike, Readable, prefix_errors
from .intake import (
    AnyArray,
    ImageLike,
    Video,
    VideoLike,
    VideosLike,
    file_of,
    is_one_image,
    is_picture,
    to_rgb,
)
from .video_files import VideoFrames

IMAGES_ALONE = "this tower takes only images: pass the frames of a video as images"
"""The message of the error that preprocessors which take only images raise for a video."""


def refuse_sampling(limits: Limits) -> None:
    """Raise a ValueError if ``fps`` or ``num_frames`` was passed for a tower without videos."""
    for name in ("fps", "num_frames"):
        if (value := limits._asdict()[name]) is not None:
            raise ValueError(
                f"{name}={value}: this tower takes only images, which have no frames to choose "
                "from; leave it out"
            )


class ChooseFrames(Protocol):
    """A function that chooses the frames of a video to encode."""

    def __call__(
        self, total: int, *, source_fps: float | None, times: Sequence[float] | None
    ) -> Sequence[int]:
        """Return the indices, from 0, of the frames to encode.

        Args:
            total: number of frames of the video.
            source_fps: frames per second at which the video was recorded; None if unknown.
            times: seconds from the first frame to each, if they are not evenly spaced, else None.
        """
        ...


def read_item(item: object) -> tuple[list[ImageLike], list[VideoLike]]:
    """Tell whether an item of a stream is an image or a clip: return ([image], []) or ([], [clip]).

    A :class:`Video`, a list of frames, a decoder of torchcodec or decord and an array or tensor of
    four dimensions are clips. A dict is a row of a ``datasets`` column: {"bytes", "path"} (an
    image), {"image": ...} or {"video": ...}.

    Raises:
        ValueError: a dict without any of these keys.
    """
    if isinstance(item, DeviceImage):
        is_clip = False
    elif isinstance(item, np.ndarray | Tensor):
        is_clip = item.ndim == 4
    elif isinstance(item, Mapping):
        for name in ("video", "image", "bytes", "path"):
            if item.get(name) is not None:
                return ([], [item[name]]) if name == "video" else read_item(item[name])
        raise ValueError(
            f"a dict with {', '.join(map(repr, item)) or 'no keys'}: it needs 'image', 'video', "
            "'bytes' or 'path'; else pass the image itself"
        )
    else:
        is_clip = not is_one_image(item) and isinstance(
            item, Video | Sequence | TorchcodecDecoder | DecordReader
        )
    # Whether it really is an image or a clip is checked later, when it is converted to tensors.
    return ([], [cast("VideoLike", item)]) if is_clip else ([cast("ImageLike", item)], [])


def read_video(file: FileLike, *, on_damage: Literal["raise", "warn"] = "raise") -> Video:
    """Open a video file; ``encoder.encode(videos=[read_video(file)])`` encodes it.

    Args:
        file: the path, the bytes or the open file (which is read into memory) of a format that
            FFmpeg reads. Its best video stream is taken, as FFmpeg ranks them, and never cover art.
            Playlists and other files that list further files are rejected.
        on_damage: "raise" rejects a file with packets that are corrupt, or that ends before the
            duration that it states; "warn" keeps the frames that can be decoded.

    Returns:
        ``frames``, a :class:`VideoFrames`; their ``fps``, which is measured where timestamps differ
        from what the file states; and their ``times`` where they are not evenly spaced.

    Raises:
        ValueError: PyAV is missing, or the file does not exist, is no video, is damaged or has no
            frames.
    """
    frames = VideoFrames(file, on_damage=on_damage)
    return Video(frames, frames.fps, frames.times)


def read_videos(
    videos: VideosLike,
    choose: ChooseFrames,
    error: ValueError | None = None,
) -> list[list[Tensor]]:
    """Convert the chosen frames of every video with :func:`to_rgb`.

    Args:
        videos: an iterable of videos, or one of these: a :class:`Video`; a video file as a path,
            bytes, an open binary file, or a dict with "bytes" or "path"; a decoder of torchcodec or
            decord; numpy [F, H, W, C], a tensor [F, C, H, W], or a list or tuple of PIL images,
            which is one clip. In an iterable a video may also be a sequence of images of any kind.
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
    if type(videos) in (list, tuple) and not videos:  # asking what it is takes 50 microseconds
        return ()
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
    return _is_file(videos) or isinstance(
        videos, Video | Mapping | TorchcodecDecoder | DecordReader
    )


def _is_file(video: object) -> TypeGuard[FileLike]:
    kinds = str, os.PathLike, bytes, bytearray, memoryview, Readable
    return isinstance(video, kinds)


def _read_video(video: object, choose: ChooseFrames) -> list[Tensor]:
    video = _opened(video)
    frames, fps = (video.frames, video.fps) if isinstance(video, Video) else (video, None)
    times = video.times if isinstance(video, Video) else None
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
    if times is not None and (len(times) != len(frames) or any(b < a for a, b in pairwise(times))):
        raise ValueError(
            f"has {len(times)} times for {len(frames)} frames: pass one per frame, in seconds and "
            "in ascending order, or none"
        )
    try:
        return _read_frames(frames, choose(len(frames), source_fps=fps, times=times))
    finally:
        if isinstance(frames, VideoFrames):
            frames.close()  # the caller may hold thousands of videos


def _read_frames(
    frames: Sequence[ImageLike] | AnyArray | Tensor, numbers: Sequence[int]
) -> list[Tensor]:
    """Convert frames by their numbers; they must have one size."""
    pixels: list[Tensor] = []
    for number in numbers:
        with prefix_errors(f"frame {number}"):
            frame = to_rgb(frames[number])
            if pixels and frame.shape != pixels[0].shape:
                raise ValueError(
                    f"is {_size(frame)} pixels, the first {_size(pixels[0])}: all frames of a "
                    "video must have one size; resize them, or pass them as images"
                )
        pixels.append(frame)
    return pixels


def _opened(video: object) -> object:
    """Return a file or a decoder as a :class:`Video`, and anything else as it is."""
    if isinstance(video, Mapping):
        video = file_of(video, "a video")
    if _is_file(video):
        return read_video(video)
    if isinstance(video, TorchcodecDecoder | DecordReader):
        frames = DecoderFrames(video)
        return Video(frames, frames.fps)
    return video


def _size(pixels: Tensor) -> str:
    return f"{pixels.shape[2]}x{pixels.shape[1]}"
