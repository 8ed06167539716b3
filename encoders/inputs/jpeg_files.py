"""JPEG files decoded by simplejpeg where it is installed, to the pixels that PIL gives.

PIL copies every decoded image while it holds Python's global lock, so that 16 threads of it decode
no faster than about five; simplejpeg decodes without the lock (``docs/embedding.md`` has figures).
Both use libjpeg-turbo. PIL reads every header but the plainest, so its limits and its errors for a
header stay, and it decodes CMYK and whatever simplejpeg rejects: its pixels or its error are then
the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from PIL import Image, features
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

_TABLES, _FRAMES = frozenset((0xC4, 0xDD, 0xFE)), frozenset((0xC0, 0xC1, 0xC2))
"""The markers of segments that PIL skips (Huffman tables, restart intervals, comments), and those
of frames: baseline, extended and progressive."""
_SCAN, _QUANTISATION = 0xDA, 0xDB
_APPLICATIONS = {0xE0: (b"JFIF\0", 16), 0xE2: (b"ICC_PROFILE\0", 16), 0xEE: (b"Adobe", 14)}
"""The application segments of a plain header: how they begin, and their fewest bytes."""
_PINS: ContextVar[bool] = ContextVar("pins", default=False)


@contextmanager
def decoding_to_pinned_memory() -> Iterator[None]:
    """Let JPEG files be decoded into page-locked memory in the block, for a copy to a GPU."""
    token = _PINS.set(True)
    try:
        yield
    finally:
        _PINS.reset(token)


def decode_plain(data: bytes) -> Tensor | None:
    """Decode a JPEG file whose header has nothing for PIL to interpret, such as EXIF.

    PIL takes ten times as long to read such a header.

    Args:
        data: the bytes of a file of any kind.

    Returns:
        uint8 [H, W, 3]; None if PIL is to read the file.
    """
    size = plain_size(data)
    return None if size is None or not _is_fast() else _decode(data, *size)


def plain_size(data: bytes) -> tuple[int, int] | None:
    """Return height and width of a JPEG file with a plain header that PIL would accept, else None.

    Such an image is upright, of mode RGB or L, and within PIL's limit.
    """
    most, size = Image.MAX_IMAGE_PIXELS, _stated_size(data)
    return None if size is None or (most is not None and size[0] * size[1] > most) else size


def _stated_size(data: bytes) -> tuple[int, int] | None:
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    place, last, size = 2, len(data) - 4, None
    while place < last and data[place] == 0xFF:
        marker = data[place + 1]
        start, length = place + 4, (data[place + 2] << 8 | data[place + 3]) - 2
        if marker == _SCAN:
            return size
        place = start + length
        if length < 0 or place > last:
            return None
        if marker in _FRAMES:
            components = data[start + 5] if length > 5 else 0
            is_usual = components in (1, 3) and length == 6 + 3 * components
            if size is not None or not is_usual or data[start] != 8:
                return None
            size = data[start + 1] << 8 | data[start + 2], data[start + 3] << 8 | data[start + 4]
            if 0 in size:
                return None
        elif marker == _QUANTISATION:
            if length % 65 or max(data[start:place:65], default=0) > 15:
                return None
        elif marker in _APPLICATIONS:
            begins, fewest = _APPLICATIONS[marker]
            if length + 2 < fewest or not data.startswith(begins, start):
                return None
        elif marker not in _TABLES:
            return None
    return None


def decode_jpeg(image: Image.Image) -> Tensor | None:
    """Decode a JPEG file that PIL has opened, without holding Python's global lock.

    Args:
        image: what ``Image.open`` returned, before its pixels are loaded.

    Returns:
        uint8 [H, W, 3], not turned upright; None if PIL is to decode the file.
    """
    if not isinstance(image, JpegImageFile) or image.mode not in ("RGB", "L") or not _is_fast():
        return None
    assert image.fp is not None  # it is open until PIL has loaded the pixels
    image.fp.seek(0)
    return _decode(image.fp.read(), image.height, image.width)


def _decode(data: bytes, height: int, width: int) -> Tensor | None:
    """Decode a JPEG file of this size; return None if simplejpeg rejects it."""
    import simplejpeg

    # The buffer has the size that was checked, so a second header cannot claim a larger one.
    shape = height, width, 3
    pixels = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=_PINS.get())
    try:
        decoded = simplejpeg.decode_jpeg(data, "RGB", buffer=pixels.numpy())
    except (
        ValueError
    ):  # by default for what libjpeg only warns of, too: PIL knows what is tolerable
        return None
    return pixels if decoded.shape == shape else None


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
