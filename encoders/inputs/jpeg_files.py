"""JPEG files decoded by simplejpeg where it is installed, to the pixels that PIL gives.

PIL copies every decoded image while it holds Python's global lock, so that 16 threads of it decode
no faster than about five; simplejpeg decodes without the lock (``docs/embedding.md`` has figures).
Both use libjpeg-turbo. PIL decodes CMYK and whatever simplejpeg rejects: its pixels or its error
are then the result.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    if not _is_fast():
        return None
    import simplejpeg

    height, width, (swapped, flipped) = header
    is_upright = not swapped and not flipped
    # The array has the size that was checked, so a second header cannot claim a larger one.
    pixels = _empty(height, width, _PINS.get() and is_upright)
    rows: Array = pixels.numpy()
    try:
        decoded = simplejpeg.decode_jpeg(data, "RGB", buffer=rows)
    except ValueError:  # for what libjpeg only warns of, too: PIL knows what is tolerable
        return None
    if decoded.shape != rows.shape:
        return None
    if is_upright:
        return pixels
    rows = np.flip(rows.swapaxes(0, 1) if swapped else rows, flipped)
    height, width = rows.shape[:2]
    upright = _empty(height, width, _PINS.get())
    np.copyto(upright.numpy(), rows)  # by NumPy: see ``stack_frames``
    return upright


def _empty(height: int, width: int, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty((height, width, 3), dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.from_numpy(np.empty((height, width, 3), np.uint8))


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
def _is_fast() -> bool:
    """Return whether simplejpeg is installed, and PIL's decoder is that of libjpeg-turbo as well.

    Another libjpeg rounds in other ways, and the pixels are to be those of PIL.
    """
    try:
        import simplejpeg  # noqa: F401
    except ImportError:
        return False
    return features.check_feature("libjpeg_turbo") is True
