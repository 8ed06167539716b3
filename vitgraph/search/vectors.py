"""Search by cosine in the vectors of an embedding job, after their mean is subtracted.

The shards are read twice, some thousand vectors at a time: first for the mean, then for the
cosines. Npy files on a local disk are memory-mapped, so a search among a million vectors needs
little more memory than for a million cosines.
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
    """An image of an embedding job that is similar to a photograph.

    ``cosine`` is the cosine of their two vectors, after the mean of the job's vectors is subtracted
    from both.
    """

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
        """The number of vectors that the last search left out, because they have a NaN or an
        infinity."""

    def nearest(self, vector: Floats, top: int) -> list[Hit]:
        """Return the images whose vectors have the largest cosine with a vector, the best first.

        Vectors with a NaN or an infinity count neither for the mean nor for the ranking.

        Args:
            vector: [D], encoded with the same checkpoint and settings as the job's vectors.
            top: the most images to return.

        Raises:
            ValueError: the job wrote no finite vectors, its vectors have another width, or a shard
                is damaged.
        """
        total, counts = np.zeros(len(vector)), list[int]()
        self.count = 0
        for shard in self._bar("mean"):
            counts.append(0)
            for rows in self._rows(shard, len(vector)):
                finite = rows[_are_finite(rows)]
                total += finite.sum(axis=0, dtype=np.float64)
                counts[-1] += len(rows)
                self.count += len(finite)
        self.left_out = sum(counts) - self.count
        if not self.count:
            raise ValueError(f"{self.storage.name}: holds no finite vectors; see its errors.csv")
        mean = (total / self.count).astype(np.float32)
        query = _unit((vector - mean).astype(np.float32))
        cosines = np.full(sum(counts), -np.inf, np.float32)
        start = 0
        for shard in self._bar("search"):
            for rows in self._rows(shard, len(vector)):
                places = start + np.flatnonzero(_are_finite(rows))
                cosines[places] = _unit(rows[places - start] - mean) @ query
                start += len(rows)
        return self._hits(cosines, [0, *accumulate(counts)], min(top, self.count))

    def _bar(self, label: str) -> Iterable[Shard]:
        return tqdm(self.shards, desc=label, unit="shard", disable=not self.progress)

    def _rows(self, shard: Shard, width: int) -> Iterator[Floats]:
        """Yield the vectors of a shard as float32 [rows, D], at most :data:`ROWS_AT_ONCE` at a
        time.
        """
        matrix = shard.read_arrays()[VECTORS]
        if matrix.shape[1] != width:
            raise ValueError(
                f"{self.storage.name}: shard {shard.number} has vectors of {matrix.shape[1]} "
                f"numbers, the photograph has one of {width}; the checkpoint is another one"
            )
        for start in range(0, len(matrix), ROWS_AT_ONCE):
            yield np.asarray(matrix[start : start + ROWS_AT_ONCE], np.float32)

    def _hits(self, cosines: Floats, starts: list[int], top: int) -> list[Hit]:
        """Return the images with the largest cosines; keys are read only from their shards."""
        best = np.argpartition(-cosines, min(top, len(cosines)) - 1)[:top]
        best = best[np.lexsort((best, -cosines[best]))]
        shard_numbers = np.searchsorted(starts, best, side="right") - 1
        tables = {
            shard: self._keys_and_files(shard, starts) for shard in set(shard_numbers.tolist())
        }
        hits = []
        for row, shard in zip(best.tolist(), shard_numbers.tolist(), strict=True):
            keys, files = tables[shard]
            key = keys[row - starts[shard]]
            hits.append(Hit(key, float(cosines[row]), files.get(key)))
        return hits

    def _keys_and_files(self, number: int, starts: list[int]) -> tuple[list[str], dict[str, File]]:
        keys = self.shards[number].read_keys(starts[number + 1] - starts[number])
        files = FileList(self.storage, self.manifest).shard(number)
        return keys, {file.key: file for file in files}


def _are_finite(rows: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return for each vector of [n, D] whether all of its numbers are finite, [n]."""
    return np.asarray(np.isfinite(rows).all(axis=1))


def _unit(rows: Floats) -> Floats:
    """Return vectors [n, D] or [D] divided by their L2 norms; a vector of zeros stays zero."""
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1), np.float32)
