"""One image of an embedding job, and how its bytes are read when it is decoded."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, TypeAlias

from ..fetching import Fetcher
from .files import beside, is_remote, is_web, read_file, require_version
from .tables import DATASET, DataSet, ParquetTable
from .tars import NOWHERE, read_sparse


class SourceOptions(NamedTuple):
    """Where images are inside other files, and what names in lists and cells may say."""

    column: str = "image"
    """The name of the column that holds the images in parquet files and data sets."""
    subset: str | None = None
    """The name of the configuration (subset) of a data set."""
    split: str = "train"
    any_path: bool = False
    """Whether a list of files or a table cell may name files outside its own folder."""
    fetch_urls: bool = False
    """Whether a list of files or a table cell may name https URLs, which are then read."""


FileKind: TypeAlias = Literal["file", "member", "sparse", "row", "url"]
"""An image file, a member or sparse member of a tar file, a row of a table, or a URL."""


class File(NamedTuple):
    """One image of a job."""

    key: str
    """Path relative to the source, with forward slashes; names the image in the result."""
    path: str
    """Absolute path or address of the image file, or of the file that holds the image."""
    size: int = -1
    """The bytes of the image file, -1 if their number is not known."""
    version: str = ""
    """A text that changes with the content of ``path``; empty if the store gives none."""
    kind: FileKind = "file"
    place: int = 0
    """The offset of the image in a tar file, or the number of its row in a table."""


class ImageReader:
    """Reads the images of a job; any thread may call it.

    Args:
        options: column, split and permissions with which the source was listed.
        keyed: whether to keep a digest of the content of each image that is read, its key.

    Attributes:
        options: column, split and permissions with which the source was listed.
        keys: if ``keyed``, the key of each image that was read, by its file. Nothing removes them
            but the caller.
    """

    def __init__(self, options: SourceOptions, keyed: bool = False) -> None:
        self.options, self.keyed = options, keyed
        self.keys: dict[File, str] = {}
        self._opened_table = lru_cache(maxsize=16)(self._open_table)

    def item(self, file: File) -> Readable:
        """Return an image in the form in which ``encode_many`` takes it."""
        return Readable(self, file)

    def read(self, file: File) -> bytes:
        """Return the bytes of an image file.

        Raises:
            OSError, ValueError: the bytes cannot be read, have changed, or must not be read.
        """
        content = self._read(file)
        if self.keyed:
            self.keys[file] = content_key(content)
        return content

    def _read(self, file: File) -> bytes:
        if file.kind == "url":
            return self._read_url(file.path)
        if file.kind == "row":
            table = self._opened_table(file.path, file.version)
            return self._read_cell(table.cell(file.place), table.folders)
        if file.kind == "sparse":
            return read_sparse(file.path, file.version, file.place)
        if file.kind == "member":
            if file.place == NOWHERE:
                raise OSError(f"is a link that names no file of {file.path}")
            return read_file(file.path, file.version, file.place, file.size)
        if is_remote(file.path) and file.size > 0:  # with a range, fsspec asks for no size first
            content = read_file(file.path, "", 0, file.size)
            require_version(file.path, file.version)
            return content
        return read_file(file.path, file.version)

    def changed(self, files: Sequence[File]) -> dict[int, str]:
        """Find images whose remote tar file has changed while they were read.

        A member of it is one request, which says nothing about the whole file. So each tar file is
        looked at again after the last of its images.

        Args:
            files: the files of a shard that was encoded.

        Returns:
            The change of each such image as text, by its place in ``files``.
        """
        errors: dict[tuple[str, str], str] = {}
        for tar in {(f.path, f.version) for f in files if f.kind == "member"}:
            if is_remote(tar[0]):
                try:
                    require_version(*tar)
                except OSError as error:
                    errors[tar] = str(error)
        places = enumerate((file.path, file.version) for file in files)
        return {place: errors[tar] for place, tar in places if tar in errors}

    def _open_table(self, path: str, version: str) -> ParquetTable | DataSet:
        column, subset, split, *_ = self.options
        if path.startswith(DATASET) and not path.endswith(".parquet"):
            return DataSet(path.removeprefix(DATASET), version, column, subset, split)
        return ParquetTable(path, version, column)

    def _read_cell(self, cell: object, folders: tuple[str, ...]) -> bytes:
        url = url_in(cell)
        if url is not None:
            return self._read_url(url)
        if isinstance(cell, dict):
            cell = cell.get("bytes") or cell.get("path")
        if isinstance(cell, str):
            return read_file(self._allowed(cell, folders))
        if not isinstance(cell, bytes):
            raise OSError(f"holds {type(cell).__name__}, not the bytes or the path of an image")
        return cell

    def _allowed(self, name: str, folders: tuple[str, ...]) -> str:
        """Return the path of a file named by a table cell, in the first folder that may hold it."""
        for folder in folders[:-1]:
            try:
                return beside(folder, name, False)
            except ValueError:
                continue
        return beside(folders[-1], name, self.options.any_path)

    def _read_url(self, url: str) -> bytes:
        if not self.options.fetch_urls:
            raise ValueError(refuse_url(url))
        return self._fetcher.read(url)

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher()


class Readable:
    """An open image file for ``preprocess``, which is read when its first byte is wanted."""

    def __init__(self, reader: ImageReader, file: File) -> None:
        self._reader, self._file = reader, file
        self._bytes: io.BytesIO | None = None

    def _opened(self) -> io.BytesIO:
        if self._bytes is None:
            self._bytes = io.BytesIO(self._reader.read(self._file))
        return self._bytes

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, as a file does."""
        return self._opened().read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a position in the file, as ``seek`` of a file does."""
        return self._opened().seek(offset, whence)

    def tell(self) -> int:
        """Return the position in the file, as ``tell`` of a file does."""
        return self._opened().tell()


def content_key(content: bytes) -> str:
    """Return the key of an image file in a feature store: the SHA-256 of its bytes, in hexadecimal.

    Args:
        content: the bytes of the file.
    """
    return hashlib.sha256(content).hexdigest()


def refuse_url(url: str) -> str:
    """Return why a URL in a list or a cell is not read, and which option reads it."""
    return (
        f"{url} is a URL, and nothing is downloaded unless asked for: give --fetch-urls, or "
        "download the images and embed their folder"
    )


def url_in(cell: object) -> str | None:
    """Return the URL that a cell of a table holds in the place of an image, None if it has none."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    return cell if isinstance(cell, str) and is_web(cell) else None
