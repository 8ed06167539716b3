"""Image files: opened from paths, bytes and open files, decoded, and turned upright.

HEIF files (.heic), as phones write photographs, are read where ``pillow-heif`` is installed.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from pathlib import Path
from typing import (
    IO,
    TYPE_CHECKING,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    runtime_checkable,
)

import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from .jpeg_files import decode_in_turn, decode_jpeg, is_fast, jpeg_of
from .jpeg_headers import JpegHeader, read_header
from .turning import TURNS, UPRIGHT

if TYPE_CHECKING:
    from ..data import Array

Decoded = TypeVar("Decoded")


@runtime_checkable
class Readable(Protocol):
    """An open binary file."""

    def read(self, size: int = -1, /) -> bytes: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...


FileLike: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Readable
"""An image file: its path, its bytes, or the open binary file."""

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
_JPEG = b"\xff\xd8\xff"
"""How a JPEG file begins."""
_CHUNK, _PART = 1 << 18, 1 << 24
"""The bytes that are read of a file before it is known to be JPEG, and the most bytes that are read
at once afterwards."""
_READS = os.O_RDONLY
"""How files are opened."""
if sys.platform == "win32":
    _READS |= os.O_BINARY
_PATH = type(Path())
"""The class of plain paths."""
_RUN = 1 << 25
"""The most bytes of pixels that are decoded into one tensor, if it is not that of one image."""
_HEAD = 32
"""Bytes read to tell a HEIF file: it begins with a size, "ftyp", a brand, a version and brands."""
_HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))

_UPRIGHT: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns an image of each EXIF orientation upright (Exif 2.32, tag 0x0112)."""

_LOCKS = tuple(threading.Lock() for _ in range(1021))
"""Locks for reading open files and PIL images that are not decoded yet. If two threads read a file
at once, PIL decodes wrong data. All encoders share the locks, because the user may pass one image
to several encoders. Their number is fixed, so that memory does not grow with images; it is prime,
because a lock is chosen by the image's address, a multiple of 16."""


def open_image(source: FileLike) -> Image.Image:
    """Decode an image file, and turn it upright by its EXIF orientation.

    Other EXIF tags are not read, and EXIF that cannot be parsed is ignored, as by browsers.

    Args:
        source: the path of the file, its bytes, or the open binary file.

    Returns:
        The PIL image in the mode of the file.

    Raises:
        ValueError: a file that is missing, damaged, too large or no image; the message begins with
            its path if that was given.
    """
    return read_image_file(source, _load)


def decode_image(source: FileLike) -> Image.Image | Tensor:
    """Decode an image file as :func:`open_image` does, where possible without PIL's lock.

    Args:
        source: the path of the file, its bytes, or the open binary file.

    Returns:
        The upright image: RGB pixels, uint8 [H, W, 3], of a JPEG that PIL need not decode, else the
        PIL image in the mode of the file.

    Raises:
        ValueError: what :func:`open_image` raises for the file.
    """
    data = jpeg_bytes(source)
    header = None if data is None else read_header(data)
    pixels = None if data is None or header is None else decode_jpeg(data, header)
    return read_image_file(source, _load_fast) if pixels is None else pixels


class JpegRun(NamedTuple):
    """JPEG files that were decoded one after the other into one tensor."""

    pixels: Tensor
    """The bytes of all images, uint8 [bytes]."""
    images: Sequence[Array | None]
    """The pixels of each image in it, [H, W, 3]; None for what PIL is to decode."""

    def has_just(self, rows: Sequence[object]) -> bool:
        """Return whether ``rows`` are the images of the run, all of them, in order."""
        return 0 < len(rows) == len(self.images) and all(map(is_, rows, self.images))


NO_RUN = JpegRun(torch.empty(0, dtype=torch.uint8, device="cpu"), ())
"""No files."""


def may_be_jpeg(item: object) -> bool:
    """Return whether an item is an open file, or the path or the bytes of what looks like JPEG."""
    if isinstance(item, bytes):
        return item.startswith(_JPEG)
    # A path of another class runs the user's code, whose errors are those of its item.
    is_path = isinstance(item, str) or type(item) is _PATH
    if is_path:
        return str(item).lower().endswith((".jpg", ".jpeg"))
    return callable(getattr(type(item), "read", None))


def decode_jpegs(items: Sequence[object]) -> tuple[Sequence[object], JpegRun]:
    """Decode the files among items that are JPEG, all in this thread.

    Files that must be turned, that PIL decodes, or that are damaged stay as they are, and so do
    those after the first 32 MiB of pixels.

    Args:
        items: anything.

    Returns:
        The items, with an array [H, W, 3] for each file that was decoded, and the run of these.

    Raises:
        Exception: whatever an open file among the items raises; MemoryError.
    """
    numbers, files, size = list[int](), list[tuple[bytes, JpegHeader]](), 0
    for number, item in enumerate(items if is_fast() else ()):
        data = jpeg_bytes(cast("FileLike", item)) if may_be_jpeg(item) else None
        header = None if data is None else read_header(data)
        if data is not None and header is not None and header.turn == UPRIGHT:
            size += 3 * header.height * header.width
            if files and size > _RUN:
                break
            numbers.append(number)
            files.append((data, header))
    if not files:
        return items, NO_RUN
    run = JpegRun(*decode_in_turn(files))
    decoded = list(items)
    for number, image in zip(numbers, run.images, strict=True):
        decoded[number] = items[number] if image is None else image
    return decoded, run


def jpeg_bytes(source: FileLike) -> bytes | None:
    """Return the bytes of a source that begins like a JPEG file; None for any other source."""
    source = bytes(source) if isinstance(source, memoryview) else source  # of any shape
    if isinstance(source, bytes | bytearray):
        return bytes(source) if source.startswith(_JPEG) else None
    if not isinstance(source, str | os.PathLike):
        return _bytes_of_opened(source)
    try:
        found = os.stat(source)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            return None
        file = os.open(source, _READS)
        try:
            # One byte more than there are, so that one call reads the file and sees its end.
            data = os.read(file, min(found.st_size, _CHUNK) + 1)
            if not data.startswith(_JPEG):
                return None
            return data if len(data) == found.st_size else data + b"".join(_rest_of(file))
        finally:
            os.close(file)
    except (OSError, ValueError):  # another reader says what is wrong with the path
        return None


def _bytes_of_opened(file: Readable) -> bytes | None:
    with lock_of(file):
        file.read(0)  # as in ``read_image_file``
        try:
            file.seek(0)
            if file.read(len(_JPEG)) != _JPEG:
                return None
            file.seek(0)
            return bytes(file.read())
        except DAMAGED:  # which PIL, too, is told by the file
            return None


def _rest_of(file: int) -> Iterator[bytes]:
    """Yield the rest of a file, in parts."""
    while part := os.read(file, _PART):
        yield part


def read_image_file(source: FileLike, load: Callable[[Image.Image], Decoded]) -> Decoded:
    """Open an image file and return the result of ``load`` for the opened image.

    Args:
        source: the path of the file, its bytes, or the open binary file.
        load: takes what ``Image.open`` returned, before its pixels are loaded.

    Raises:
        ValueError: what :func:`open_image` raises for the file.
    """
    if source == "":
        raise ValueError("'' is an empty path; pass the path of an image file")
    if isinstance(source, str | os.PathLike):
        with prefix_errors(str(source)):
            return _open(_find_file(source), load)
    if isinstance(source, bytes | bytearray | memoryview):
        is_view = isinstance(source, memoryview)  # its bytes need not be contiguous
        return _open(io.BytesIO(bytes(source) if is_view else source), load)
    if not isinstance(source, Readable):
        raise ValueError(
            f"is of type {type(source).__name__}: pass the path of an image file, its bytes, or an "
            "open binary file"
        )
    with lock_of(source):
        # A lazy file object opens its file now. If that fails, its error is raised unchanged:
        # ``_open`` would report it as a damaged image.
        source.read(0)
        return _open(rewindable(source), load)


def rewindable(file: Readable) -> Readable:
    """Return an open file, or one in memory if it cannot be read twice, as an answer of the web."""
    is_once = isinstance(file, io.IOBase) and not file.seekable()
    return io.BytesIO(file.read()) if is_once else file


def _find_file(file: str | os.PathLike[str]) -> Path:
    refuse_address(
        file, "pass vitgraph.load_image(url), or download it and pass the path of the file"
    )
    require_file(file, "an image file", "images")
    return Path(file)


def _open(file: Path | Readable, load: Callable[[Image.Image], Decoded]) -> Decoded:
    try:
        image = Image.open(_with_all_methods(file))
        with image:
            return load(image)
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"cannot be read as an image ({error}); it is larger than PIL opens: shrink it, or "
            "raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        ) from error
    except DAMAGED as error:
        if "MAX_TEXT_" in str(error):
            raise ValueError(
                f"has a longer text chunk, such as a comment, than PIL reads ({error}): save the "
                "image without it, or raise the limit in PIL.PngImagePlugin if you trust it"
            ) from error
        if isinstance(error, UnidentifiedImageError) and learn_heif(file):
            return _open(file, load)
        # For bytes, PIL's own message has only the address of an object in memory.
        unknown = isinstance(error, UnidentifiedImageError) and not isinstance(file, Path)
        reason = "bytes of no image file" if unknown else error
        raise ValueError(
            f"cannot be read as an image ({reason}); it is damaged, truncated or of a "
            "format that PIL does not know: replace it or convert it"
        ) from error


def _with_all_methods(file: Path | Readable) -> Path | IO[bytes]:
    """Return a file for PIL, some of whose formats call more methods of it than ``read``, ``seek``
    and ``tell``, such as ``readline``."""
    if isinstance(file, Path | io.IOBase):
        return cast("Path | IO[bytes]", file)
    file.seek(0)
    return io.BytesIO(file.read())


def _load(image: Image.Image) -> Image.Image:
    """Decode an image and turn it by its EXIF orientation, and remove the metadata that states it.

    PIL's ``exif_transpose`` writes all EXIF anew, which raises for one tag of an unusual type.
    """
    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    if turn is None:
        return image
    upright = image.transpose(turn)
    for name in ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"):
        upright.info.pop(name, None)
    return upright


def _load_fast(image: Image.Image) -> Image.Image | Tensor:
    """Decode an image and turn it by its EXIF orientation, a JPEG without PIL if possible."""
    data = jpeg_of(image)
    pixels = None if data is None else decode_jpeg(data, header_of(image))
    return _load(image) if pixels is None else pixels


def header_of(image: Image.Image) -> JpegHeader:
    """Return the header of a JPEG file that PIL has opened."""
    turn = TURNS.get(_orientation(image), UPRIGHT)
    return JpegHeader(image.height, image.width, turn, "progressive" in image.info)


def _orientation(image: Image.Image) -> object:
    """Return the EXIF orientation of an image, None if it has none or its EXIF is damaged."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except DAMAGED:
        return None


def learn_heif(file: Path | Readable) -> bool:
    """Register pillow-heif with PIL if a file is HEIF and PIL does not know that format yet.

    Args:
        file: the path of the file, or the open binary file.

    Returns:
        Whether this call registered it, so that opening the file again may succeed.

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
            "'pillow-heif>=1.0', or convert it to JPEG"
        ) from None
    # For the whole process, because PIL has one table of formats; pillow-heif has no other way.
    register_heif_opener()
    return True


def _read_head(file: Path | Readable) -> bytes:
    if isinstance(file, Path):
        with open(file, "rb") as opened:
            return opened.read(_HEAD)
    file.seek(0)
    return file.read(_HEAD)


def _is_heif(head: bytes) -> bool:
    """Return whether ``head``, a file's first bytes, names a brand of HEIF (ISO/IEC 23008-12)."""
    brands = {head[start : start + 4] for start in range(8, len(head), 4)}
    return head[4:8] == b"ftyp" and bool(brands & _HEIF_BRANDS)


@contextmanager
def prefix_errors(item: str) -> Iterator[None]:
    """Prefix the message of a ValueError raised in the block by ``item``, such as "image 3"."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{item}: {error}") from error


def require_file(path: str | os.PathLike[str], kind: str, several: str) -> None:
    """Raise a ValueError if no file has this path.

    ``os.path`` answers for any path; before Python 3.13 pathlib raises for a name of over 255
    bytes.

    Args:
        path: the path to look at.
        kind: what the file should be, such as "an image file".
        several: what a folder may contain, such as "images".
    """
    if os.path.isdir(path):
        raise ValueError(f"is a folder; pass the paths of the {several} in it")
    if not os.path.isfile(path):
        raise ValueError(f"there is no such file; pass the path of {kind}")


def refuse_address(file: str | os.PathLike[str], fix: str) -> None:
    """Raise a ValueError if ``file`` is a URL, even if ``Path`` has reduced its ``//`` to ``/``.

    Args:
        file: the path as the caller gave it.
        fix: the end of the message, which says how to pass the file that the URL names.
    """
    if str(file).lower().startswith(("http:/", "https:/")):
        raise ValueError(f"is a URL, and nothing is downloaded here: {fix}")


def lock_of(image: object) -> threading.Lock:
    """Return the lock to hold while an image or file is read; several objects may share one."""
    return _LOCKS[id(image) % len(_LOCKS)]
