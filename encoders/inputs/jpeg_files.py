"""JPEG files decoded by simplejpeg where it is installed, to the pixels that PIL gives.

PIL copies every decoded image while it holds Python's global lock, so that 16 threads of it decode
no faster than about five; simplejpeg decodes without the lock (``docs/embedding.md`` has figures).
Both use libjpeg-turbo. PIL decodes CMYK and whatever simplejpeg rejects: its pixels or its error
are then the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, features
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from .jpeg_headers import JpegHeader
from .turning import UPRIGHT, copy_pixels, turned

if TYPE_CHECKING:
    from ..data import Array

_PINS: ContextVar[bool] = ContextVar("pins", default=False)


@contextmanager
def decoding_to_pinned_memory() -> Iterator[None]:
    """Let JPEG files be decoded into page-locked memory in the block, for a copy to a GPU."""
    token = _PINS.set(True)
    try:
        yield
    finally:
        _PINS.reset(token)


def decode_jpeg(data: bytes, header: JpegHeader) -> Tensor | None:
    """Decode a JPEG file of mode RGB or L without holding Python's global lock.

    Args:
        data: the bytes of the file.
        header: what the file, or PIL, says of it.

    Returns:
        uint8 [H, W, 3], upright; None if PIL is to decode the file.
    """
    if not is_fast():
        return None
    height, width, turn, _ = header
    is_upright = turn == UPRIGHT
    pixels = _empty(height, width, 3, pinned=_PINS.get() and is_upright)
    rows: Array = pixels.numpy()
    if not _decode_into(data, rows):
        return None
    if is_upright:
        return pixels
    rows = turned(rows, turn)
    upright = _empty(*rows.shape, pinned=_PINS.get())
    copy_pixels(upright.numpy(), rows)
    return upright


def decode_in_turn(files: Sequence[tuple[bytes, JpegHeader]]) -> tuple[Tensor, list[Array | None]]:
    """Decode upright JPEG files of mode RGB or L into one tensor, one after the other.

    Args:
        files: the bytes and the header of each. simplejpeg is installed: :func:`is_fast`.

    Returns:
        The tensor, flat, and the pixels [H, W, 3] in it of each file; None if PIL is to decode it.
    """
    sizes = [header.height * header.width * 3 for _, header in files]
    pixels = _empty(sum(sizes), pinned=_PINS.get())
    flat: Array = pixels.numpy()
    made: list[Array | None] = []
    end = 0
    for (data, header), size in zip(files, sizes, strict=True):
        start, end = end, end + size
        rows = flat[start:end].reshape(header.height, header.width, 3)
        made.append(rows if _decode_into(data, rows) else None)
    return pixels, made


def _decode_into(data: bytes, rows: Array) -> bool:
    """Decode a file into an array of the size that its header says; False if PIL is to do it."""
    import simplejpeg

    try:
        # The array has the size that was checked, so a second header cannot claim a larger one.
        return bool(simplejpeg.decode_jpeg(data, "RGB", buffer=rows).shape == rows.shape)
    except ValueError:  # for what libjpeg only warns of, too: PIL knows what is tolerable
        return False


def _empty(*shape: int, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.from_numpy(np.empty(shape, np.uint8))


def jpeg_of(image: Image.Image) -> bytes | None:
    """Return the bytes of a JPEG file of mode RGB or L that PIL has opened, else None.

    Args:
        image: what ``Image.open`` returned, before its pixels are loaded.
    """
    if not isinstance(image, JpegImageFile) or image.mode not in ("RGB", "L"):
        return None
    assert image.fp is not None  # it is open until PIL has loaded the pixels
    image.fp.seek(0)
    return image.fp.read()


@cache
def is_fast() -> bool:
    """Return whether simplejpeg is installed, and PIL's decoder is that of libjpeg-turbo as well.

    Another libjpeg rounds in other ways, and the pixels are to be those of PIL.
    """
    try:
        import simplejpeg  # noqa: F401
    except ImportError:
        return False
    return features.check_feature("libjpeg_turbo") is True
