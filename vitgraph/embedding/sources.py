"""The images that a source of ``vitgraph embed`` names, and how each is read.

A source is a folder, a pattern, a list of paths, or a data set of the Hub. Where a pattern or a
list names tar files or parquet files, the images inside are meant. Nothing is read ahead here: an
image inside another file is read when it is decoded, in the thread that decodes it.
"""

from __future__ import annotations

import glob
import io
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .containers import (
    DATASET,
    Columns,
    ParquetReader,
    Reader,
    TarReader,
    list_members,
    open_dataset,
)

SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("apng", "avif", "bmp", "dib", "gif", "ico", "j2k", "jfif", "jp2", "jpe", "jpeg", "jpg"),
        *("pbm", "pgm", "png", "pnm", "ppm", "tga", "tif", "tiff", "webp"),
    )
)
"""Files of a folder or a tar file that are taken for images; a list or a pattern may name any."""
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class File(NamedTuple):
    """One image of a job."""

    key: str
    """Path relative to the source, with forward slashes; names the image in the result."""
    path: str
    """Of the image file, or of the file that holds it."""
    size: int
    """Bytes, -1 if there is no such file or it is not known."""
    place: int = 0
    """Offset in a tar file, or number of the row."""
    reader: Reader | None = None
    """None for a file of its own."""

    def item(self) -> str | Readable:
        """Return what ``encode_many`` takes for this image."""
        return self.path if self.reader is None else Readable(self)

    def read(self) -> bytes:
        """Return the bytes of the image file.

        Raises:
            OSError: they cannot be read.
        """
        if self.reader is not None:
            return self.reader.read(self.path, self.place, self.size)
        with open(self.path, "rb") as file:
            return file.read()


class Readable:
    """An open image file for ``preprocess``, which is read when its first byte is wanted."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._bytes: io.BytesIO | None = None

    def _opened(self) -> io.BytesIO:
        if self._bytes is None:
            self._bytes = io.BytesIO(self._file.read())
        return self._bytes

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, as a file does."""
        return self._opened().read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a place, as a file does."""
        return self._opened().seek(offset, whence)

    def tell(self) -> int:
        """Return the place, as a file does."""
        return self._opened().tell()


def find_files(source: str, columns: Columns | None = None) -> list[File]:
    """Return the images that a source names, sorted by key; a list keeps its order.

    Args:
        source: a folder, a pattern, a text file of paths, "-" for paths on standard input, a tar
            file, a parquet file, or "hf://datasets/NAME".
        columns: where images are in parquet files and data sets; None for the defaults.

    Raises:
        ValueError: no image is named, or a file that should hold some cannot be read.
    """
    path = Path(source)
    columns = columns or Columns()
    if source.startswith(DATASET):
        reader, count = open_dataset(source[len(DATASET) :], columns)
        start = f"{columns.split}/"
        files = [File(f"{start}{row}", source, -1, row, reader) for row in range(count)]
    elif source == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):  # strict, unless the locale is C
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        files = _inside(_listed(sys.stdin.read(), Path()), columns)
    elif path.is_dir():
        files = sorted(_walk(path))
    elif path.suffix.lower() == ".txt" and path.is_file():
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        files = _inside(_listed(text, path.parent), columns)
    elif path.is_file():
        files = _inside([_file(source, path.parent)], columns)
    else:
        fixed = path.parts[:-1]
        depth = next((n for n, part in enumerate(fixed) if glob.has_magic(part)), len(fixed))
        root = Path(*fixed[:depth])
        names = sorted(glob.glob(source, recursive=True))
        named = sorted(_file(name, root) for name in names if os.path.isfile(name))
        files = _inside(named, columns)
    if not files:
        raise ValueError(
            f"{source}: names no image; give a folder with images, a pattern in quotes, a .txt "
            f"file with one path per line, - for paths on standard input, or {DATASET}NAME"
        )
    return files


def _walk(root: Path) -> Iterator[File]:
    """Image files below a folder; names that begin with a dot are left out.

    Raises:
        OSError: a folder cannot be read; its images would be missing in silence.
    """
    for folder, folders, names in os.walk(root, onerror=_fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(folder).relative_to(root).as_posix()
        start = "" if inside == "." else f"{inside}/"
        for name in names:
            if _is_image(name):
                path = os.path.join(folder, name)
                yield File(start + name, path, _size(path))


def _fail(error: OSError) -> None:
    raise error


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def _listed(text: str, root: Path) -> list[File]:
    """The files that a list names; splitlines() would also end a line at U+2028 in a name."""
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    return [_file(str(root / line), root) for line in lines if line.strip()]


def _file(name: str, root: Path) -> File:
    path = Path(name)
    inside = path.is_relative_to(root)
    key = (path.relative_to(root) if inside else path).as_posix()
    return File(key, name, _size(name))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _inside(files: Iterable[File], columns: Columns) -> list[File]:
    """The files, with the images inside in the place of each tar file and each parquet file."""
    found: list[File] = []
    tar, parquet = TarReader(), ParquetReader(columns.column)
    for file in files:
        name = file.path.lower()
        if name.endswith(_COMPRESSED):
            raise ValueError(
                f"{file.path}: is compressed, so that no image in it can be reached without "
                "reading all before it; decompress it to a .tar file"
            )
        if name.endswith(".tar"):
            found += [
                File(f"{file.key}/{member.name}", file.path, member.size, member.place, tar)
                for member in list_members(file.path)
                if _is_image(os.path.basename(member.name))
            ]
        elif name.endswith(".parquet"):
            found += [
                File(f"{file.key}/{row}", file.path, -1, row, parquet)
                for row in range(parquet.count_rows(file.path))
            ]
        else:
            found.append(file)
    return found
