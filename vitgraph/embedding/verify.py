"""``vitgraph embed --status`` and ``--verify``: report a job's progress and its damaged files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from weights.files import file_crc32

from ..terminal import counted
from .manifest import Manifest, digest_keys
from .records import JobReport, ShardStats
from .shard import Shard
from .shards import missing_of, read_all_stats, shards_of
from .storage import open_storage

if TYPE_CHECKING:
    from weights import JsonObject

_MOST_LINES = 20
"""The most faults that ``--verify`` prints; a last line says how many more there are."""
_DAMAGED = (OSError, ValueError, KeyError, IndexError, TypeError, EOFError)
"""The exceptions that are raised when a damaged file is read."""


def read_status(folder: str) -> JobReport:
    """Count the finished shards, images and errors of the job in a folder, in all and per worker.

    Returns:
        The counts as text, and the exit code: 0 if all shards are written, else 1.

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
        f"{folder}: {len(stats):,} of {counted(manifest.shards, 'shard')} written, {files:,} of "
        f"{counted(manifest.items, 'file')}",
        f"{counted(rows, 'row')}; {counted(errors, 'file')} with errors",
    ]
    if stats:
        lines.append(f"{files / max(seconds, 1e-9):,.1f} files per second per worker")
    summary: JsonObject = {
        "folder": folder,
        "files": manifest.items,
        "done": files,
        "rows": rows,
        "errors": errors,
        "shards": manifest.shards,
        "missing_shards": len(missing),
    }
    return JobReport([*lines, *_describe_workers(stats)], 1 if missing else 0, summary)


def _describe_workers(stats: Sequence[ShardStats]) -> Iterator[str]:
    """Yield a line per worker: the number of its shards, and the seconds since its last one."""
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
    """Read all files of the job in a folder, and list what is missing or damaged.

    Returns:
        The first faults as text, and the exit code: 0 if every image of the job occurs once and all
        files are intact, else 1.

    Raises:
        ValueError: the folder holds no job.
    """
    faults = list(find_faults(folder))
    lines = faults[:_MOST_LINES]
    if len(faults) > _MOST_LINES:
        lines.append(f"... and {len(faults) - _MOST_LINES} more")
    if not faults:
        manifest = Manifest.read(open_storage(folder))
        shards, files = counted(manifest.shards, "shard"), counted(manifest.items, "file")
        lines = [f"{folder}: complete, {shards} with {files}"]
    return JobReport(lines, 1 if faults else 0, {"folder": folder, "faults": faults})


def find_faults(folder: str) -> Iterator[str]:
    """Yield a line of text for everything that is missing or damaged in the files of a job.

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
                faults = faults or list(_rows_not_finite(shard))
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
        errors = counted(len(stats["errors"]), "error")
        files = counted(expected, "file")
        yield f"has {counted(len(rows), 'row')} and {errors} for {files}"


def _rows_not_finite(shard: Shard) -> Iterator[str]:
    """Yield a text for each array of an image that has a NaN or an infinity.

    Such rows are of a version that wrote them; to write the shard again would not change them.
    """
    for row in shard.read_rows_in_order():
        for name, array in row.arrays.items():
            if not np.isfinite(array).all():
                yield (
                    f"{name} of {row.key} has values that are not finite, as the encoder made "
                    "them; embed into a new folder, whose errors.csv lists such images, with "
                    "--dtype bfloat16 or float32"
                )


def _keys_of(shard: Shard) -> list[str]:
    """Return the keys of all images of a shard in order, including images with errors."""
    keys: list[str] = [line["key"] for line in shard.read_table()]
    for error in shard.read_stats()["errors"]:  # in ascending order of place, so the places hold
        keys.insert(error["place"], error["key"])
    return keys
