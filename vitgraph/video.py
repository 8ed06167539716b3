"""Video files to frames and back, through PyAV (``pip install 'vitgraph[video]'``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from encoders.images import Video

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame


def require_av() -> None:
    """Raise unless PyAV is installed.

    Raises:
        ValueError: it is not; says how to install it.
    """
    try:
        import av  # noqa: F401
    except ImportError:
        raise ValueError("reading video files needs PyAV: pip install 'vitgraph[video]'") from None


def read_video(path: str | Path) -> Video:
    """Decode every frame of a video file; ``encoder.encode(videos=[read_video(path)])`` encodes it.

    Args:
        path: any container that FFmpeg reads; its first video stream is taken.

    Returns:
        ``frames`` uint8 [F, 3, H, W], a phone's rotation applied as players do, and their ``fps``.

    Raises:
        ValueError: PyAV is missing, or the file is not there, no video, damaged or without frames.
    """
    require_av()
    with _open(Path(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path}: has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        frames = [_upright(frame) for frame in container.decode(stream)]
        fps = float(stream.average_rate or stream.guessed_rate or 24)
    if not frames:
        raise ValueError(f"{path}: holds no frame that can be decoded")
    return Video(torch.stack(frames), fps)


@contextmanager
def _open(path: Path) -> Iterator[InputContainer]:
    import av

    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; pass the path of a video file")
    try:
        with av.open(str(path), mode="r") as container:
            yield container
    except av.FFmpegError as error:
        raise ValueError(f"{path}: not a video that FFmpeg can read ({error})") from error


def _upright(frame: VideoFrame) -> Tensor:
    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
    return torch.rot90(pixels, frame.rotation // 90, dims=(1, 2)).contiguous()


def write_video(path: str | Path, frames: Tensor, fps: int) -> None:
    """Write an H.264 (or, where FFmpeg has none, MPEG-4) file.

    Args:
        path: where to; the suffix chooses the container.
        frames: uint8 [F, 3, H, W], H and W even.
        fps: frames a second.

    Raises:
        ValueError: PyAV is missing, or the frames are not uint8 of an even size.
    """
    require_av()
    import av

    count, _, height, width = frames.shape
    if frames.dtype != torch.uint8 or height % 2 or width % 2 or not count:
        raise ValueError(
            f"frames {tuple(frames.shape)} {frames.dtype}: must be uint8 [F, 3, H, W] with F >= 1 "
            "and even H and W"
        )
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), mode="w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps))
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 4_000_000
        for pixels in frames.permute(0, 2, 3, 1).numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
