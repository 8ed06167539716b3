"""A shard of an embedding job: the files of a fixed number of items, written and read.

In the folder of a job::

    manifest.json      the settings of the job, the same for every shard
    files.*.jsonl      the list of all images, in order (:mod:`vitgraph.embedding.manifest`)
    00000.npy          the vectors of shard 0, [rows, D]; or 00000.safetensors, 00000.parquet
                       (:mod:`vitgraph.embedding.parquet_files`)
    00000.csv          the row table of shard 0: one line per encoded item, with its key and its
                       kind, "image" or "clip"
    00000_stats.json   the statistics of shard 0, written last: the shard is finished
    errors.csv         the images that could not be encoded

On a remote store without locks (``s3://``), several workers may write the same shard. So the file
names contain a random tag of the worker, ``00000.<tag>.npy``. Only one worker can create the
statistics, which name the files that are valid.

With ``pool="none"`` there is one array per output field, ``00000.pooler_output.npy``, or one column
of a parquet file. The row table has the patch grid of each image (``t``, ``h``, ``w``) and says
which rows of the arrays belong to it: ``tokens`` rows from ``offset`` on in ``pooler_output`` and
in each DeepStack feature, ``rows`` rows from ``row_offset`` on in ``last_hidden_state``. Every file
is written under a temporary name that ends in ``.tmp``, and renamed when it is complete.

If the fields are outputs of blocks (``blocks.6``), there is a row per patch that was chosen, and
two more arrays have these rows (:mod:`vitgraph.embedding.activations`): ``image``, ``position``.
Rows before the patches, such as class tokens, have arrays of their own, whose names end in
``.prefix``; ``rows`` and ``row_offset`` of the row table say which of them belong to an image.

With ``format="vllm"`` each image has a file of its own (:mod:`vitgraph.embedding.feature_store`);
the column ``uuid`` of the row table has its key there.

A shard is finished when its ``_stats.json`` exists. That file holds the size and the CRC-32 of the
shard's other files and, for each image that could not be encoded, its index in the shard.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from weights.files import file_crc32

from .block_fields import POSITION, has_rows_apart, image_name
from .parquet_files import VECTORS, Array, read_arrays, write_tokens, write_vectors
from .records import Format, ShardStats, WrittenStats
from .storage import STORED, TENSOR, Storage

if TYPE_CHECKING:
    from encoders.streams import Pool

Write: TypeAlias = Callable[[Path], "int | None"]
"""Writes a file, and returns its CRC-32 if it computed that on the way."""
_LARGE = 1 << 24
"""The bytes from which the checksum of a file is computed in another thread: a thread takes 0.1 ms,
and 16 MiB take 8."""
_SMALL = 1 << 20
"""Up to so many bytes, arrays are copied before they are written."""
_STATS = frozenset(("items", "rows", "seconds", "worker", "written", "errors", "tag", "files"))
"""The keys that a shard's JSON file of statistics must have; otherwise it is damaged."""


class Row(NamedTuple):
    """One encoded item of a shard: its key, its grid (t, h, w) of patches, and its features."""

    key: str
    grid: tuple[int, int, int]
    arrays: dict[str, Array]
    """Arrays [rows, .., D] by output field, or the pooled vector [D] under :data:`VECTORS`."""
    kind: str = "image"
    """Whether the item is an "image" or a "clip"."""
    uuid: str = ""
    """The key of the image in a feature store for vLLM; empty in other formats."""
    place: int = 0
    """The number of the item among all of the job, which is written beside outputs of blocks."""


class Shard:
    """One shard of an embedding job: the files with the results of some of its images.

    ``number`` counts from 0; ``pool`` is "none" if all tokens of each image are written.
    """

    def __init__(self, storage: Storage, number: int, format: Format, pool: Pool) -> None:
        self.storage, self.number, self.format, self.pool = storage, number, format, pool

    @property
    def stats_name(self) -> str:
        """The name of the file of statistics, which is written last and marks a finished shard."""
        return f"{self.number:05d}_stats.json"

    @property
    def is_done(self) -> bool:
        """Whether all files of the shard are written."""
        return self.storage.exists(self.stats_name)

    def write(
        self,
        rows: Sequence[Row],
        empty: Mapping[str, Array],
        stats: ShardStats,
        replace: bool = False,
        pool: Executor | None = None,
    ) -> None:
        """Write arrays, row table and statistics, in this order, unless the shard is finished.

        All files of a shard come from one process. If the storage has locks, one process at a time
        writes the shard. Otherwise the files of the process that is first to create the statistics
        are valid, and the other processes remove theirs.

        Args:
            rows: the images that were encoded, in order.
            empty: an array without rows for each output field, by its name; written if ``rows`` is
                empty.
            stats: the statistics of the shard.
            replace: whether to write a finished shard again. Its statistics are deleted first, so
                that it counts as missing if the process is killed.
            pool: the threads in which files are written; None writes one after the other.

        Raises:
            OSError: the folder cannot be written to, or the disk is full; the shard then has no
                statistics and counts as missing.
        """
        with self.storage.exclusive(f"{self.number:05d}"):
            size = sum(array.nbytes for row in rows for array in row.arrays.values())
            self.storage.require_space(size)
            if replace:
                self.storage.delete([self.stats_name])
                vars(self).pop("tag", None)  # the new files may have another one
            elif self.is_done:  # another process wrote it while this process waited for the lock
                return
            files = self._write_files(rows, empty, pool)
            content: WrittenStats = {**stats, "tag": self.storage.tag, "files": files}
            text = json.dumps(content, indent=1) + "\n"
            is_first = self.storage.create(self.stats_name, text.encode())
            if not self.storage.tag:  # the names of the files are the same in each process
                return
            if not is_first:
                self.storage.delete(files)
            elif self.format != "vllm":
                present = self.storage.names(f"{self.number:05d}.")
                self.storage.delete(name for name in present if name not in files)

    def _write_files(
        self, rows: Sequence[Row], empty: Mapping[str, Array], pool: Executor | None
    ) -> dict[str, tuple[int, int]]:
        """Write the arrays and the row table of ``rows``; return (size in bytes, CRC-32) of each
        file by its name.
        """
        if self.format == "vllm":
            files = dict(self._store_items(rows))
        else:
            files = {}
        todo = [*self._writers(rows, empty)]
        if pool is None:
            return files | dict(map(self._write_file, todo))
        running = [pool.submit(self._write_file, file) for file in todo]
        wait(running)  # after an error, too: no file is written once the lock is given away
        return files | dict(one.result() for one in running)

    def _write_file(self, file: tuple[str, Write]) -> tuple[str, tuple[int, int]]:
        """Write one file; return its name and (size in bytes, CRC-32)."""
        ending, write = file
        name = self._name(self.storage.tag, ending)
        with self.storage.writing(name) as temporary:
            crc = write(temporary)
            size = temporary.stat().st_size
            return name, (size, file_crc32(temporary) if crc is None else crc)

    def _writers(
        self, rows: Sequence[Row], empty: Mapping[str, Array]
    ) -> Iterator[tuple[str, Write]]:
        """Yield, per file of the shard, the end of its name and a function that writes it."""
        keys, kinds = [row.key for row in rows], [row.kind for row in rows]
        images = {image_name(name): name for name in empty if name.startswith(POSITION)}
        parts = {name: [row.arrays[name] for row in rows] for name in empty if name not in images}
        counts = {name: list(map(len, arrays)) for name, arrays in parts.items()}
        table = csv_bytes(self._table(rows, counts))
        if images:
            places = np.array([row.place for row in rows], np.int32)
            for name, beside in images.items():
                counts[name] = counts[beside]
                parts[name] = [np.repeat(places, counts[name])]
        if self.pool != "none" and rows:
            parts = {name: [np.stack(vectors)] for name, vectors in parts.items()}
        if self.format == "npy":
            for name, none in empty.items():
                ending = "npy" if name == VECTORS else f"{name}.npy"
                yield ending, partial(_write_npy, [none, *parts[name]])
        elif self.format != "vllm":
            arrays = {name: np.concatenate([none, *parts[name]]) for name, none in empty.items()}
            if self.format == "safetensors":
                yield "safetensors", partial(save_file, arrays)
            elif self.pool != "none":
                yield "parquet", lambda path: write_vectors(path, keys, kinds, arrays[VECTORS])
            else:
                grids = [row.grid for row in rows]
                yield "parquet", lambda path: write_tokens(path, keys, kinds, grids, arrays, counts)
        yield "csv", partial(_write_bytes, table)

    def _store_items(self, rows: Sequence[Row]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Write one file per image into the feature store for vLLM; yield (name, (size in bytes,
        CRC-32)) of each file."""
        from .feature_store import FeatureStore  # imported here, because it imports torch

        store = FeatureStore(self.storage.name)
        for row in rows:
            # If this process is killed, `LocalFolder.tidy` finds the temporary file by this name.
            temporary_path = store.folder / f"{self.number:05d}.{row.uuid}"
            store.write_array(row.uuid, row.arrays[TENSOR], temporary_path)
            path = store.folder / row.uuid / STORED
            yield f"{row.uuid}/{STORED}", (path.stat().st_size, file_crc32(path))

    def _name(self, tag: str, ending: str) -> str:
        return f"{self.number:05d}.{tag}{ending}"

    @cached_property
    def tag(self) -> str:
        """The random text in the shard's file names that identifies the worker which wrote it;
        empty on a local disk.
        """
        return self.read_stats()["tag"] if not self.storage.is_local else ""

    def _table(
        self, rows: Sequence[Row], counts: Mapping[str, Sequence[int]]
    ) -> list[Sequence[object]]:
        """Return the lines of the row table; ``counts`` are the rows of each array by image."""
        columns: dict[str, Sequence[object]] = {
            "key": [row.key for row in rows],
            "kind": [row.kind for row in rows],
        }
        if self.pool == "none":
            columns |= {axis: [row.grid[n] for row in rows] for n, axis in enumerate("thw")}
            none = [0] * len(rows)
            apart = [some for name, some in counts.items() if has_rows_apart(name)]
            others = [some for name, some in counts.items() if not has_rows_apart(name)]
            for names, found in ((("offset", "tokens"), others), (("row_offset", "rows"), apart)):
                most = list(map(max, none, none, *found))
                columns |= dict(zip(names, ([0, *accumulate(most)][:-1], most), strict=True))
            if self.format == "vllm":
                columns["uuid"] = [row.uuid for row in rows]
        return [tuple(columns), *zip(*columns.values(), strict=True)]

    def read_table(self) -> list[dict[str, str]]:
        """Return the row table (CSV), one dict per encoded image, from column names to texts."""
        with (
            self.storage.reading(self._name(self.tag, "csv")) as path,
            open(path, encoding="utf-8", errors="surrogateescape", newline="") as file,
        ):
            return list(csv.DictReader(file))

    def read_keys(self, vectors: int) -> list[str]:
        """Return the keys of the encoded images of the shard, from the row table.

        Args:
            vectors: the number of vectors in the shard's array.

        Raises:
            ValueError: the row table does not have one key per vector.
        """
        keys = [line["key"] for line in self.read_table()]
        if len(keys) != vectors:
            raise ValueError(
                f"{self.storage.name}: shard {self.number} has {len(keys)} keys and {vectors} "
                f"vectors; delete {self.stats_name} and run the command of the job again"
            )
        return keys

    def read_stats(self) -> WrittenStats:
        """Read the statistics of the shard.

        Raises:
            ValueError: the file of statistics is damaged.
        """
        try:
            stats: WrittenStats | None = json.loads(self.storage.read(self.stats_name))
        except ValueError:
            stats = None
        if not (isinstance(stats, dict) and stats.keys() >= _STATS):
            raise ValueError(
                f"{self.storage.name}/{self.stats_name}: is damaged; delete it and run the command "
                "of the job again"
            )
        return stats

    def read_arrays(self, field: str | None = None) -> dict[str, Array]:
        """Return the arrays by output field; npy files on a local disk are memory-mapped.

        Args:
            field: name of the only array to return, if the shard has it; None returns all.
        """
        if self.format == "npy":
            return self._read_npy(field)
        if self.format == "vllm":
            from .feature_store import FeatureStore  # imported here, because it imports torch

            store = FeatureStore(self.storage.name)
            return {TENSOR: store.read_arrays([line["uuid"] for line in self.read_table()])}
        with self.storage.reading(self._name(self.tag, self.format)) as path:
            if self.format == "parquet":
                return read_arrays(path, field)
            with safe_open(path, framework="numpy") as file:
                names = [name for name in file.keys() if field in (None, name)]  # noqa: SIM118
                return {name: file.get_tensor(name) for name in names}

    def _read_npy(self, field: str | None) -> dict[str, Array]:
        start, arrays = self._name(self.tag, ""), dict[str, Array]()
        files = self.storage.names(start) if self.pool == "none" else [f"{start}npy"]
        for file in files:
            name = file[len(start) :].removesuffix("npy").rstrip(".") or VECTORS
            if file.endswith(".npy") and field in (None, name):
                with self.storage.reading(file) as path:
                    arrays[name] = np.load(path, mmap_mode="r" if self.storage.is_local else None)
        return arrays

    def has_array(self, name: str) -> bool:
        """Return whether a shard of tokens has an array or a column of this name."""
        if self.format == "npy":
            return self.storage.exists(self._name(self.tag, f"{name}.npy"))
        return name in self.read_arrays(name)

    def read_span(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        """Return some rows of some arrays by name; of a parquet file, all rows are read for that.

        Args:
            names: the names of arrays of tokens that the shard has.
            start, stop: the first row and the one after the last.
        """
        if self.format == "npy":
            arrays: dict[str, Array] = {}
            for name in names:
                with self.storage.reading(self._name(self.tag, f"{name}.npy")) as path:
                    arrays[name] = np.load(path, mmap_mode="r")[start:stop]
            return arrays
        with self.storage.reading(self._name(self.tag, self.format)) as path:
            if self.format == "parquet":
                return {name: read_arrays(path, name)[name][start:stop] for name in names}
            with safe_open(path, framework="numpy") as file:
                return {name: file.get_slice(name)[start:stop] for name in names}

    def read_rows_in_order(self, field: str | None = None) -> list[Row]:
        """Return the encoded images of the shard, in order.

        Args:
            field: name of the only array to read; None reads all.

        Raises:
            ValueError: the row table and the arrays have different numbers of rows.
        """
        arrays, table = self.read_arrays(field), self.read_table()
        if self.pool != "none":
            matrix = arrays[VECTORS]
            if len(table) != len(matrix):
                raise ValueError(f"{len(table)} lines of the row table for {len(matrix)} vectors")
            return [
                Row(line["key"], (0, 0, 0), {VECTORS: vector}, line.get("kind", "image"))
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
                apart = has_rows_apart(name)
                start, length = (row_offset, count) if apart else (offset, tokens)
                parts[name] = array[start : start + length]
                ends[name] = start + length
            uuid = line.get("uuid", "")
            rows.append(Row(line["key"], (t, h, w), parts, line.get("kind", "image"), uuid))
        for name, end in ends.items():
            if end != len(arrays[name]):
                raise ValueError(f"the row table describes {end} of {len(arrays[name])} {name}")
        return rows


def rows_by_place(shard: Shard, first: int) -> dict[int, Row]:
    """Return the encoded images of a finished shard, each by its number in the shard, from 0.

    ``first`` is the number of the first of them among all images of the job.
    """
    stats = shard.read_stats()
    failed = {error["place"] for error in stats["errors"]}
    places = [place for place in range(stats["items"]) if place not in failed]
    rows = zip(places, shard.read_rows_in_order(), strict=True)
    return {place: row._replace(place=first + place) for place, row in rows}


def _write_npy(parts: Sequence[Array], path: Path) -> int:
    """Write arrays as one, joined along their first axis, like ``np.save``; return its CRC-32.

    That of a large file is computed in another thread, beside the copies to the system's cache.
    """
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    header = io.BytesIO()
    describe = np.lib.format.dtype_to_descr
    fields = {"descr": describe(parts[0].dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, fields)
    is_small = sum(part.nbytes for part in parts) < _SMALL
    pieces = [np.concatenate(parts)] if is_small else _joined(parts)
    chunks = [header.getvalue(), *map(_bytes_of, pieces)]
    with open(path, "wb") as file:
        if sum(map(len, chunks)) < _LARGE:
            file.writelines(chunks)
            return _crc32_of(chunks)
        with ThreadPoolExecutor(1, thread_name_prefix="crc") as pool:
            crc = pool.submit(_crc32_of, chunks)
            file.writelines(chunks)
        return crc.result()


def _joined(parts: Sequence[Array]) -> Iterator[Array]:
    """Yield arrays that hold the same rows, one for all that lie one after the other in memory.

    Each write and each checksum of an array lets another thread run, and a job has one array per
    image, but one piece of memory per batch.
    """
    run: list[Array] = []
    end = 0
    for part in parts:
        if part.size == 0:
            continue
        start = part.__array_interface__["data"][0]
        if run and (part.base is None or part.base is not run[0].base or start != end):
            yield _as_one(run)
            run = []
        run.append(part)
        end = start + part.nbytes if part.flags.c_contiguous else -1
    if run:
        yield _as_one(run)


def _as_one(run: Sequence[Array]) -> Array:
    """Return views that lie one after the other in the array that they are views of, as one."""
    base = run[0].base
    if len(run) == 1:
        return run[0]
    assert isinstance(base, np.ndarray)
    start = run[0].__array_interface__["data"][0] - base.__array_interface__["data"][0]
    shape = (sum(map(len, run)), *run[0].shape[1:])
    joined: Array = np.ndarray(shape, run[0].dtype, base.data, start)
    return joined


def _bytes_of(array: Array) -> bytes | memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _crc32_of(chunks: Sequence[bytes | memoryview]) -> int:
    crc = 0
    for chunk in chunks:
        crc = crc32(chunk, crc)
    return crc


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def csv_bytes(table: Sequence[Sequence[object]]) -> bytes:
    """Return the bytes of a CSV table; bytes of file names that are not UTF-8 are kept."""
    text = ""
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        file = io.StringIO(newline="")
        csv.writer(file, lineterminator="\n", quoting=quoting).writerows(table)
        text = file.getvalue()
        if "\r" not in text:  # else all cells are quoted; csv.writer leaves "\r" bare
            break
    return text.encode("utf-8", "surrogateescape")
