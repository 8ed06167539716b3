"""The frames of video files, each decoded by PyAV when it is indexed."""

from __future__ import annotations

import io
import os
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .image_files import (
    FileLike,
    Readable,
    lock_of,
    prefix_errors,
    refuse_address,
    require_file,
)
from .intake import to_rgb
from .turning import UPRIGHT, Turn, copy_pixels, turned
from .video_damage import Damage
from .video_times import Timing, read_timing

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.reformatter import VideoReformatter
    from av.video.stream import VideoStream

    from ..data import Array

_FORMATS = (
    "mov,matroska,avi,mpeg,mpegts,mpegvideo,flv,asf,wtv,ogg,mxf,gxf,nut,nuv,nsv,rm,dv,swf,ty,"
    "h261,h263,h264,hevc,vvc,m4v,av1,obu,ivf,vc1,dirac,dnxhd,cavsvideo,avs2,avs3,apv,"
    "mjpeg,mpjpeg,smjpeg,yuv4mpegpipe,gif,apng,jpegxl_anim,flic,cine,r3d,bink,smk,roq,"
    "image2,bmp_pipe,jpeg_pipe,jpegxl_pipe,png_pipe,tiff_pipe,webp_pipe"
)
"""FFmpeg's names of the formats that contain their pictures themselves. Other formats (``hls``,
``concat``, ``dash``, ``imf``, ...) list further files or addresses, which FFmpeg would open."""

_OPTIONS = {"format_whitelist": _FORMATS, "protocol_whitelist": "file", "pattern_type": "none"}
"""The options with which FFmpeg opens a file. ``pattern_type`` keeps its format ``image2`` from
reading ``1.png``, ``2.png``, ... for a file named ``%d.png``."""


def require_av() -> None:
    """Check that PyAV is installed.

    Raises:
        ValueError: PyAV is not installed; the message says how to install it.
    """
    try:
        import av  # noqa: F401
    except ImportError:
        raise ValueError("reading video files needs PyAV: pip install 'av>=17.1'") from None


class _Pass(threading.local):
    """The decoder with which one thread reads a video file, and how far it has read.

    Each thread sees values of its own; ``decoder`` is None before the file is opened.
    """

    decoder: Iterator[tuple[int, VideoFrame]] | None = None
    position: int = -1
    """The index, from 0, of ``frame``, the frame that was decoded last; -1 before the first."""
    frame: VideoFrame

    def __init__(self) -> None:
        """Make what converts pixels: one for all frames, as a new one per frame costs more."""
        from av.video.reformatter import VideoReformatter

        self.reformatter = VideoReformatter()


class VideoFrames(Sequence[Tensor]):
    """The frames of a video file, each uint8 [3, H, W], rotated and mirrored as players show them.

    A frame is decoded when it is indexed, and decoding goes forward: when a few frames of a long
    film are sampled, only those are kept in memory. ``torch.stack(list(frames))`` keeps all frames.
    Transparent frames are laid over white, as images are.

    Several threads may read one object: each thread decodes the file for itself. An object can be
    copied and pickled for workers in other processes: the path or the bytes are copied, and the
    copy opens the file again.
    """

    def __init__(self, source: FileLike, *, on_damage: Literal["raise", "warn"] = "raise") -> None:
        """Decode the file once, because containers often state a wrong number of frames or rate.

        Args:
            source: the path of a video file, its bytes, or the open binary file, which is read
                whole into memory.
            on_damage: "raise" rejects a damaged file; "warn" keeps the frames that can be decoded,
                with a warning.

        Raises:
            ValueError: PyAV is missing, or the file is missing, damaged or no video.
        """
        require_av()
        if on_damage not in ("raise", "warn"):
            raise ValueError(f'on_damage={on_damage!r}: must be "raise" or "warn"')
        self.path = Path(source) if isinstance(source, str | os.PathLike) else None
        # The working directory may change before the file is opened again.
        self._source = self.path.absolute() if self.path is not None else _read_all(source)
        self._name = str(self.path or "the bytes of a video")
        timing, self._count = self._scan(on_damage)
        self.fps: float = timing.fps
        """Frames per second, of the timestamps where they differ from what the file states."""
        self.times = timing.times
        """Seconds from the first frame to each, if they are not evenly spaced; None elsewhere."""
        self._pass = _Pass()

    def __getstate__(self) -> dict[str, object]:
        """Return everything except the decoders, which cannot be copied."""
        return {name: value for name, value in self.__dict__.items() if name != "_pass"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore a pickled or copied video, which decodes its file from the start."""
        self.__dict__.update(state)
        self._pass = _Pass()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice[int | None]) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice[int | None]) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = index + self._count if index < 0 else index
        if not 0 <= number < self._count:
            raise IndexError(f"frame {index}: {self._name} has {self._count} frames")
        current = self._pass
        if current.decoder is None or number < current.position:
            current.decoder, current.position = enumerate(_decode(self._source, self._name)), -1
        while current.position < number:
            self._advance(current, current.decoder)
        return _turn_upright(current.frame, current.reformatter)

    def close(self) -> None:
        """Close the file in this thread; a frame that is indexed later opens it again."""
        for name in ("decoder", "position", "frame"):
            vars(self._pass).pop(name, None)

    def _advance(self, current: _Pass, decoder: Iterator[tuple[int, VideoFrame]]) -> None:
        current.decoder = None  # a decoder that raises cannot be used again
        try:
            current.position, current.frame = next(decoder)
        except StopIteration:
            raise ValueError(
                f"{self._name}: ends after {current.position + 1} frames and had {self._count} "
                "when it was opened: it was replaced; open it again with read_video"
            ) from None
        current.decoder = decoder

    def _scan(self, on_damage: str) -> tuple[Timing, int]:
        """Decode all frames; return when they are shown, and their number."""
        starts: list[float | None] = []
        last_seconds = 0.0
        with _open(self._source, self._name) as (container, stream):
            damage = Damage(stream)
            for packet in container.demux():
                damage.see(packet)
                if packet.stream.index != stream.index:  # `stream_index` of the last ones is 0
                    continue
                for frame in _decode_packet(cast("Packet[VideoStream]", packet), damage):
                    starts.append(frame.time)
                    last_seconds = float(frame.duration * (frame.time_base or 0))
            rate = stream.average_rate or stream.guessed_rate
            problem = damage.describe(container, starts)
        if not starts:
            raise ValueError(
                f"{self._name}: holds no frame that can be decoded; it is damaged, or of a format "
                "that FFmpeg does not decode: replace it, or convert it to MP4"
            )
        if problem is not None and on_damage == "raise":
            raise ValueError(
                f"{self._name}: is damaged: {problem}; replace it, or pass read_video(file, "
                'on_damage="warn") to take the frames that can be decoded'
            )
        if problem is not None:
            warnings.warn(f"{self._name}: is damaged: {problem}", stacklevel=4)
        return read_timing(starts, last_seconds, float(rate) if rate else None), len(starts)


def _decode(source: Path | bytes, name: str) -> Iterator[VideoFrame]:
    """Yield the frames of a video file.

    The generator does not refer to the object that holds it: Python then closes the file when the
    object is dropped, and not when it next looks for cycles, which may be many clips later.
    """
    with _open(source, name) as (container, stream):
        for packet in container.demux(stream):
            yield from _decode_packet(packet)


@contextmanager
def _open(source: Path | bytes, name: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video file, called ``name`` in errors; those of FFmpeg become a ValueError."""
    import av

    if isinstance(source, Path):
        with prefix_errors(name):
            refuse_address(name, "download it and pass the path of the file")
            require_file(source, "a video file", "clips")
    file = str(source) if isinstance(source, Path) else io.BytesIO(source)
    try:
        with av.open(file, mode="r", options=_OPTIONS) as container:
            stream = _best_stream(container)
            if stream is None:
                raise ValueError(f"{name}: has no video stream; pass a video file")
            stream.thread_type = "AUTO"
            yield container, stream
    except av.FFmpegError as error:
        raise ValueError(
            f"{name}: cannot be read as a video ({error.strerror}); it is damaged, of a "
            "format that FFmpeg does not know, or a playlist of other files, which are not "
            "opened: replace it, or convert it to MP4"
        ) from error


def _read_all(source: FileLike) -> bytes:
    """Return the bytes of a video that is passed as bytes or as an open file."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, Readable):
        raise ValueError(
            f"is of type {type(source).__name__}: pass the path of a video file, its bytes, or an "
            "open binary file"
        )
    with lock_of(source):
        source.seek(0)
        return source.read()


def _best_stream(container: InputContainer) -> VideoStream | None:
    """Return FFmpeg's best video stream that is no cover art, or None if there is none."""
    import av

    cover = av.stream.Disposition.attached_pic
    films = [stream for stream in container.streams.video if not stream.disposition & cover]
    best = container.streams.best("video")
    chosen = [film for film in films if best is not None and film.index == best.index] or films
    return chosen[0] if chosen else None


def _decode_packet(packet: Packet[VideoStream], damage: Damage | None = None) -> list[VideoFrame]:
    """Return the frames that a packet completes; none of one that the decoder rejects."""
    import av

    try:
        frames = packet.decode()
    except av.InvalidDataError:
        frames = []
        corrupt = not packet.is_corrupt
    else:
        corrupt = not packet.is_corrupt and any(frame.is_corrupt for frame in frames)
    if damage is not None:
        damage.corrupt += corrupt
    return frames


def _turn_upright(frame: VideoFrame, reformatter: VideoReformatter) -> Tensor:
    """Convert a frame to RGB [3, H, W], turned and mirrored by its display matrix.

    The result is laid out as [H, W, 3], as resizing takes it: torch's threads, which would wait for
    those of FFmpeg, copy nothing. One thread converts, since several frames are read at once.
    """
    if frame.format.has_palette or any(part.is_alpha for part in frame.format.components):
        over_white = to_rgb(Image.fromarray(_with_alpha(frame, reformatter))).permute(1, 2, 0)
        rows: Array = np.ascontiguousarray(over_white.numpy())
    else:
        rgb = reformatter.reformat(frame, format="rgb24", threads=1)
        view = rgb.to_ndarray()  # of the memory of the frame, which the decoder may still read
        rows = view.copy() if rgb is frame else np.ascontiguousarray(view)
    if (turn := _turn_of(frame)) != UPRIGHT:
        source = turned(rows, turn)
        copy_pixels(rows := np.empty(source.shape, np.uint8), source)
    return torch.from_numpy(rows).permute(2, 0, 1)


def _with_alpha(frame: VideoFrame, reformatter: VideoReformatter) -> Array:
    """Convert a frame to RGBA [H, W, 4].

    FFmpeg 8.1 leaves the last ``W % 8`` columns as they were in memory when it converts yuva420p to
    RGBA, but not when it converts this to RGB.
    """
    if frame.format.name != "yuva420p":
        return reformatter.reformat(frame, format="rgba", threads=1).to_ndarray()
    rgb = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
    plane = frame.planes[3]
    alpha = np.frombuffer(bytes(plane), np.uint8).reshape(-1, plane.line_size)
    return np.dstack([rgb, alpha[: frame.height, : frame.width]])


def _turn_of(frame: VideoFrame) -> Turn:
    """Return the turn that the display matrix of a frame asks for.

    A matrix (a b, c d) shows the pixel (x, y) at (a*x + c*y, b*x + d*y), y downwards; it is rounded
    to the nearest of the eight ways to turn and mirror an image (ISO/IEC 14496-12, 8.3.2; the
    ffmpeg command turns its input in the same eight ways).
    """
    # PyAV's type stub declares only motion vectors here.
    side_data = cast("Mapping[str, bytes]", frame.side_data)
    if "DISPLAYMATRIX" not in side_data:
        return UPRIGHT
    a, b, _, c, d = struct.unpack_from("=5i", bytes(side_data["DISPLAYMATRIX"]))
    swapped = abs(a) + abs(d) < abs(b) + abs(c)
    x_scale, y_scale = (c, b) if swapped else (a, d)
    return Turn(swapped, tuple(axis for axis, scale in ((0, y_scale), (1, x_scale)) if scale < 0))
