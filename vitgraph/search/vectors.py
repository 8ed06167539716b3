"""Search by cosine in the vectors of an embedding job.

The shards are read some thousand vectors at a time, so a search among a million vectors needs
little more memory than for a million cosines; npy files on a local disk are memory-mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
from tqdm import tqdm

from ..embedding.manifest import FileList, Manifest
from ..embedding.parquet_files import VECTORS
from ..embedding.shard import Shard
from ..embedding.shards import finished_shards
from ..embedding.sources.reading import File
from ..embedding.storage import open_storage

Floats: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"
"""An array of float32 numbers."""
ROWS_AT_ONCE = 1 << 14
"""The most vectors that are converted to float32 at a time."""


class Hit(NamedTuple):
    """An image of an embedding job that is similar to a query, and the cosine of their vectors."""

    key: str
    cosine: float
    file: File | None
    """The image file that the job read; None if the job's list of files does not have ``key``."""


class Vectors:
    """The vectors of a finished embedding job, which :meth:`nearest` searches.

    Args:
        folder: the folder that ``vitgraph embed --out`` wrote, local or on a remote store.
        progress: whether to show a progress bar over the shards that are read.

    Raises:
        ValueError: the folder holds no job, the job is not finished, or it wrote all tokens of each
            image instead of a vector.
    """

    def __init__(self, folder: str, progress: bool = False) -> None:
        self.storage, self.progress = open_storage(folder), progress
        self.manifest = Manifest.read(self.storage)
        self.settings = self.manifest.settings
        if self.settings["pool"] == "none":
            raise ValueError(
                f"{folder}: holds all tokens of every image, and a search compares one vector per "
                "image; embed the images with --pool mean into another folder"
            )
        self.shards = finished_shards(self.storage, self.manifest)
        self.count = 0
        """The number of finite vectors of the job, which were searched; 0 before the first search.
        """
        self.left_out = 0
        """The number of vectors that the last search skipped, because they have a NaN or an
        infinity."""
        self._starts: list[int] = []
        """The number of the first row of each shard, and last the number of all rows."""

    def nearest(self, vector: Floats, top: int, *, centred: bool = True) -> list[Hit]:
        """Return the images whose vectors have the largest cosine with a vector, the best first.

        Vectors with a NaN or an infinity count neither for the mean nor for the ranking. Images of
        equal cosines are in the order of the job.

        Args:
            vector: [D], comparable with the job's vectors.
            top: the most images to return.
            centred: whether to subtract the mean of the job's vectors from all vectors first.

        Raises:
            ValueError: the job wrote no finite vectors, its vectors have another width, or a shard
                is damaged.
        """
        mean = self.scan(len(vector))
        mean = mean if centred else np.zeros_like(mean)
        query = unit((vector - mean).astype(np.float32))
        cosines = np.full(self._starts[-1], -np.inf, np.float32)
        for start, rows in self.rows(len(vector), "search"):
            places = np.flatnonzero(are_finite(rows))
            cosines[start + places] = unit(rows[places] - mean) @ query
        count = min(top, self.count)
        # Of equal cosines, as of copies of an image, the first count.
        best = np.flatnonzero(cosines >= np.partition(cosines, -count)[-count])
        best = best[np.lexsort((best, -cosines[best]))][:count]
        names = self.keys_and_files(best)
        return [
            Hit(key, float(cosines[row]), file)
            for row in best.tolist()
            for key, file in [names[row]]
        ]

    def scan(self, width: int | None = None) -> Floats:
        """Count the finite vectors and those that are not, and return the mean of the finite, [D].

        Args:
            width: the width that the vectors must have; None takes that of the first shard.

        Raises:
            ValueError: the job wrote no finite vectors, they have another width, or a shard is
                damaged.
        """
        total, counts = np.zeros(()), list[int]()
        self.count = 0
        for shard in self._bar(self.shards, "mean"):
            counts.append(0)
            for rows in self._rows(shard, width):
                width = rows.shape[1]
                finite = rows[are_finite(rows)]
                total = total + finite.sum(axis=0, dtype=np.float64)
                counts[-1] += len(rows)
                self.count += len(finite)
        self.left_out = sum(counts) - self.count
        if not self.count:
            raise ValueError(f"{self.storage.name}: holds no finite vectors; see its errors.csv")
        self._starts = [0, *accumulate(counts)]
        return np.asarray(total / self.count, np.float32)

    def rows(self, width: int, label: str, first: int = 0) -> Iterator[tuple[int, Floats]]:
        """Yield the vectors from row ``first`` on, after :meth:`scan`, a part of a shard at a time.

        Yields:
            The number of the first row, and the rows as float32 [rows, D].
        """
        ends = self._starts[1:]
        shards = [shard for shard, end in zip(self.shards, ends, strict=True) if end > first]
        for shard in self._bar(shards, label):
            start = self._starts[shard.number]
            for rows in self._rows(shard, width):
                skipped = min(max(first - start, 0), len(rows))
                if skipped < len(rows):
                    yield start + skipped, rows[skipped:]
                start += len(rows)

    def _bar(self, shards: list[Shard], label: str) -> Iterable[Shard]:
        return tqdm(shards, desc=label, unit="shard", disable=not self.progress)

    def _rows(self, shard: Shard, width: int | None) -> Iterator[Floats]:
        """Yield the vectors of a shard as float32 [rows, D], at most :data:`ROWS_AT_ONCE` at a
        time.
        """
        matrix = shard.read_arrays()[VECTORS]
        if width not in (None, matrix.shape[1]):
            raise ValueError(
                f"{self.storage.name}: shard {shard.number} has vectors of {matrix.shape[1]} "
                f"numbers, those to compare have {width}; the checkpoint is another one"
            )
        for start in range(0, len(matrix), ROWS_AT_ONCE):
            yield np.asarray(matrix[start : start + ROWS_AT_ONCE], np.float32)

    def keys_and_files(self, rows: Iterable[int]) -> dict[int, tuple[str, File | None]]:
        """Return key and file of each row; only the shards that hold some of them are read."""
        wanted = np.unique(np.fromiter(rows, np.int64))
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        found: dict[int, tuple[str, File | None]] = {}
        lists = FileList(self.storage, self.manifest)
        for number in np.unique(numbers).tolist():
            start, end = self._starts[number : number + 2]
            keys = self.shards[number].read_keys(end - start)
            files = {file.key: file for file in lists.shard(number)}
            for row in wanted[numbers == number].tolist():
                key = keys[row - start]
                found[row] = key, files.get(key)
        return found


def are_finite(rows: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return for each vector of [n, D] whether all of its numbers are finite, [n]."""
    return np.asarray(np.isfinite(rows).all(axis=1))


def unit(rows: Floats) -> Floats:
    """Return vectors [n, D] or [D] divided by their L2 norms; a vector of zeros stays zero."""
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1), np.float32)
