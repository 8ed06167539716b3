"""All shards of an embedding job: finds out which are written, and reads statistics and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..terminal import counted
from .manifest import Manifest
from .parquet_files import VECTORS, Array
from .records import WrittenStats
from .shard import Row, Shard
from .storage import TENSOR, Storage, open_storage


def shards_of(storage: Storage, manifest: Manifest) -> list[Shard]:
    """Return all shards of an embedding job, written or not, in ascending order of their number."""
    format, pool = manifest.settings["format"], manifest.settings["pool"]
    return [Shard(storage, number, format, pool) for number in range(manifest.shards)]


def missing_of(shards: Sequence[Shard]) -> list[int]:
    """Return the numbers of the shards that are not written yet, from one listing of the folder."""
    names = set(shards[0].storage.names()) if shards else set()
    return [shard.number for shard in shards if shard.stats_name not in names]


def finished_shards(storage: Storage, manifest: Manifest) -> list[Shard]:
    """Return all shards of a finished job.

    Raises:
        ValueError: some shards are not written yet.
    """
    shards = shards_of(storage, manifest)
    if missing := missing_of(shards):
        raise ValueError(
            f"{storage.name}: {len(missing)} of {counted(len(shards), 'shard')} missing, the first "
            f"is {missing[0]}; run the command of the job again, to resume it"
        )
    return shards


def read_all_stats(shards: Sequence[Shard]) -> list[WrittenStats]:
    """Read the statistics of finished shards in 16 threads.

    Raises:
        ValueError: the statistics of a shard are damaged.
    """
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(Shard.read_stats, shards))


def read_embeddings(folder: str | Path, field: str | None = None) -> tuple[list[str], Array]:
    """Return the keys and features of a job; see :func:`vitgraph.features.load_embeddings`."""
    storage = open_storage(folder)
    manifest = Manifest.read(storage)
    pool = manifest.settings["pool"]
    if pool == "none":
        first: str = manifest.settings["fields"][0]
        if manifest.settings["format"] == "vllm":
            first = TENSOR
        field = field or ("deepstack.0" if first == "deepstack_features" else first)
    elif field is not None:
        raise ValueError(
            f"field={field!r}: {folder} was made with --pool {pool} and holds one vector per item; "
            "leave field out"
        )
    shards = finished_shards(storage, manifest)
    if field is not None:
        return _read_items(shards, field)
    keys: list[str] = []
    matrices = []
    for shard in shards:
        matrices.append(shard.read_arrays()[VECTORS])
        keys += shard.read_keys(len(matrices[-1]))
    return keys, np.concatenate(matrices)


def _read_items(shards: Sequence[Shard], field: str) -> tuple[list[str], Array]:
    """Return the keys of all images, and an object array that holds the ``field`` of each image."""
    rows: list[Row] = []
    for shard in shards:
        some = shard.read_rows_in_order(field)
        if some and field not in some[0].arrays:
            raise ValueError(
                f"field={field!r}: {shard.storage.name} holds {', '.join(shard.read_arrays())}; "
                "name one of these"
            )
        rows += some
    items = np.empty(len(rows), object)
    for number, row in enumerate(rows):  # np.array(...) would stack arrays of the same shape
        items[number] = row.arrays[field]
    return [row.key for row in rows], items
