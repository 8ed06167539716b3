"""``vitgraph embed --status`` and ``--verify``: how far a job is, and what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .manifest import Manifest, checksum, digest_keys
from .shards import Shard

_MOST_LINES = 20
"""Faults that are printed one by one."""
_DAMAGED = (OSError, ValueError, KeyError, IndexError, TypeError, EOFError)
"""What reading a damaged file raises."""


def print_status(folder: Path) -> int:
    """Print how far a job is.

    Returns:
        0 if all shards are written, else 1.

    Raises:
        ValueError: the folder holds no job, or the statistics of a shard are damaged.
    """
    manifest = Manifest.read(folder)
    done = [shard for shard in _shards(folder, manifest) if shard.is_done]
    stats = [shard.read_stats() for shard in done]
    seconds, files, rows, copies = (
        sum(one[name] for one in stats) for name in ("seconds", "items", "rows", "copies")
    )
    errors = sum(len(one["errors"]) for one in stats)
    print(
        f"{folder}: {len(done):,} of {manifest.shards:,} shards are written, {files:,} of "
        f"{manifest.items:,} files"
    )
    print(f"{rows:,} rows, {copies:,} of them copies of another; {errors:,} files with errors")
    if done:
        newest = max(shard.path("_stats.json").stat().st_mtime for shard in done)
        print(
            f"{files / max(seconds, 1e-9):,.1f} files per second and worker; the last shard was "
            f"written {max(time.time() - newest, 0):,.0f} s ago"
        )
    return 0 if len(done) == manifest.shards else 1


def print_verdict(folder: Path) -> int:
    """Read every file of a job, and print what is wrong.

    Returns:
        0 if every item of the job is there once, in files that are whole; else 1.

    Raises:
        ValueError: the folder holds no job.
    """
    faults = list(find_faults(folder))
    for fault in faults[:_MOST_LINES]:
        print(fault)
    if len(faults) > _MOST_LINES:
        print(f"... and {len(faults) - _MOST_LINES} more")
    if not faults:
        manifest = Manifest.read(folder)
        print(f"{folder}: {manifest.shards:,} shards of {manifest.items:,} files are whole")
    return 1 if faults else 0


def find_faults(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the files of a job, one line each.

    Args:
        folder: of the job.

    Raises:
        ValueError: the folder holds no job.
    """
    manifest, whole = Manifest.read(folder), True
    shards = _shards(folder, manifest)
    for shard in shards:
        name = f"shard {shard.number:05d}"
        if not shard.is_done:
            faults = ["is not written; run the command of the job again"]
        else:
            again = f"delete {shard.path('_stats.json').name} and run the command of the job again"
            try:
                faults = [f"{fault}; {again}" for fault in _faults_of(shard, manifest)]
            except _DAMAGED as error:
                faults = [f"is damaged ({error}); {again}"]
        whole = whole and not faults
        yield from (f"{name}: {fault}" for fault in faults)
    if whole and digest_keys(key for shard in shards for key in _keys_of(shard)) != manifest.keys:
        yield f"{folder}: the keys of its shards are not those of the job"


def _faults_of(shard: Shard, manifest: Manifest) -> Iterator[str]:
    try:
        stats, whole = shard.read_stats(), True
    except ValueError:
        yield f"{shard.path('_stats.json').name} is damaged"
        return
    for name, (size, crc) in stats.get("files", {}).items():
        path = shard.folder / name
        if not path.exists():
            yield f"{name} is missing"
            return
        if path.stat().st_size != size or checksum(path) != crc:
            yield f"{name} is not what was written"
            whole = False
    if not whole:
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
    """The keys of a shard in the order of the source, those of bad files included."""
    keys: list[str] = [line["key"] for line in shard.read_table()]
    for error in shard.read_stats()["errors"]:  # by ascending place
        keys.insert(error["place"], error["key"])
    return keys


def _shards(folder: Path, manifest: Manifest) -> list[Shard]:
    settings: dict[str, Any] = manifest.settings
    return [
        Shard(folder, number, settings["format"], settings["pool"])
        for number in range(manifest.shards)
    ]
