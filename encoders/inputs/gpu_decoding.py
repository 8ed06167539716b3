"""JPEG files decoded on a CUDA device by NVIDIA's nvImageCodec, which is asked for.

Its pixels differ from PIL's by rounding: ``docs/embedding.md`` says by how much. Headers are read
as for the CPU, so PIL's limits stay, and the CPU decodes what the device is not given (other
formats, CMYK, a JPEG file without an end) and what nvImageCodec cannot decode.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

import torch
from PIL import Image
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .image_files import Readable, header_of, jpeg_bytes, read_image_file
from .jpeg_files import decoding_to_pinned_memory, jpeg_of
from .jpeg_headers import JpegHeader, read_header

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


class _CodecImage(Protocol):
    """A ``nvidia.nvimgcodec.Image``."""

    def to_dlpack(self, cuda_stream: int) -> object: ...


class _Codec(Protocol):
    """A ``nvidia.nvimgcodec.Decoder``."""

    def decode(
        self, srcs: Sequence[object], *, params: object, cuda_stream: int
    ) -> Sequence[_CodecImage | None]: ...


class _Decoded(NamedTuple):
    """The CUDA stream on which files were decoded."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    """The event after which other streams may read the pixels."""


class _File:
    """A JPEG file that waits for its turn, and its pixels once it was decoded."""

    def __init__(self, source: object, header: JpegHeader) -> None:
        self.source, self.header = source, header
        self.pixels: Tensor | None = None
        self.done = False
        self.decoded: _Decoded | None = None
        """The CUDA stream that decoded the file; None on the CPU."""


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
        self._sources = nvimgcodec.CodeStream
        # The GPU's own JPEG engines first, which take no core. What nvImageCodec would decode on
        # the CPU is decoded there to the pixels of PIL. With chroma interpolated as libjpeg does;
        # without, it is repeated, which blurs text.
        kinds = nvimgcodec.BackendKind
        self._codec: _Codec = nvimgcodec.Decoder(
            device_id=device.index or 0,
            backends=[
                nvimgcodec.Backend(kinds.HW_GPU_ONLY),
                nvimgcodec.Backend(kinds.HYBRID_CPU_GPU),
            ],
            options=":fancy_upsampling=1",
        )
        self._params: object = nvimgcodec.DecodeParams(
            apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB
        )
        self._waiting: deque[_File] = deque()
        self._turn = threading.Lock()

    def decode_files(self, images: Sequence[object]) -> list[object]:
        """Return ``images`` with a :class:`DeviceImage` for each JPEG file that was decoded.

        Files with errors are left as they are, so that decoding them on the CPU raises the errors.
        """
        files = [self._file(image) for image in images]
        self._waiting.extend(file for file in files if file is not None)
        decoded = []
        for image, file in zip(images, files, strict=True):
            pixels = None if file is None else self._take(file)
            decoded.append(image if pixels is None else DeviceImage(pixels))
        return decoded

    def _file(self, image: object) -> _File | None:
        """Read a JPEG file that the device is to decode; None for every other image."""
        try:
            found = _read(image)
            return None if found is None else _File(self._sources(found[0]), found[1])
        except Exception:  # noqa: BLE001
            # Reading an open file runs the user's code, which may raise any class; nvImageCodec
            # rejects some files. The CPU then raises the error of this image, or decodes it.
            return None

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
        swapped, flipped = file.header.turn
        pixels = file.pixels.swapaxes(0, 1) if swapped else file.pixels
        return (pixels.flip(flipped) if flipped else pixels).contiguous()

    def _decode(self, files: Sequence[_File]) -> None:
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        try:
            handle = 0 if stream is None else stream.cuda_stream
            sources = [file.source for file in files]
            found = self._codec.decode(sources, params=self._params, cuda_stream=handle)
            for file, image in zip(files, found, strict=True):
                if image is not None:
                    # A copy in torch's own memory: nvImageCodec frees its buffer in its own order.
                    # ``from_dlpack`` of a capsule does not ask for the stream, which takes longer.
                    pixels = from_dlpack(image.to_dlpack(handle))
                    pixels = pixels.clone(memory_format=torch.contiguous_format)
                    size = file.header.height, file.header.width, 3
                    file.pixels = pixels if pixels.shape == size else None
        except RuntimeError:  # for a file or for all: each is then decoded by the CPU
            if len(files) > 1:
                for file in files:
                    self._decode([file])
            return
        if stream is not None:
            decoded = _Decoded(stream, stream.record_event())
            for file in files:
                file.decoded = decoded


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
