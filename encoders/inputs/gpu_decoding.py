"""JPEG files decoded on a CUDA device by NVIDIA's nvImageCodec, which is asked for.

Its pixels differ from PIL's by rounding: ``docs/embedding.md`` says by how much. Headers are read
as for the CPU, so PIL's limits stay, and the CPU decodes what the device is not given (other
formats, CMYK, a JPEG file without an end) and what nvImageCodec cannot decode.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

import torch
from PIL import Image
from torch import Tensor

from .image_files import Readable, header_of, jpeg_bytes, read_image_file, rewindable
from .jpeg_files import decoding_to_pinned_memory, jpeg_of
from .jpeg_headers import UPRIGHT, JpegHeader, read_header

Decode: TypeAlias = Literal["cpu", "gpu"]
"""Where JPEG files are decoded: by threads of the CPU, or by nvImageCodec on the CUDA device."""
_DECODES = get_args(Decode)
MOST_FILES = 16
"""The most files that are decoded in one call, which bounds the memory of the decoder."""
_END = b"\xff\xd9"
"""The marker at the end of a JPEG file. Without it a file is truncated, which PIL rejects and
nvJPEG does not notice; the CPU then decides."""


class DeviceImage(NamedTuple):
    """An image that was decoded, on the device where it is resized."""

    pixels: Tensor
    """uint8 [H, W, 3], upright."""


class _Codec(Protocol):
    """A ``nvidia.nvimgcodec.Decoder``."""

    def decode(
        self,
        srcs: Sequence[object],
        *,
        images: Sequence[object],
        params: object,
        cuda_stream: int,
    ) -> Sequence[object | None]: ...


class _CodeStream(Protocol):
    """A ``nvidia.nvimgcodec.CodeStream``: the bytes of a file."""

    height: int
    width: int


class _Decoded(NamedTuple):
    """The CUDA stream on which files were decoded."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    """The event after which other streams may read the pixels."""


class _File:
    """A JPEG file that waits for its turn, and its pixels once it was decoded."""

    def __init__(self, source: _CodeStream, header: JpegHeader) -> None:
        self.source, self.header = source, header
        self.thread = threading.get_ident()
        self.pixels: Tensor | None = None
        self.done = False
        self.decoded: _Decoded | None = None
        """The CUDA stream on which another thread decoded the file; else None."""


class GpuDecoder:
    """Decodes JPEG files on one device; files of several threads are decoded in one call.

    A decoder keeps buffers on the device, so each device has one: :func:`decoder_of`.

    Args:
        device: a CUDA device.

    Raises:
        ValueError: nvImageCodec is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        try:
            from nvidia import nvimgcodec
        except ImportError:
            raise ValueError(
                "decode='gpu': needs nvImageCodec: pip install 'nvidia-nvimgcodec-cu13>=0.8' "
                "'nvidia-nvjpeg>=13', or leave decode out"
            ) from None
        self._nvimgcodec = nvimgcodec
        self._params: object = nvimgcodec.DecodeParams(
            apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB
        )
        self._waiting: deque[_File] = deque()
        self._turn = threading.Lock()

    @cached_property
    def _engines(self) -> _Codec | None:
        """The decoder by the GPU's own JPEG engines, which take no core; None without them.

        It is one of its own: of a decoder with another backend behind the engines, nvImageCodec
        0.9 gives these no more files of a later call than the first call had.
        """
        try:  # the calling thread suffices: waking others would take longer than it does
            return self._codec(self._nvimgcodec.BackendKind.HW_GPU_ONLY, max_num_cpu_threads=1)
        except RuntimeError:
            return None

    @cached_property
    def _kernels(self) -> _Codec:
        """The decoder by kernels and threads, for the files that the engines do not take.

        What nvImageCodec would decode on the CPU alone is decoded there to the pixels of PIL.
        """
        return self._codec(self._nvimgcodec.BackendKind.HYBRID_CPU_GPU, max_num_cpu_threads=0)

    def _codec(self, kind: object, max_num_cpu_threads: int) -> _Codec:
        codec: _Codec = self._nvimgcodec.Decoder(
            device_id=self.device.index or 0,
            max_num_cpu_threads=max_num_cpu_threads,
            backends=[self._nvimgcodec.Backend(kind)],
            # Chroma is interpolated as by libjpeg, not repeated, which would blur text.
            options=":fancy_upsampling=1",
        )
        return codec

    def decode_files(self, images: Sequence[object]) -> list[object]:
        """Return ``images`` with a :class:`DeviceImage` for each JPEG file that was decoded.

        Files with errors are left as they are, so that decoding them on the CPU raises the errors.
        """
        files = [self._file(image) for image in images]
        self._waiting.extend(file for _, file in files if file is not None)
        decoded = []
        for image, file in files:
            pixels = None if file is None else self._take(file)
            decoded.append(image if pixels is None else DeviceImage(pixels))
        return decoded

    def _file(self, image: object) -> tuple[object, _File | None]:
        """Read a JPEG file that the device is to decode; None for every other image.

        The image comes first, in memory if it is an open file that can be read once.
        """
        try:
            image = rewindable(image) if isinstance(image, io.IOBase) else image
            found = _read(image)
            if found is None:
                return image, None
            data, header = found
            source: _CodeStream = self._nvimgcodec.CodeStream(data)
            # Pixels are written to memory of the size that was checked.
            fits = (source.height, source.width) == (header.height, header.width)
            return image, _File(source, header) if fits else None
        except Exception:  # noqa: BLE001
            # Reading an open file runs the user's code, which may raise any class; nvImageCodec
            # rejects some files. The CPU then raises the error of this image, or decodes it.
            return image, None

    def _take(self, file: _File) -> Tensor | None:
        """Return the upright pixels of a file once it was decoded, by this thread or another."""
        while not file.done:
            with self._turn:  # the next thread finds its file done, or decodes all that wait by now
                if not file.done:
                    count = min(len(self._waiting), MOST_FILES)
                    batch = [self._waiting.popleft() for _ in range(count)]
                    try:
                        self._decode(batch)
                    finally:
                        for one in batch:
                            one.done = True
        if file.pixels is None:
            return None
        if file.decoded is not None:
            stream = torch.cuda.current_stream(self.device)
            if stream != file.decoded.stream:
                stream.wait_event(file.decoded.event)
                file.pixels.record_stream(stream)
        if file.header.turn == UPRIGHT:
            return file.pixels
        swapped, flipped = file.header.turn
        pixels = file.pixels.swapaxes(0, 1) if swapped else file.pixels
        return (pixels.flip(flipped) if flipped else pixels).contiguous()

    def _decode(self, batch: Sequence[_File]) -> None:
        """Decode files, by the engines if possible: these refuse progressive files, and warn."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        cuda_stream = 0 if stream is None else stream.cuda_stream
        left = [file for file in batch if file.header.progressive]
        if self._engines is None:
            left = [*batch]
        elif len(left) < len(batch):
            plain = [file for file in batch if not file.header.progressive]
            left += self._decode_by(self._engines, plain, cuda_stream)
        if left:
            self._decode_by(self._kernels, left, cuda_stream)
        others = [file for file in batch if file.thread != threading.get_ident()]
        if stream is not None and others:
            decoded = _Decoded(stream, stream.record_event())
            for file in others:
                file.decoded = decoded

    def _decode_by(
        self, codec: _Codec, files: Sequence[_File], cuda_stream: int
    ) -> Sequence[_File]:
        """Decode files to torch's own memory; return those that the codec does not decode."""
        try:
            made = [
                torch.empty(*file.header[:2], 3, dtype=torch.uint8, device=self.device)
                for file in files
            ]
            found = codec.decode(
                [file.source for file in files],
                images=[self._nvimgcodec.as_image(pixels, cuda_stream) for pixels in made],
                params=self._params,
                cuda_stream=cuda_stream,
            )
        except (RuntimeError, ValueError):  # for a file or for all
            if len(files) == 1:
                return files
            return [one for file in files for one in self._decode_by(codec, [file], cuda_stream)]
        for file, pixels, image in zip(files, made, found, strict=True):
            file.pixels = None if image is None else pixels
        return [file for file in files if file.pixels is None]


def _read(image: object) -> tuple[bytes, JpegHeader] | None:
    """Return the bytes and the header of a JPEG file that a GPU decodes."""
    if isinstance(image, Mapping):  # an image of the ``datasets`` package that is not decoded
        image = image.get("bytes") or image.get("path")
    if not isinstance(image, str | os.PathLike | bytes | bytearray | memoryview | Readable):
        return None
    data = jpeg_bytes(image)
    if data is not None and data.endswith(_END) and (header := read_header(data)) is not None:
        return data, header
    try:
        return read_image_file(image, _read_opened)
    except ValueError:
        return None


def _read_opened(image: Image.Image) -> tuple[bytes, JpegHeader] | None:
    data = jpeg_of(image)
    return None if data is None or not data.endswith(_END) else (data, header_of(image))


@cache
def decoder_of(device: torch.device) -> GpuDecoder:
    """Return the decoder of a device, the same one at every call."""
    return GpuDecoder(device)


_ACTIVE: ContextVar[GpuDecoder | None] = ContextVar("decoder", default=None)


@contextmanager
def decoding_by(decoder: GpuDecoder) -> Iterator[None]:
    """Let :func:`read_images` decode JPEG files by ``decoder`` within the block."""
    token = _ACTIVE.set(decoder)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def decoding(decode: Decode, device: torch.device) -> AbstractContextManager[None]:
    """Return a block within which :func:`read_images` decodes JPEG files as ``decode`` says.

    Args:
        decode: "cpu" or "gpu".
        device: the device of the encoder.

    Raises:
        ValueError: what :func:`check_decode` raises.
    """
    check_decode(decode, device)
    if decode == "gpu":
        return decoding_by(decoder_of(device))
    return decoding_to_pinned_memory() if device.type == "cuda" else nullcontext()


def active_decoder() -> GpuDecoder | None:
    """Return the decoder of the enclosing block, None for the CPU."""
    return _ACTIVE.get()


def check_decode(decode: object, device: torch.device) -> None:
    """Check the keyword ``decode`` of an encoder on ``device``.

    Raises:
        ValueError: neither "cpu" nor "gpu", or "gpu" for an encoder on another device than CUDA or
            without nvImageCodec.
    """
    if decode not in _DECODES:
        raise ValueError(f"decode={decode!r}: must be 'cpu' or 'gpu'")
    if decode == "gpu":
        if device.type != "cuda":
            raise ValueError(
                f"decode='gpu': the encoder is on {device.type}: move it to a CUDA device, or "
                "leave decode out"
            )
        decoder_of(device)
