"""The description of one image or clip of an embedding job, and the reading of its bytes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ...fetching import Fetcher, is_url
from .files import is_remote, path_beside, read_file, require_version
from .tables import DATASET, DataSet, ParquetTable, RowGroups
from .tars import NOWHERE, read_sparse

if TYPE_CHECKING:
    from encoders.inputs import ItemLike


class SourceOptions(NamedTuple):
    """The options for images inside tables and datasets, and for file names in lists and table
    cells.
    """

    column: str = "image"
    """The name of the column with the images in parquet files and datasets."""
    subset: str | None = None
    """The name of the configuration (subset) of a dataset."""
    split: str = "train"
    """The name of the split of a dataset."""
    any_path: bool = False
    """Whether a list or a table may name files outside the folder in which it lies."""
    fetch_urls: bool = False
    """Whether a list or a table may name https URLs, which are then downloaded."""
    clips: bool = False
    """Whether clips are listed, too, and not only images."""


FileKind: TypeAlias = Literal["file", "member", "sparse", "row", "url"]
"""The place of an image's bytes: a file, a member of a tar file, a sparse member of a tar file, a
row of a table, or a URL."""


Media: TypeAlias = Literal["image", "clip"]
"""The kind of an item: an image, or a clip, which is a video."""


class File(NamedTuple):
    """One image or clip of an embedding job, and where its bytes are."""

    key: str
    """The name of the image in the results: its path relative to the folder, list or dataset that
    ``vitgraph embed`` was given, with forward slashes."""
    path: str
    """Absolute path or address of the image file, or of the tar file or table that holds the image.
    """
    size: int = -1
    """The size of the image file in bytes; -1 if it is not known."""
    version: str = ""
    """A text that changes with the content of the file at ``path``; empty if there is none."""
    kind: FileKind = "file"
    position: int = 0
    """The byte offset of the image in a tar file, or the number of its row in a table, from 0."""
    media: Media = "image"


class ImageReader:
    """Reads the images of a job; all methods may be called from any thread.

    Args:
        options: the column, split and permissions with which the images were listed.
        keyed: whether to keep the SHA-256 of each image that is read, its key in a feature store.

    Attributes:
        options: the column, split and permissions with which the images were listed.
        keys: if ``keyed``, the SHA-256 of each image that was read, until the caller removes it.
    """

    def __init__(self, options: SourceOptions, keyed: bool = False) -> None:
        self.options, self.keyed = options, keyed
        self.keys: dict[File, str] = {}
        self._opened_table = lru_cache(maxsize=16)(partial(_open_table, options, RowGroups()))

    def item(self, file: File) -> ItemLike:
        """Return an image or a clip for ``encode_many``; its bytes are read when it is decoded."""
        if file.media == "clip":
            return {"video": self.clip(file)}
        # Paths are read fastest, and `changed` looks at files whose version is known.
        is_path = _is_on_disk(file) and file.version and not self.keyed
        return file.path if is_path else Readable(self, file)

    def clip(self, file: File) -> str | Readable:
        """Return the path of a clip on a local disk, so that a long film need not fit into memory,
        and any other clip as a file-like object.
        """
        return file.path if _is_on_disk(file) else Readable(self, file)

    def read(self, file: File) -> bytes:
        """Return the bytes of an image file.

        Raises:
            OSError: the file cannot be read, or has changed since the job listed it.
            ValueError: the image is a URL, or lies outside the folder of the table that names it,
                and ``options`` does not permit that.
        """
        content = self._read(file)
        if self.keyed:
            self.keys[file] = content_key(content)
        return content

    def take_key(self, file: File) -> str:
        """Return the key of an image that was read, and remove it; empty unless ``keyed``."""
        if not self.keyed:
            return ""
        key = self.keys.pop(file, None)
        # A list may name a file twice, and another item has taken its key.
        return content_key(self._read(file)) if key is None else key

    def _read(self, file: File) -> bytes:
        if file.kind == "url":
            return self._read_url(file.path)
        if file.kind == "row":
            table = self._opened_table(file.path, file.version)
            return self._read_cell(table.cell(file.position), table.folders)
        if file.kind == "sparse":
            return read_sparse(file.path, file.version, file.position)
        if file.kind == "member":
            if file.position == NOWHERE:
                raise OSError(f"is a link that names no file of {file.path}")
            return read_file(file.path, file.version, file.position, file.size)
        if is_remote(file.path) and file.size > 0:  # with a byte range, fsspec asks for no size
            content = read_file(file.path, "", 0, file.size)
            require_version(file.path, file.version)
            return content
        return read_file(file.path, file.version)

    def changed(self, files: Sequence[File]) -> dict[int, str]:
        """Find images inside remote tar files, and local files, that have changed since the job
        listed them.

        Each member of a tar file is read by a request of its own, whose answer does not show
        whether the tar file has changed; a local file is read by its path. Therefore this is called
        after all images of a shard are read.

        Args:
            files: the images of the shard.

        Returns:
            An error text for each image in a changed file, by the image's index in ``files``.
        """
        errors: dict[tuple[str, str], str] = {}
        for path, version in {(f.path, f.version) for f in files if _is_unchecked(f)}:
            try:
                require_version(path, version)
            except OSError as error:
                errors[path, version] = str(error)
        if not errors:
            return {}
        versions = enumerate((file.path, file.version) for file in files)
        return {index: errors[tar] for index, tar in versions if tar in errors}

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
        """Return the path of a file that a table cell names."""
        for folder in folders[:-1]:
            try:
                return path_beside(folder, name, False)
            except ValueError:
                continue
        return path_beside(folders[-1], name, self.options.any_path)

    def _read_url(self, url: str) -> bytes:
        if not self.options.fetch_urls:
            raise ValueError(refusal_of_url(url))
        return self._fetcher.read(url)

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher()


def _open_table(
    options: SourceOptions, groups: RowGroups, path: str, version: str
) -> ParquetTable | DataSet:
    column, subset, split, *_ = options
    if path.startswith(DATASET) and not path.endswith(".parquet"):
        return DataSet(path.removeprefix(DATASET), version, column, subset, split)
    return ParquetTable(path, version, column, groups)


def _is_unchecked(file: File) -> bool:
    """Return whether reading a file does not show that it has changed since the job listed it."""
    return file.kind == ("member" if is_remote(file.path) else "file")


def _is_on_disk(file: File) -> bool:
    return file.kind == "file" and not is_remote(file.path)


class Readable:
    """A file-like object of an item for ``preprocess``; the first method call reads the bytes."""

    def __init__(self, reader: ImageReader, file: File) -> None:
        self._reader, self._file = reader, file
        self._bytes: io.BytesIO | None = None

    def _opened(self) -> io.BytesIO:
        if self._bytes is None:
            self._bytes = io.BytesIO(self._reader.read(self._file))
        return self._bytes

    def read(self, size: int = -1, /) -> bytes:
        """Return the next ``size`` bytes, or all that are left for -1, like ``io.BytesIO.read``."""
        return self._opened().read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a position in the file, like ``io.BytesIO.seek``."""
        return self._opened().seek(offset, whence)

    def tell(self) -> int:
        """Return the position in the file, like ``io.BytesIO.tell``."""
        return self._opened().tell()


def content_key(content: bytes) -> str:
    """Return the key of an image in a feature store for vLLM: the SHA-256 of its file's bytes.

    Args:
        content: the bytes of the image file.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(content).hexdigest()


def refusal_of_url(url: str) -> str:
    """Return the error text for an image that is a URL, if ``--fetch-urls`` is missing."""
    return (
        f"{url} is a URL, and nothing is downloaded unless asked for: give --fetch-urls, or "
        "download the images and embed their folder"
    )


def url_in(cell: object) -> str | None:
    """Return the URL that a table cell holds instead of an image; None if it holds no URL."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    return cell if is_url(cell) else None
