"""The files of an embedding job: a manifest, and shards of a fixed number of items.

In the folder of a job::

    manifest.json      what every shard has in common, and a digest of it
    00000.npy          the vectors of shard 0, [rows, D]; or 00000.safetensors, 00000.parquet
                       (:mod:`vitgraph.embedding.parquet_files`)
    00000.csv          its row table: one line per row, with the key of the item
    00000_stats.json   written last: the shard is done
    errors.csv         the items that could not be encoded

With ``pool="none"`` there is one array per field, ``00000.pooler_output.npy``, or one column of a
parquet file. The row table says which rows belong to an item, from ``offset`` on ``tokens`` rows of
``pooler_output`` and of a DeepStack feature, from ``row_offset`` on ``rows`` rows of
``last_hidden_state``, and its grid (``t``, ``h``, ``w``). Every file is written under a temporary
name that ends in ``.tmp``, and renamed when it is whole.

A shard is done when its ``_stats.json`` is there. That file holds the size and the CRC-32 of the
others and, for each item that could not be encoded, its place in the shard.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from .manifest import Manifest, alone, checksum, writing
from .parquet_files import EMBEDDING, read_arrays, write_tokens, write_vectors

Array = np.ndarray[Any, Any]
FORMATS = ("npy", "safetensors", "parquet")
VECTORS = "embeddings"
"""Name of the array of a pooled shard."""
SPARE = 1 << 20
"""Bytes that have to stay free beside the arrays of a shard, for its row table and statistics."""
_STATS = frozenset(("items", "rows", "copies", "seconds", "errors"))
"""What is read of the statistics."""
_TEXT = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}


class Row(NamedTuple):
    """One item of a shard that was encoded."""

    key: str
    content: str
    """Digest of the file where another file of its size exists, else empty."""
    grid: tuple[int, int, int]
    arrays: dict[str, Array]
    """By field, or the one vector [D] under :data:`VECTORS`."""


class Shard:
    """The files of one shard."""

    def __init__(self, folder: Path, number: int, format: str, pool: str) -> None:
        self.folder, self.number, self.format, self.pool = folder, number, format, pool

    def path(self, ending: str) -> Path:
        """The file of this shard with this ending."""
        return self.folder / f"{self.number:05d}{ending}"

    @property
    def is_done(self) -> bool:
        """Whether the shard was written as a whole."""
        return self.path("_stats.json").exists()

    def write(
        self, rows: Sequence[Row], empty: Mapping[str, Array], stats: Mapping[str, Any]
    ) -> None:
        """Write arrays, row table and statistics, in this order; nothing if the shard is done.

        One process at a time writes a shard, so that all its files come from one of them.

        Args:
            rows: the items that were encoded, in order.
            empty: an array without rows per field, for a shard without items.
            stats: plain data.

        Raises:
            OSError: the folder cannot be written to, or the disk is full; the shard is not done.
        """
        lock = self.folder / f".{self.number:05d}.lock.tmp"
        with alone(lock):
            if not self.is_done:  # by another process, meanwhile
                self._write(rows, empty, stats)
            lock.unlink(missing_ok=True)

    def _write(
        self, rows: Sequence[Row], empty: Mapping[str, Array], stats: Mapping[str, Any]
    ) -> None:
        join = np.stack if self.pool != "none" else np.concatenate
        arrays = {
            name: join([row.arrays[name] for row in rows]) if rows else none
            for name, none in empty.items()
        }
        require_space(self.folder, sum(array.nbytes for array in arrays.values()))
        files: dict[str, list[int]] = {}
        self._write_arrays(arrays, rows, files)
        with self._checked(self.path(".csv"), files) as temporary:
            write_csv(temporary, list(self._table(rows)))
        with writing(self.path("_stats.json")) as temporary:
            temporary.write_text(json.dumps({**stats, "files": files}, indent=1) + "\n")

    def _write_arrays(
        self, arrays: Mapping[str, Array], rows: Sequence[Row], files: dict[str, list[int]]
    ) -> None:
        if self.format == "safetensors":
            with self._checked(self.path(".safetensors"), files) as temporary:
                save_file(dict(arrays), temporary)
        elif self.format == "parquet":
            keys = [row.key for row in rows]
            with self._checked(self.path(".parquet"), files) as temporary:
                if self.pool != "none":
                    write_vectors(temporary, keys, arrays[VECTORS])
                else:
                    counts = {name: [len(row.arrays[name]) for row in rows] for name in arrays}
                    write_tokens(temporary, keys, [row.grid for row in rows], arrays, counts)
        else:
            for name, array in arrays.items():
                with (
                    self._checked(self._npy(name), files) as temporary,
                    open(temporary, "wb") as file,
                ):
                    np.save(file, array)

    @contextmanager
    def _checked(self, path: Path, files: dict[str, list[int]]) -> Iterator[Path]:
        """A temporary name for ``path``; notes the size and the checksum of what is written."""
        with writing(path) as temporary:
            yield temporary
            files[path.name] = [temporary.stat().st_size, checksum(temporary)]

    def _npy(self, name: str) -> Path:
        return self.path(".npy" if name == VECTORS else f".{name}.npy")

    def _table(self, rows: Sequence[Row]) -> Iterator[Sequence[object]]:
        if self.pool != "none":
            yield "key", "content"
            yield from ((row.key, row.content) for row in rows)
            return
        yield "key", "t", "h", "w", "offset", "tokens", "row_offset", "rows", "content"
        offset = row_offset = 0
        for row in rows:
            t, h, w = row.grid
            hidden = row.arrays.get("last_hidden_state")
            tokens = max(
                (len(a) for name, a in row.arrays.items() if name != "last_hidden_state"), default=0
            )
            count = 0 if hidden is None else len(hidden)
            yield row.key, t, h, w, offset, tokens, row_offset, count, row.content
            offset, row_offset = offset + tokens, row_offset + count

    def read_table(self) -> list[dict[str, str]]:
        """The row table, one dict per row."""
        with open(self.path(".csv"), **_TEXT) as file:  # type: ignore[call-overload]
            return list(csv.DictReader(file))

    def read_stats(self) -> dict[str, Any]:
        """The statistics that the shard was written with.

        Raises:
            ValueError: their file is damaged.
        """
        path = self.path("_stats.json")
        try:
            stats: Any = json.loads(path.read_text())
        except ValueError:
            stats = None
        if not (isinstance(stats, dict) and stats.keys() >= _STATS):
            raise ValueError(f"{path}: is damaged; delete it and run the command of the job again")
        return stats

    def read_arrays(self, field: str | None = None) -> dict[str, Array]:
        """The arrays by name; those of npy files are mapped, not read.

        Args:
            field: the only one to read, if the shard has it; None for all.
        """
        if self.format == "parquet":
            pooled = self.pool != "none"
            columns = None if field is None or pooled else (field,)
            arrays = read_arrays(self.path(".parquet"), columns)
            return {VECTORS: arrays[EMBEDDING]} if pooled else arrays
        if self.format == "safetensors":
            with safe_open(self.path(".safetensors"), framework="numpy") as file:
                names = [name for name in file.keys() if field in (None, name)]  # noqa: SIM118
                return {name: file.get_tensor(name) for name in names}
        if self.pool != "none":
            return {VECTORS: np.load(self.path(".npy"), mmap_mode="r")}
        start = f"{self.number:05d}."
        paths = sorted(self.folder.glob(f"{start}*.npy"))
        named = {path.name[len(start) : -len(".npy")]: path for path in paths}
        return {
            name: np.load(path, mmap_mode="r")
            for name, path in named.items()
            if field in (None, name)
        }

    def read_places(self) -> list[int]:
        """The places of the rows among the items of the shard, those that failed included."""
        stats = self.read_stats()
        failed = {error["place"] for error in stats["errors"]}
        return [place for place in range(stats["items"]) if place not in failed]

    def read_rows_in_order(self, field: str | None = None) -> list[Row]:
        """The items of the shard.

        Args:
            field: the only one to read; None for all.

        Raises:
            ValueError: the row table and the arrays disagree.
        """
        arrays, table = self.read_arrays(field), self.read_table()
        if self.pool != "none":
            matrix = arrays[VECTORS]
            if len(table) != len(matrix):
                raise ValueError(f"{len(table)} lines of the row table for {len(matrix)} vectors")
            return [
                Row(line["key"], line["content"], (0, 0, 0), {VECTORS: vector})
                for line, vector in zip(table, matrix, strict=True)
            ]
        rows = []
        ends = dict.fromkeys(arrays, 0)
        for line in table:
            t, h, w, offset, tokens, row_offset, count = (
                int(line[name])
                for name in ("t", "h", "w", "offset", "tokens", "row_offset", "rows")
            )
            parts = {}
            for name, array in arrays.items():
                hidden = name == "last_hidden_state"
                start, length = (row_offset, count) if hidden else (offset, tokens)
                parts[name] = array[start : start + length]
                ends[name] = start + length
            rows.append(Row(line["key"], line["content"], (t, h, w), parts))
        for name, end in ends.items():
            if end != len(arrays[name]):
                raise ValueError(f"the row table describes {end} of {len(arrays[name])} {name}")
        return rows


def write_csv(path: Path, table: Sequence[Sequence[object]]) -> None:
    """Write a table; names of files that are not UTF-8 keep their bytes."""
    # The writer leaves a carriage return bare that its reader takes for the end of a line.
    odd = any("\r" in str(cell) for line in table for cell in line)
    with open(path, "w", **_TEXT) as file:  # type: ignore[call-overload]
        csv.writer(
            file, lineterminator="\n", quoting=csv.QUOTE_ALL if odd else csv.QUOTE_MINIMAL
        ).writerows(table)


def read_embeddings(folder: Path, field: str | None = None) -> tuple[list[str], Array]:
    """See :func:`vitgraph.features.load_embeddings`."""
    manifest = Manifest.read(folder)
    pool, format = manifest.settings["pool"], manifest.settings["format"]
    if pool == "none":
        first: str = manifest.settings["fields"][0]
        field = field or ("deepstack.0" if first == "deepstack_features" else first)
    elif field is not None:
        raise ValueError(
            f"field={field!r}: {folder} was made with --pool {pool} and holds one vector per item; "
            "leave field out"
        )
    shards = [Shard(folder, number, format, pool) for number in range(manifest.shards)]
    missing = [shard.number for shard in shards if not shard.is_done]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing, the first is "
            f"{missing[0]}; run the same command again, it goes on where it was"
        )
    if field is not None:
        return _read_items(shards, field)
    keys: list[str] = []
    matrices = []
    for shard in shards:
        table, matrix = shard.read_table(), shard.read_arrays()[VECTORS]
        if len(table) != len(matrix):
            raise ValueError(
                f"{shard.path('.csv')}: has {len(table)} rows, the matrix {len(matrix)}; delete "
                f"{shard.path('_stats.json').name} and run the same command again"
            )
        keys += [line["key"] for line in table]
        matrices.append(matrix)
    return keys, np.concatenate(matrices)


def _read_items(shards: Sequence[Shard], field: str) -> tuple[list[str], Array]:
    """The keys of all items, and an array of objects that has the rows of each in a field."""
    rows: list[Row] = []
    for shard in shards:
        some = shard.read_rows_in_order(field)
        if some and field not in some[0].arrays:
            raise ValueError(
                f"field={field!r}: {shard.folder} holds {', '.join(shard.read_arrays())}; name "
                "one of these"
            )
        rows += some
    items = np.empty(len(rows), object)
    for number, row in enumerate(rows):  # one by one: numpy would stack arrays of one shape
        items[number] = row.arrays[field]
    return [row.key for row in rows], items


def require_space(folder: Path, count: int) -> None:
    """Check that a folder has room for more bytes.

    Raises:
        OSError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if count + SPARE > free:
        raise OSError(
            errno.ENOSPC,
            f"no space for a shard of {count:,} bytes and {SPARE:,} beside it, {free:,} are free; "
            "what is written stays: free some space and run the same command again",
            os.fspath(folder),
        )
