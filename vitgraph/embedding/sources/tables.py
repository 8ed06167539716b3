"""Images in table columns, of parquet files or of datasets that the ``datasets`` package reads."""

from __future__ import annotations

import os
import posixpath
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ...packages import require_pyarrow
from .files import is_remote, open_file, state_of

if TYPE_CHECKING:
    import datasets
    import pyarrow as arrow

DATASET = "hf://datasets/"
"""The beginning of the address of a dataset of the Hub."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FEWEST_GROUPS, _GROUP_BYTES = 4, 1 << 28
"""The row groups that are kept in memory whatever their size, and the bytes of more."""


class RowGroups:
    """The row groups of all tables of a reader that were read last.

    There are at least four, as threads read rows of several at once, and more while all of them
    have 256 MiB at most.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, str, int], arrow.ChunkedArray] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, path: str, version: str, column: str, group: int) -> arrow.ChunkedArray:
        """Return the cells of a column in a row group, counted from 0, of a parquet file.

        Raises:
            OSError: the file cannot be read, or has changed.
        """
        key = path, version, column, group
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        cells = _read_group(*key)
        with self._lock:
            if key not in self._kept:  # another thread may have read it
                self._kept[key] = cells
                self._bytes += cells.nbytes
            while len(self._kept) > _FEWEST_GROUPS and self._bytes > _GROUP_BYTES:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return cells


def _read_group(path: str, version: str, column: str, group: int) -> arrow.ChunkedArray:
    from pyarrow import ArrowException, parquet

    try:
        with open_file(path, version) as file, parquet.ParquetFile(file) as table:
            return table.read_row_group(group, columns=[column])[column]
    except ArrowException as error:
        raise OSError(f"{path}: cannot be read ({error})") from error


class ParquetTable:
    """A column of images in a parquet file, local or remote.

    Args:
        path: path or address of the file.
        version: the text for its content that ``files.version_of`` returned when the job listed the
            file; empty checks nothing.
        column: name of the column. Its cells are bytes, paths relative to the file's folder, or
            dicts with the keys "bytes" and "path", as the ``datasets`` package writes them.
        groups: keeps row groups for several tables; None keeps those of this one.

    Raises:
        ValueError: the file is no parquet file, or has no such column.
        OSError: the file cannot be read, or has changed.
    """

    def __init__(
        self, path: str, version: str, column: str, groups: RowGroups | None = None
    ) -> None:
        require_pyarrow()
        from pyarrow import ArrowException, parquet

        self.path, self.version, self.column = path, version, column
        self.folders = (posixpath.dirname(path) if is_remote(path) else os.path.dirname(path),)
        """The only folder in which files named in cells may lie; their names are relative to it."""
        try:
            with open_file(path, version) as file, parquet.ParquetFile(file) as table:
                counts = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
                schema = table.schema_arrow
        except (ArrowException, OSError) as error:
            raise ValueError(f"{path}: cannot be read as a parquet file ({error})") from error
        require_column(path, column, schema.names)
        self.holds_text = "string" in str(schema.field(column).type)
        """Whether a table cell may hold a path or a URL."""
        self._ends = list(accumulate(counts))
        self._lock = threading.Lock()
        self._groups = RowGroups() if groups is None else groups

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def cell(self, row: int) -> object:
        """Return the content of the cell in a row, counted from 0; any thread may call it.

        Raises:
            OSError: the cell cannot be read, or the file has changed.
        """
        group = bisect_right(self._ends, row)
        with self._lock:
            cells = self._groups.read(self.path, self.version, self.column, group)
        return cells[row - (self._ends[group - 1] if group else 0)].as_py()


class DataSet:
    """A column of images in a dataset; the images are not decoded.

    Args:
        name: repo id on the Hub followed by ``@`` and a commit, or a local folder.
        version: the text that :func:`pin_dataset` returned for a local folder, which changes with
            its files; empty for a repo.
        column: name of the column with the images.
        subset: configuration of the dataset; None takes the default configuration.
        split: name of the split, such as "train".

    Raises:
        ValueError: the ``datasets`` package is not installed, or there is no such column.
        OSError: the local folder has changed.
    """

    def __init__(
        self, name: str, version: str, column: str, subset: str | None, split: str
    ) -> None:
        require_datasets(name)
        import datasets
        from huggingface_hub.constants import HF_HUB_CACHE

        repo, _, revision = name.partition("@")
        self._rows: datasets.Dataset = datasets.load_dataset(
            repo, subset, split=split, revision=revision or None
        )
        if version and version != _state_of(repo):
            raise OSError(f"{repo}: has changed since the job listed it")
        require_column(repo, column, self._rows.column_names)
        for kind in (datasets.Image, datasets.Video):
            if isinstance(self._rows.features[column], kind):
                self._rows = self._rows.cast_column(column, kind(decode=False))
        self._rows = self._rows.select_columns([column])
        self.holds_text = "string" in str(self._rows.features[column])
        self.column = column
        caches = (str(datasets.config.HF_DATASETS_CACHE), HF_HUB_CACHE)
        self.folders = (repo,) if Path(repo).is_dir() else caches
        """The only folders in which files named in cells may lie."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def cell(self, row: int) -> object:
        """Return the content of the cell in a row, counted from 0; any thread may call it."""
        with self._lock:
            return self._rows[row][self.column]


def require_datasets(name: str) -> None:
    """Check that the ``datasets`` package is installed.

    Args:
        name: name of the dataset to read, for the error message.

    Raises:
        ValueError: the package is not installed.
    """
    if find_spec("datasets") is None:
        raise ValueError(f"{DATASET}{name}: needs the datasets package: pip install 'datasets>=4'")


def pin_dataset(name: str) -> tuple[str, str]:
    """Look up the commit of a dataset, so that all workers of a job read the same version of it.

    Args:
        name: repo id on the Hub, optionally followed by ``@`` and a revision, or a local folder.

    Returns:
        For a repo: its id followed by ``@`` and the commit, and an empty text. For a local folder:
        its name, and a text that changes with its files.

    Raises:
        ValueError: the commit cannot be looked up on the Hub.
    """
    require_datasets(name)
    repo, _, revision = name.partition("@")
    if os.path.isdir(repo):
        return name, _state_of(repo)
    if _COMMIT.fullmatch(revision):
        return name, ""
    return f"{repo}@{hub_commit(repo, revision)}", ""


def hub_commit(repo: str, revision: str = "") -> str:
    """Ask the Hub for the commit of a dataset.

    Args:
        repo: repo id of the dataset.
        revision: branch, tag or commit; empty for the main branch.

    Raises:
        ValueError: there is no such dataset or revision, or the Hub cannot be reached; the message
            suggests that the user names a commit.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        commit = HfApi().dataset_info(repo, revision=revision or None).sha
    except (HTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"{DATASET}{repo}: the Hub does not say its commit ({error}); name one, as in "
            f"{DATASET}{repo}@COMMIT"
        ) from error
    if commit is None:
        raise ValueError(f"{DATASET}{repo}: the answer of the Hub names no commit; name one")
    return commit


def is_dataset(source: str) -> bool:
    """Return whether a source is a whole dataset, on the Hub or in a local folder, and not single
    files of a dataset.
    """
    name = source.removeprefix(DATASET).partition("@")[0]
    return source.startswith(DATASET) and (os.path.isdir(name) or name.strip("/").count("/") < 2)


def pin_files(url: str) -> str:
    """Return an address of files in a dataset of the Hub with the commit of the dataset added.

    Args:
        url: ``hf://datasets/OWNER/NAME/PATH``, optionally with ``@`` and a revision after NAME.

    Raises:
        ValueError: ``url`` is no such address, or the commit cannot be looked up on the Hub.
    """
    match = re.fullmatch(rf"{DATASET}([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", url)
    if match is None:
        raise ValueError(f"{url}: files of the Hub are named {DATASET}OWNER/NAME/PATH")
    commit = match[2] or ""
    if not _COMMIT.fullmatch(commit):
        commit = hub_commit(match[1], commit)
    return f"{DATASET}{match[1]}@{commit}/{match[3]}"


def _state_of(folder: str) -> str:
    return state_of(filter(Path.is_file, sorted(Path(folder).rglob("*"))), Path(folder))


def require_column(name: str, column: str, names: Sequence[str]) -> None:
    """Check that a file or dataset has a column.

    Args:
        name: name of the file or dataset, for the error message.
        column: the column that must exist.
        names: the existing columns.

    Raises:
        ValueError: there is no such column; the message lists the existing columns.
    """
    if column not in names:
        raise ValueError(
            f"{name}: has no column {column!r}; name one of {', '.join(names)} with --column"
        )
