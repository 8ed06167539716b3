"""Files and data sets that hold many images: tar files, parquet files, Hugging Face data sets."""

from __future__ import annotations

import os
import tarfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from .parquet_files import require_parquet

DATASET = "hf://datasets/"
"""How the name of a data set of the Hub begins."""


class Columns(NamedTuple):
    """Where the images of a parquet file or a data set are."""

    column: str = "image"
    subset: str | None = None
    """Configuration of the data set."""
    split: str = "train"


class Reader(Protocol):
    """Reads single images out of what holds many; any thread may call it."""

    def read(self, path: str, place: int, size: int) -> bytes:
        """Return the bytes of an image file.

        Args:
            path: what holds the image.
            place: its offset in bytes, or its row.
            size: its bytes, -1 if that is not known.

        Raises:
            OSError: it cannot be read.
        """
        ...


class Member(NamedTuple):
    """One image inside a tar file."""

    name: str
    place: int
    size: int


class TarReader:
    """Reads members of tar files from their offsets."""

    def read(self, path: str, place: int, size: int) -> bytes:
        """Return the ``size`` bytes from offset ``place`` on.

        Raises:
            OSError: the tar file is gone or has become shorter.
        """
        with open(path, "rb") as opened:
            opened.seek(place)
            found = opened.read(size)
        if len(found) < size:
            raise OSError(f"{path}: ends before byte {place + size:,}")
        return found


def list_members(path: str) -> Iterator[Member]:
    """Yield the files in a tar file, in its order; only headers are read.

    Raises:
        ValueError: it is no tar file, or is damaged.
    """
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as opened:
            for member in opened:
                opened.members = []  # type: ignore[attr-defined]  # else it keeps all headers
                if member.isreg():
                    yield Member(member.name, member.offset_data, member.size)
            # tarfile takes a damaged or missing header for the end, where zeros should be.
            file.seek(opened.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise OSError(f"its list of files breaks off at byte {opened.offset:,}")
    except (tarfile.TarError, OSError) as error:
        raise ValueError(
            f"{path}: cannot be read as a tar file ({error}); replace it or leave it out"
        ) from error


class ParquetReader:
    """Reads images in a column of parquet files; the last row groups are kept.

    Args:
        column: holds bytes, paths relative to the file, or {"bytes", "path"} as ``datasets`` has.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self._ends: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._group = lru_cache(maxsize=4)(self._read_group)

    def count_rows(self, path: str) -> int:
        """Read the footer of a file, and return the number of its rows.

        Raises:
            ValueError: it is no parquet file, or has no such column.
        """
        require_parquet()
        from pyarrow import ArrowException, parquet

        try:
            with parquet.ParquetFile(path) as file:
                groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
                names = file.schema_arrow.names
        except (ArrowException, OSError) as error:
            raise ValueError(f"{path}: cannot be read as a parquet file ({error})") from error
        require_column(path, self.column, names)
        self._ends[path] = list(accumulate(groups))
        return sum(groups)

    def read(self, path: str, place: int, size: int) -> bytes:
        """Return the image file in row ``place``.

        Raises:
            OSError: the row or the file that it names cannot be read.
        """
        ends = self._ends[path]
        group = bisect_right(ends, place)
        with self._lock:
            column = self._group(path, group)
        cell = column[place - (ends[group - 1] if group else 0)].as_py()
        return _bytes_of(cell, os.path.dirname(path))

    def _read_group(self, path: str, group: int) -> Any:
        from pyarrow import ArrowException, parquet

        try:
            with parquet.ParquetFile(path) as file:
                return file.read_row_group(group, columns=[self.column])[self.column]
        except ArrowException as error:
            raise OSError(f"{path}: cannot be read ({error})") from error


class DatasetReader:
    """Reads images in a column of a data set, undecoded.

    Args:
        dataset: of the ``datasets`` package.
        column: its name.
    """

    def __init__(self, dataset: Any, column: str) -> None:
        self.dataset, self.column = dataset, column
        self._lock = threading.Lock()

    def read(self, path: str, place: int, size: int) -> bytes:
        """Return the image file in row ``place``.

        Raises:
            OSError: the file that the row names cannot be read.
        """
        with self._lock:
            cell = self.dataset[place][self.column]
        return _bytes_of(cell, "")


def open_dataset(name: str, columns: Columns) -> tuple[DatasetReader, int]:
    """Have the ``datasets`` package download a data set, or find it; return its number of rows.

    Args:
        name: on the Hub, with ``@`` and a revision if wanted; or a folder.
        columns: which subset and split, and where the images are.

    Raises:
        ValueError: the package is not installed, or there is no such column.
    """
    try:
        from datasets import Image, load_dataset
    except ImportError:
        raise ValueError(
            f"{DATASET}{name}: is read by the datasets package: pip install datasets"
        ) from None
    name, _, revision = name.partition("@")
    dataset: Any = load_dataset(
        name, columns.subset, split=columns.split, revision=revision or None
    )
    require_column(name, columns.column, dataset.column_names)
    if isinstance(dataset.features[columns.column], Image):
        dataset = dataset.cast_column(columns.column, Image(decode=False))
    return DatasetReader(dataset.select_columns([columns.column]), columns.column), len(dataset)


def require_column(name: str, column: str, names: Sequence[str]) -> None:
    """Check that a file or data set has a column.

    Raises:
        ValueError: it has not; the message names those that it has.
    """
    if column not in names:
        raise ValueError(
            f"{name}: has no column {column!r}; name one of {', '.join(names)} with --column"
        )


def _bytes_of(cell: Any, folder: str) -> bytes:
    """The bytes of an image in a cell."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, str):
        with open(os.path.join(folder, cell), "rb") as file:
            return file.read()
    if not isinstance(cell, bytes):
        raise OSError(f"holds {type(cell).__name__}, not the bytes or the path of an image")
    return cell
