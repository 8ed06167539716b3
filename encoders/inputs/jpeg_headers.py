"""Headers of JPEG files, read without PIL where PIL would read the same.

PIL takes ten times as long for a header. What a header says in an unusual way (damage, EXIF in
parts, several pictures in a file) is left to PIL, so that its limits and its errors stay.
"""

from __future__ import annotations

from struct import iter_unpack, unpack_from
from typing import NamedTuple

from PIL import Image

from .turning import TURNS, UPRIGHT, Turn


class JpegHeader(NamedTuple):
    """The size of the stored pixels, the turns that make them upright, and how they are coded."""

    height: int
    width: int
    turn: Turn
    progressive: bool = False
    """Whether the file is progressive."""


_PROGRESSIVE = 0xC2
_FRAMES = frozenset((0xC0, 0xC1, _PROGRESSIVE))
"""The markers of baseline, extended and progressive frames."""
_SKIPPED = frozenset((0xC4, 0xDD, *range(0xE3, 0xED), 0xEF, 0xFE))
"""The markers of segments of which PIL reads only the length: Huffman tables, restart intervals,
applications and comments."""
_SCAN, _QUANTISATION, _EXIF_OR_XMP, _PHOTOSHOP = 0xDA, 0xDB, 0xE1, 0xED
_APPLICATIONS = {0xE0: (b"JFIF\0", 16), 0xE2: (b"ICC_PROFILE\0", 16), 0xEE: (b"Adobe", 14)}
"""The application segments of which PIL reads more: how they begin, and their fewest bytes."""

_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
"""The bytes of a value of each type of EXIF (TIFF 6.0)."""
_ORIENTATION, _SHORT, _RATIONAL = 0x0112, 3, 5
_RESOLUTION = {0x011A: _RATIONAL, 0x0128: _SHORT}
"""The tags of which PIL makes a resolution when it opens a file, and their types."""


def read_header(data: bytes) -> JpegHeader | None:
    """Read the header of a JPEG file of mode RGB or L, if PIL would accept it and within its limit.

    Args:
        data: the bytes of a file of any kind.

    Returns:
        The header; None if PIL is to read the file.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    place, last, size, orientation, in_xmp = 2, len(data) - 4, None, None, False
    progressive = False
    while place < last and data[place] == 0xFF:
        marker = data[place + 1]
        start, length = place + 4, (data[place + 2] << 8 | data[place + 3]) - 2
        if marker == _SCAN:
            if size is None or (in_xmp and not orientation):
                return None
            most = Image.MAX_IMAGE_PIXELS
            if most is not None and size[0] * size[1] > most:
                return None
            return JpegHeader(*size, TURNS.get(orientation or 1, UPRIGHT), progressive)
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
            progressive = marker == _PROGRESSIVE
        elif marker == _QUANTISATION:
            if length % 65 or max(data[start:place:65], default=0) > 15:
                return None
        elif marker in _APPLICATIONS:
            begins, fewest = _APPLICATIONS[marker]
            if length + 2 < fewest or not data.startswith(begins, start):
                return None
        elif marker == _EXIF_OR_XMP:
            if data.startswith(b"Exif\0\0", start):
                if orientation is not None:  # the rest of EXIF in parts
                    return None
                orientation = _read_orientation(data[start + 6 : place])
                if orientation is None:
                    return None
            in_xmp = in_xmp or data.find(b"tiff:Orientation", start, place) >= 0
        elif marker == _PHOTOSHOP:
            if data.startswith(b"8BIM", place - 6):  # PIL reads past an end that is cut off here
                return None
        elif marker not in _SKIPPED:
            return None
    return None


def _read_orientation(exif: bytes) -> int | None:
    """Return the orientation that EXIF states, 0 if it states none, and None if PIL is to read it.

    PIL stops at the first value outside EXIF, and fails for a resolution of some other types.
    """
    order, end = _ORDERS.get(exif[:4]), len(exif)
    if order is None or end < 14:
        return None
    (place,) = unpack_from(order + "L", exif, 4)
    if place + 6 > end:
        return None
    (count,) = unpack_from(order + "H", exif, place)
    stop = place + 2 + 12 * count
    if stop + 4 > end:
        return None
    orientation, room = 0, end
    for tag, kind, number, value in iter_unpack(order + "HHLL", exif[place + 2 : stop]):
        if kind not in _SIZES:
            return None
        size = _SIZES[kind] * number
        if size > 4:
            room -= size
            if room < 0 or value + size > end:
                return None
        if tag == _ORIENTATION:
            if orientation or kind != _SHORT or number != 1:
                return None
            orientation = value & 0xFFFF if order == "<" else value >> 16
            if not 1 <= orientation <= 8:
                return None
        elif tag in _RESOLUTION and (kind != _RESOLUTION[tag] or number != 1):
            return None
    return orientation
