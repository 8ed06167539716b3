"""The activations that a job of ``vitgraph embed`` wrote, as a dataset of PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .activations import Activations
from .block_fields import IMAGE, POSITION, PREFIX, is_block
from .manifest import FileList, Manifest
from .shards import finished_shards
from .storage import open_storage

if TYPE_CHECKING:
    from .parquet_files import Array
    from .shard import Shard

_PIECES = 16
"""The pieces, each from another place of the job, that a block of rows is made of."""


class ActivationDataset(IterableDataset[Activations]):
    """Rows of activations in random order, for the training of sparse autoencoders and probes.

    The rows of a job lie on disk by image. They are read in pieces, in random order; the rows of
    some 16 pieces at a time, ``block_rows`` in all, are shuffled in memory. npy and safetensors
    files are memory-mapped. The workers of a ``DataLoader`` divide the rows among them.

    A row is a dict of tensors: one [D] per field in the dtype of the job, ``"image"``, the number
    of its image in ``keys``, and ``"position"`` [3], the frame or tile, row and column of its
    patch. Class tokens and registers are read by ``rows="prefix"``; the position of one is its
    frame or tile, -1, and its number from 0 in the order of the tower.

    Args:
        folder: the folder of a finished job of ``vitgraph embed --pool none --fields blocks.6``.
        fields: the outputs to read, such as ["blocks.6"]; None reads all that the job wrote.
        rows: "patches" for the rows of patches, or "prefix" for the rows before them.
        block_rows: the number of rows that are in memory and shuffled at a time.
        seed: determines the order, with the number that :meth:`set_epoch` sets.

    Raises:
        ValueError: the job is not finished, wrote no outputs of blocks, not these or not such rows,
            or is on a remote store; ``block_rows`` is not positive, or ``seed`` is negative.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        fields: Sequence[str] | None = None,
        rows: Literal["patches", "prefix"] = "patches",
        block_rows: int = 65536,
        seed: int = 0,
    ) -> None:
        storage = open_storage(os.fspath(folder))
        manifest = Manifest.read(storage)
        written = manifest.settings["fields"]
        if not any(map(is_block, written)):
            raise ValueError(
                f"{storage.name}: holds {', '.join(written)} and no outputs of blocks; write them "
                "with vitgraph embed --pool none --fields blocks.6"
            )
        if not storage.is_local:
            raise ValueError(f"{storage.name}: is a remote store; copy the job to a local folder")
        if isinstance(fields, str):
            raise ValueError(f"fields={fields!r}: must be a list of names, as [{fields!r}]")
        if unknown := [name for name in fields or () if name not in written]:
            raise ValueError(f"fields: {unknown[0]!r} is none of {', '.join(written)}")
        if rows not in ("patches", "prefix"):
            raise ValueError(f"rows={rows!r}: must be 'patches' or 'prefix'")
        if block_rows < 1:
            raise ValueError(f"block_rows={block_rows}: must be at least 1")
        if seed < 0:
            raise ValueError(f"seed={seed}: must not be negative")
        self.fields = tuple(written if fields is None else fields)
        self.block_rows, self.seed, self.epoch = block_rows, seed, 0
        self._files, self._shard_count = FileList(storage, manifest), manifest.shards
        self._shards = finished_shards(storage, manifest)
        self.rows, self._end = rows, PREFIX if rows == "prefix" else ""
        if self._end and not self._shards[0].has_array(f"{IMAGE}{PREFIX}"):
            raise ValueError(
                f"rows='prefix': {storage.name} has no rows before the patches, such as class "
                "tokens, because the tower has none; leave rows out"
            )

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all images of the job; ``"image"`` of a row is an index into them."""
        shards = map(self._files.shard, range(self._shard_count))
        return [file.key for files in shards for file in files]

    @cached_property
    def _row_counts(self) -> list[int]:
        column = "rows" if self._end else "tokens"
        return [sum(int(line[column]) for line in shard.read_table()) for shard in self._shards]

    def __len__(self) -> int:
        """Return the number of rows of the job, over all images."""
        return sum(self._row_counts)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the pass, so that the next one has an order of its own."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Activations]:
        """Yield all rows, or of a worker of a ``DataLoader`` its share, in random order."""
        for block in self._blocks():
            for row in range(len(block[IMAGE])):
                yield {name: rows[row] for name, rows in block.items()}

    def batches(self, size: int) -> Iterator[Activations]:
        """Yield all rows in random order, as batches [size, ..]; the last one may have fewer.

        This is faster than a ``DataLoader`` over single rows.

        Args:
            size: the number of rows of a batch.

        Raises:
            ValueError: ``size`` is not positive.
        """
        if size < 1:
            raise ValueError(f"size={size}: must be at least 1")
        kept: Activations = {}
        for block in self._blocks():
            joined = block
            if kept:
                joined = {name: torch.cat((kept[name], rows)) for name, rows in block.items()}
            whole = len(joined[IMAGE]) // size * size
            for start in range(0, whole, size):
                yield {name: rows[start : start + size] for name, rows in joined.items()}
            kept = {name: rows[whole:] for name, rows in joined.items()}
        if kept and len(kept[IMAGE]):
            yield kept

    def _blocks(self) -> Iterator[Activations]:
        """Yield shuffled blocks of ``block_rows`` rows, the last one with fewer."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        generator = np.random.default_rng([self.seed, self.epoch])
        pieces = list(self._pieces())
        waiting: list[dict[str, Array]] = []
        for place in generator.permutation(len(pieces))[number::workers]:
            shard, start, stop = pieces[place]
            names = [f"{name}{self._end}" for name in (*self.fields, IMAGE, POSITION)]
            part = shard.read_span(names, start, stop)
            waiting.append({name.removesuffix(self._end): part[name] for name in names})
            if sum(len(part[IMAGE]) for part in waiting) >= self.block_rows:
                yield _shuffled(waiting, generator)
                waiting = []
        if waiting:
            yield _shuffled(waiting, generator)

    def _pieces(self) -> Iterator[tuple[Shard, int, int]]:
        """Yield shard, first row and end of each piece; a parquet file is read whole, as one."""
        for shard, count in zip(self._shards, self._row_counts, strict=True):
            step = count if shard.format == "parquet" else max(self.block_rows // _PIECES, 1)
            for start in range(0, count, max(step, 1)):
                yield shard, start, min(start + step, count)


def _shuffled(parts: Sequence[dict[str, Array]], generator: np.random.Generator) -> Activations:
    """Return the rows of several pieces as tensors, all in one random order."""
    order = generator.permutation(sum(len(part[IMAGE]) for part in parts))
    return {
        name: torch.from_numpy(np.concatenate([part[name] for part in parts])[order])
        for name in parts[0]
    }
