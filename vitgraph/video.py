"""Video files to frames and back, through PyAV (``pip install 'vitgraph[video]'``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from encoders.inputs import Video

if TYPE_CHECKING:
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
    """Open a video file; ``encoder.encode(videos=[read_video(path)])`` encodes it.

    Args:
        path: any container that FFmpeg reads; its first video stream is taken.

    Returns:
        ``frames``, a :class:`VideoFrames`, and their ``fps``.

    Raises:
        ValueError: PyAV is missing, or the file is not there, no video, damaged or without frames.
    """
    frames = VideoFrames(path)
    return Video(frames, frames.fps)


class VideoFrames(Sequence[Tensor]):
    """The frames of a video file, uint8 [3, H, W] each, a phone's rotation applied as players do.

    Frames are decoded when asked for, going forward: of a long film from which a few are sampled,
    no more than those are ever in memory. ``torch.stack(list(frames))`` holds all of them.

    They can be copied and pickled, for workers in other processes: what travels is the path, and
    the file is opened anew when a frame is asked for.
    """

    _decoder: Iterator[tuple[int, VideoFrame]] | None = None
    _position: int = -1
    """Number of ``_frame``, the one decoded last."""
    _frame: VideoFrame

    def __init__(self, path: str | Path) -> None:
        """Count the frames by decoding the file once: what containers say of it is often wrong."""
        require_av()
        self.path = Path(path)
        self._file = self.path.absolute()  # to open again, when the working folder may be another
        self.fps = 0.0
        self._count = sum(1 for _ in self._decode())
        if not self._count:
            raise ValueError(f"{self.path}: holds no frame that can be decoded")

    def __getstate__(self) -> dict[str, object]:
        """Everything but the decoder and its frame, which cannot be copied."""
        return {
            "path": self.path,
            "fps": self.fps,
            "_file": self._file,
            "_count": self._count,
        }

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = index + self._count if index < 0 else index
        if not 0 <= number < self._count:
            raise IndexError(f"frame {index}: {self.path} has {self._count} frames")
        if self._decoder is None or number < self._position:
            self._decoder, self._position = enumerate(self._decode()), -1
        while self._position < number:
            self._advance(self._decoder)
        return _upright(self._frame)

    def _advance(self, decoder: Iterator[tuple[int, VideoFrame]]) -> None:
        self._decoder = None  # unless decoding succeeds: a generator that raised is spent
        try:
            self._position, self._frame = next(decoder)
        except StopIteration:
            raise ValueError(
                f"{self.path}: ends after {self._position + 1} frames and had {self._count} when "
                "it was opened: it was replaced; open it again with read_video"
            ) from None
        self._decoder = decoder

    def _decode(self) -> Iterator[VideoFrame]:
        import av

        if self._file.is_dir():
            raise ValueError(f"{self.path}: is a folder; pass the paths of the clips in it")
        if not self._file.is_file():
            raise ValueError(f"{self.path}: there is no such file; pass the path of a video file")
        try:
            with av.open(str(self._file), mode="r") as container:
                if not container.streams.video:
                    raise ValueError(f"{self.path}: has no video stream; pass a video file")
                stream = container.streams.video[0]
                stream.thread_type = "AUTO"
                self.fps = float(stream.average_rate or stream.guessed_rate or 24)
                yield from container.decode(stream)
        except av.FFmpegError as error:
            raise ValueError(
                f"{self.path}: cannot be read as a video ({error.strerror}); it is damaged or of a "
                "format that FFmpeg does not know: replace it or convert it"
            ) from error


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

    count, channels, height, width = frames.shape if frames.ndim == 4 else (0, 0, 0, 0)
    if frames.dtype != torch.uint8 or channels != 3 or height % 2 or width % 2 or not count:
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
