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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

import torch
from PIL import Image
from torch import Tensor

from .image_files import Readable, header_of, jpeg_bytes, read_image_file, rewindable
from .jpeg_files import decoding_to_pinned_memory, jpeg_of
from .jpeg_headers import JpegHeader, read_header
from .torch_internals import empty_images
from .turning import UPRIGHT

Decode: TypeAlias = Literal["cpu", "gpu"]
"""Where JPEG files are decoded: by threads of the CPU, or by nvImageCodec on the CUDA device."""
_DECODES = get_args(Decode)
MOST_FILES, _MOST_BYTES = 64, 1 << 29
"""The most files that are decoded in one call, and the most bytes of their pixels unless it is one
file, which bounds the memory of the decoder."""
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
    """A batch of files that was decoded on a CUDA device."""

    event: torch.cuda.Event
    """The event after which other CUDA streams may read the pixels."""
    pixels: Tensor
    """Pixels of one of the files: all of them have their memory in common."""


class _Buffer:
    """The memory of a tensor for nvImageCodec; the tensor takes longer to describe itself.

    ``__cuda_array_interface__`` is version 3 of Numba's protocol.
    """

    def __init__(self, pixels: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pixels.shape),
            "typestr": "|u1",
            "data": (pixels.data_ptr(), False),
            "version": 3,
        }


class _File:
    """A JPEG file that waits for its turn, and its pixels once it was decoded."""

    def __init__(self, source: _CodeStream, header: JpegHeader) -> None:
        self.source, self.header = source, header
        self.pixels: Tensor | None = None
        """The pixels as they are in the file; None if it was not decoded."""
        self.done = False
        self.decoded: _Decoded | None = None
        """The batch of the file; None before it was decoded, and on the CPU."""


ReadFile: TypeAlias = tuple[object, _File | None]
"""An image, and its JPEG file that waits to be decoded; None for every other image."""
_Place: TypeAlias = tuple[_File, Tensor]
"""A file, and the memory for its pixels."""


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
        # The engines of nvImageCodec 0.9 write to an image without waiting for the CUDA stream that
        # they are given: a kernel on it could still read or write the same memory. So the decoder
        # has one of its own, whose memory torch gives away again once no kernel has it in use.
        # Torch gives out the same 32 in turn; few ask for those of high priority.
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_cuda else None

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

        Files with errors are left as they are, so that decoding them on the CPU raises the errors;
        so are all files if memory runs out.
        """
        return self.decode_read(self.read_files(images))

    def read_files(self, images: Sequence[object]) -> list[ReadFile]:
        """Read the JPEG files among ``images``, and return them all for :meth:`decode_read`."""
        return [self._file(image) for image in images]

    def decode_read(self, files: Sequence[ReadFile]) -> list[object]:
        """Return what :meth:`decode_files` returns of images that were read."""
        given = [file for _, file in files if file is not None]
        self._waiting.extend(given)
        try:
            for file in given:
                self._wait(file)
            self._receive({file.decoded for file in given if file.decoded is not None})
            return [
                image if file is None or file.pixels is None else DeviceImage(_upright(file))
                for image, file in files
            ]
        except (torch.OutOfMemoryError, MemoryError):
            if self._stream is not None:  # what was decoded, but not received, is given away again
                self._stream.synchronize()
            return [image for image, _ in files]
        finally:
            self._forget([file for file in given if not file.done])

    def _file(self, image: object) -> ReadFile:
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

    def _wait(self, file: _File) -> None:
        """Wait until a file was decoded, by this thread or another."""
        while not file.done:
            with self._turn:  # the next thread finds its file done, or decodes all that wait by now
                if not file.done:
                    batch = self._next_batch()
                    try:
                        self._decode(batch)
                    finally:
                        for one in batch:
                            one.done = True

    def _forget(self, files: Sequence[_File]) -> None:
        """Remove files of a call that ends by an error from those that wait."""
        if files:
            with self._turn:
                for file in files:
                    with suppress(ValueError):  # another thread has decoded it meanwhile
                        self._waiting.remove(file)

    def _next_batch(self) -> Sequence[_File]:
        """Take files that wait."""
        batch, size = list[_File](), 0
        while self._waiting and len(batch) < MOST_FILES:
            height, width = self._waiting[0].header[:2]
            size += height * width * 3
            if batch and size > _MOST_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _receive(self, batches: Iterable[_Decoded]) -> None:
        """Let the current CUDA stream read the pixels of batches."""
        if self._stream is not None:
            stream = torch.cuda.current_stream(self.device)
            for event, pixels in batches:
                stream.wait_event(event)
                pixels.record_stream(stream)

    def _decode(self, batch: Sequence[_File]) -> None:
        """Decode files to torch's own memory, or one by one where there is not enough for all."""
        stream = self._stream
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                made = empty_images([file.header[:2] for file in batch], self.device)
        except torch.OutOfMemoryError:
            for file in batch if len(batch) > 1 else ():
                self._decode([file])
            return
        places = [*zip(batch, made, strict=True)]
        left = [file for file, _ in self._fill(places)]
        decoded = None if stream is None else _Decoded(stream.record_event(), made[0])
        for file, pixels in places:  # the event first: pixels are not read without it
            file.decoded, file.pixels = decoded, None if file in left else pixels

    def _fill(self, places: Sequence[_Place]) -> Sequence[_Place]:
        """Decode files; return those that were not decoded.

        The engines decode what they can: they refuse progressive files, and warn.
        """
        left = [place for place in places if place[0].header.progressive]
        if self._engines is None:
            left = [*places]
        elif len(left) < len(places):
            plain = [place for place in places if not place[0].header.progressive]
            left += self._fill_by(self._engines, plain)
        return self._fill_by(self._kernels, left) if left else ()

    def _fill_by(self, codec: _Codec, places: Sequence[_Place]) -> Sequence[_Place]:
        """Decode files; return those that the codec does not decode."""
        stream = 0 if self._stream is None else self._stream.cuda_stream
        try:
            found = codec.decode(
                [file.source for file, _ in places],
                images=[self._nvimgcodec.as_image(_Buffer(one), stream) for _, one in places],
                params=self._params,
                cuda_stream=stream,
            )
        except (RuntimeError, ValueError):  # for a file or for all
            if len(places) == 1:
                return places
            return [left for place in places for left in self._fill_by(codec, [place])]
        return [place for place, image in zip(places, found, strict=True) if image is None]


def _upright(file: _File) -> Tensor:
    """Return the pixels of a file that was decoded, turned as its EXIF data say."""
    assert file.pixels is not None
    if file.header.turn == UPRIGHT:
        return file.pixels
    swapped, flipped = file.header.turn
    pixels = file.pixels.swapaxes(0, 1) if swapped else file.pixels
    return (pixels.flip(flipped) if flipped else pixels).contiguous()


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
