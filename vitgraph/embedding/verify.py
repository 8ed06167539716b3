"""``vitgraph embed --status`` and ``--verify``: how far a job is, and what is wrong with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from weights.files import file_crc32

from ..terminal import counted
from .manifest import Manifest, digest_keys
from .records import JobReport, ShardStats
from .shard import Shard
from .shards import missing_of, read_all_stats, shards_of
from .storage import open_storage

_MOST_LINES = 20
"""The most faults that ``--verify`` prints; a last line counts the others."""
_DAMAGED = (OSError, ValueError, KeyError, IndexError, TypeError, EOFError)
"""The exceptions that reading a damaged file raises."""


def read_status(folder: str) -> JobReport:
    """Count the shards, files and errors of the job in a folder, in all and by worker.

    Returns:
        The counts, with the exit code 0 if all shards are written, else 1.

    Raises:
        ValueError: the folder holds no job, or the statistics of a shard are damaged.
    """
    storage = open_storage(folder)
    manifest = Manifest.read(storage)
    shards = shards_of(storage, manifest)
    missing = set(missing_of(shards))
    stats = read_all_stats([shard for shard in shards if shard.number not in missing])
    seconds = sum(shard_stats["seconds"] for shard_stats in stats)
    files = sum(shard_stats["items"] for shard_stats in stats)
    rows = sum(shard_stats["rows"] for shard_stats in stats)
    errors = sum(len(shard_stats["errors"]) for shard_stats in stats)
    lines = [
        f"{folder}: {len(stats):,} of {manifest.shards:,} shards are written, {files:,} of "
        f"{manifest.items:,} files",
        f"{counted(rows, 'row')}; {counted(errors, 'file')} with errors",
    ]
    if stats:
        lines.append(f"{files / max(seconds, 1e-9):,.1f} files per second and worker")
    return JobReport([*lines, *_describe_workers(stats)], 1 if missing else 0)


def _describe_workers(stats: Sequence[ShardStats]) -> Iterator[str]:
    """Yield a line per worker: how many shards it has written, and when it wrote its last one."""
    newest: dict[str, float] = {}
    count: Counter[str] = Counter()
    for shard in stats:
        worker = shard["worker"]
        newest[worker] = max(newest.get(worker, 0.0), shard["written"])
        count[worker] += 1
    for worker in sorted(newest, key=lambda name: [int(part) for part in name.split("/")]):
        age = max(time.time() - newest[worker], 0)
        yield f"worker {worker}: {counted(count[worker], 'shard')}, the last one {age:,.0f} s ago"


def verify(folder: str) -> JobReport:
    """Read every file of the job in a folder, and list the faults that are found.

    Returns:
        The first faults, with the exit code 0 if every image of the job is there once, in files
        that are whole; else 1.

    Raises:
        ValueError: the folder holds no job.
    """
    faults = list(find_faults(folder))
    lines = faults[:_MOST_LINES]
    if len(faults) > _MOST_LINES:
        lines.append(f"... and {len(faults) - _MOST_LINES} more")
    if not faults:
        manifest = Manifest.read(open_storage(folder))
        lines = [f"{folder}: {manifest.shards:,} shards of {manifest.items:,} files are whole"]
    return JobReport(lines, 1 if faults else 0)


def find_faults(folder: str) -> Iterator[str]:
    """Yield the faults in the files of a job, as one line of text each.

    Args:
        folder: the folder of the job.

    Raises:
        ValueError: the folder holds no job.
    """
    storage = open_storage(folder)
    manifest, all_intact = Manifest.read(storage), True
    shards = shards_of(storage, manifest)
    missing = set(missing_of(shards))
    for shard in shards:
        name = f"shard {shard.number:05d}"
        if shard.number in missing:
            faults = ["is not written; run the command of the job again"]
        else:
            again = f"delete {shard.stats_name} and run the command of the job again"
            try:
                faults = [f"{fault}; {again}" for fault in _faults_of(shard, manifest)]
            except _DAMAGED as error:
                faults = [f"is damaged ({error}); {again}"]
        all_intact = all_intact and not faults
        yield from (f"{name}: {fault}" for fault in faults)
    if not all_intact:
        return
    if digest_keys(key for shard in shards for key in _keys_of(shard)) != manifest.keys:
        yield f"{folder}: the keys of its shards are not those of the job"


def _faults_of(shard: Shard, manifest: Manifest) -> Iterator[str]:
    try:
        stats, all_intact = shard.read_stats(), True
    except ValueError:
        yield f"{shard.stats_name} is damaged"
        return
    for name, (size, crc) in stats["files"].items():
        try:
            with shard.storage.reading(name) as path:
                is_intact = path.stat().st_size == size and file_crc32(path) == crc
        except FileNotFoundError:
            yield f"{name} is missing"
            return
        if not is_intact:
            yield f"{name} is not what was written" + ("; delete it" if "/" in name else "")
            all_intact = False
    if not all_intact:
        return
    first = shard.number * manifest.items_per_shard
    expected = min(manifest.items_per_shard, manifest.items - first)
    rows = shard.read_rows_in_order()
    if not len(rows) + len(stats["errors"]) == stats["items"] == expected:
        yield f"has {len(rows)} rows and {len(stats['errors'])} errors for {expected} files"
    for row in rows:
        for name, array in row.arrays.items():
            if not np.isfinite(array).all():
                yield f"{name} of {row.key} has values that are not finite"


def _keys_of(shard: Shard) -> list[str]:
    """Return the keys of all images of a shard in order, with those that could not be encoded."""
    keys: list[str] = [line["key"] for line in shard.read_table()]
    for error in shard.read_stats()["errors"]:  # sorted by place, so each insertion is final
        keys.insert(error["place"], error["key"])
    return keys
