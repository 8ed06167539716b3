"""The frames of video files, each decoded by PyAV when it is indexed."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast, overload

import torch
from torch import Tensor

from .image_files import prefix_errors, refuse_address, require_file

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

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


class VideoFrames(Sequence[Tensor]):
    """The frames of a video file, each uint8 [3, H, W], rotated and mirrored as players show them.

    A frame is decoded when it is indexed, and decoding goes forward: when a few frames of a long
    film are sampled, only those are kept in memory. ``torch.stack(list(frames))`` keeps all frames.

    Several threads may read one object: each thread decodes the file for itself. An object can be
    copied and pickled for workers in other processes: the path is copied, and the copy opens the
    file again.
    """

    def __init__(self, path: str | Path) -> None:
        """Count the frames by decoding the file once, because containers often state a wrong count.

        Raises:
            ValueError: PyAV is missing, or the file is missing, damaged or no video.
        """
        require_av()
        self.path = Path(path)
        self._file = self.path.absolute()  # the working directory may change before it is reopened
        self.fps = 0.0
        self._count = sum(1 for _ in self._decode())
        self._pass = _Pass()
        if not self._count:
            raise ValueError(f"{self.path}: holds no frame that can be decoded")

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
            raise IndexError(f"frame {index}: {self.path} has {self._count} frames")
        current = self._pass
        if current.decoder is None or number < current.position:
            current.decoder, current.position = enumerate(self._decode()), -1
        while current.position < number:
            self._advance(current, current.decoder)
        return _turn_upright(current.frame)

    def _advance(self, current: _Pass, decoder: Iterator[tuple[int, VideoFrame]]) -> None:
        current.decoder = None  # a decoder that raises cannot be used again
        try:
            current.position, current.frame = next(decoder)
        except StopIteration:
            raise ValueError(
                f"{self.path}: ends after {current.position + 1} frames and had {self._count} when "
                "it was opened: it was replaced; open it again with read_video"
            ) from None
        current.decoder = decoder

    def _decode(self) -> Iterator[VideoFrame]:
        import av

        with prefix_errors(str(self.path)):
            refuse_address(self.path, "download it and pass the path of the file")
            require_file(self._file, "a video file", "clips")
        try:
            with av.open(str(self._file), mode="r", options=_OPTIONS) as container:
                if not container.streams.video:
                    raise ValueError(f"{self.path}: has no video stream; pass a video file")
                stream = container.streams.video[0]
                stream.thread_type = "AUTO"
                self.fps = float(stream.average_rate or stream.guessed_rate or 24)
                yield from container.decode(stream)
        except av.FFmpegError as error:
            raise ValueError(
                f"{self.path}: cannot be read as a video ({error.strerror}); it is damaged, of a "
                "format that FFmpeg does not know, or a playlist of other files, which are not "
                "opened: replace it, or convert it to MP4"
            ) from error


def _turn_upright(frame: VideoFrame) -> Tensor:
    """Convert a frame to RGB [3, H, W], turned and mirrored by its display matrix.

    A matrix (a b, c d) shows the pixel (x, y) at (a*x + c*y, b*x + d*y), y downwards; it is rounded
    to the nearest of the eight ways to turn and mirror an image (ISO/IEC 14496-12, 8.3.2; the
    ffmpeg command turns its input in the same eight ways).
    """
    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
    # PyAV's type stub declares only motion vectors here.
    side_data = cast("Mapping[str, bytes]", frame.side_data)
    if "DISPLAYMATRIX" not in side_data:
        return pixels.contiguous()
    a, b, _, c, d = struct.unpack_from("=5i", bytes(side_data["DISPLAYMATRIX"]))
    x_scale, y_scale = a, d
    if abs(a) + abs(d) < abs(b) + abs(c):  # rows become columns
        pixels, x_scale, y_scale = pixels.transpose(1, 2), c, b
    flipped_axes = [dim for dim, scale in ((2, x_scale), (1, y_scale)) if scale < 0]
    return pixels.flip(flipped_axes).contiguous() if flipped_axes else pixels.contiguous()
