"""Image files: opened from paths, bytes and open files, decoded, and turned upright.

HEIF files (.heic), as phones write photographs, are read where ``pillow-heif`` is installed.
"""

from __future__ import annotations

import io
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, cast, runtime_checkable

from PIL import Image, ImageOps, UnidentifiedImageError


@runtime_checkable
class Readable(Protocol):
    """An open binary file."""

    def read(self, size: int = -1, /) -> bytes: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...


DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""The exceptions that PIL's decoders raise for damaged files."""
_HEAD = 32
"""Bytes of a file that say its format: a size, "ftyp", a brand, a version and further brands."""
_HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))

_LOCKS = tuple(threading.Lock() for _ in range(1021))
"""For images that are not decoded yet and for open files: threads of a stream, or of several, may
be given one of them twice, and PIL then mixes up what each of them reads."""


def open_image(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | Readable,
) -> Image.Image:
    """Decode an image file, and turn it upright by its EXIF orientation.

    Args:
        source: the path of the file, its bytes, or the open binary file.

    Returns:
        The PIL image in the mode of the file.

    Raises:
        ValueError: a file that is missing, damaged, too large or no image; the message begins with
            its path if that was given.
    """
    if isinstance(source, str | os.PathLike):
        with naming(str(source)):
            return _open(_find_file(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return _open(io.BytesIO(source))
    with lock_of(source):
        # A file that is opened only when it is read fails here, before the image is blamed.
        source.read(0)
        return _open(source)


def _find_file(file: str | os.PathLike[str]) -> Path:
    refuse_address(
        file, "pass vitgraph.load_image(url), or download it and pass the path of the file"
    )
    file = Path(file)
    if file.is_dir():
        raise ValueError("is a folder; pass the paths of the images in it")
    if not file.is_file():
        raise ValueError("there is no such file; pass the path of an image file")
    return file


def _open(file: Path | Readable) -> Image.Image:
    try:
        with Image.open(cast("Path | IO[bytes]", file)) as image:
            ImageOps.exif_transpose(image, in_place=True)
            image.load()
            return image
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"cannot be read as an image ({error}); it is larger than PIL opens: shrink it, or "
            "raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        ) from error
    except DAMAGED as error:
        if isinstance(error, UnidentifiedImageError) and _learn_heif(file):
            return _open(file)
        # PIL's own message names the object in memory.
        unknown = isinstance(error, UnidentifiedImageError) and not isinstance(file, Path)
        found = "bytes of no image file" if unknown else error
        raise ValueError(
            f"cannot be read as an image ({found}); it is damaged, truncated or of a "
            "format that PIL does not know: replace it or convert it"
        ) from error


def _learn_heif(file: Path | Readable) -> bool:
    """Let PIL read HEIF, as phones write photographs, if this is such a file.

    Returns:
        Whether PIL reads more than before.

    Raises:
        ValueError: the file needs pillow-heif, which is not installed.
    """
    if "HEIF" in Image.OPEN or not _is_heif(_read_head(file)):
        return False
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        raise ValueError(
            "is a HEIF file (.heic), which PIL reads with pillow-heif: pip install "
            "'vitgraph[heif]', or in a clone pip install '.[heif]'; or convert it to JPEG"
        ) from None
    register_heif_opener()
    return True


def _read_head(file: Path | Readable) -> bytes:
    if isinstance(file, Path):
        with open(file, "rb") as opened:
            return opened.read(_HEAD)
    file.seek(0)
    return file.read(_HEAD)


def _is_heif(head: bytes) -> bool:
    """Whether a file that begins so says that it is HEIF (ISO/IEC 23008-12): brands after ftyp."""
    brands = {head[start : start + 4] for start in range(8, len(head), 4)}
    return head[4:8] == b"ftyp" and bool(brands & _HEIF_BRANDS)


@contextmanager
def naming(item: str) -> Iterator[None]:
    """Put the name of the item before the message of a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{item}: {error}") from error


def refuse_address(file: str | os.PathLike[str], fix: str) -> None:
    """Raise a ValueError for a URL, also for one that ``Path`` has taken a slash from.

    Args:
        file: what was given as the path of a file.
        fix: how to pass what the URL names; ends the message.
    """
    if str(file).lower().startswith(("http:/", "https:/")):
        raise ValueError(f"is a URL, and nothing is downloaded here: {fix}")


def lock_of(image: object) -> threading.Lock:
    """Return the lock that guards reads of an image or file, shared with some others."""
    return _LOCKS[id(image) % len(_LOCKS)]
