"""Listing, checking and removing the towers that fetching has kept on this disk."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from .errors import CheckpointError, DamagedError
from .shard_records import ShardRecord, read_record
from .tower_cache import (
    TowerCache,
    cache_root,
    clients_cache,
    disk_bytes,
    drop,
    open_entry,
    sweep,
)


@dataclass(frozen=True)
class CachedTower:
    """One tower, or what has arrived of one."""

    repo_id: str
    commit: str
    subfolder: str | None
    bytes: int
    """On the disk, small files included; whole shards are the client's and not counted."""
    tensors: int
    state: str
    """``whole``, ``whole shards`` (in the client's cache, verified when they were first used),
    ``unfinished``, ``configs only``, or ``damaged: `` and how."""
    folder: Path


def list_cached(cache_dir: str | Path | None = None) -> list[CachedTower]:
    """What is kept, by repo and commit; manifests and headers are checked, no tensor is read.

    Raises:
        CheckpointError: the cache is there and cannot be read.
    """
    return _describe_all(cache_dir, thorough=False)


def verify_cached(cache_dir: str | Path | None = None) -> list[CachedTower]:
    """As :func:`list_cached`, every tensor and small file read and held against its CRC-32.

    Raises:
        CheckpointError: the cache is there and cannot be read.
    """
    return _describe_all(cache_dir, thorough=True)


def remove_cached(repo_id: str, cache_dir: str | Path | None = None) -> int:
    """Remove every kept tower of a repo, of all its commits.

    Returns:
        The bytes that were freed.

    Raises:
        CheckpointError: nothing of that repo is kept, or it cannot be removed.
    """
    try:
        return _remove(repo_id, cache_root(cache_dir))
    except OSError as error:
        raise CheckpointError(
            f"{repo_id}: cannot be removed ({error.strerror}: {error.filename}): remove it as the "
            "user who owns the cache"
        ) from error


def _remove(repo_id: str, root: Path) -> int:
    repo = next((repo for repo in _repos(root) if _repo_id(repo) == repo_id), None)
    if repo is None:
        known = sorted(_repo_id(repo) for repo in _repos(root))
        raise CheckpointError(
            f"{repo_id}: no tower of it is kept in {root}; kept are: {', '.join(known) or 'none'}"
        )
    freed = sweep(repo)
    drop(repo / "refs")
    for folder in _folders(repo):
        freed += disk_bytes(folder)
        with TowerCache(folder).lock():
            drop(folder)
    with suppress(OSError):  # another load may be filling it again
        repo.rmdir()
    return freed


def _describe_all(cache_dir: str | Path | None, *, thorough: bool) -> list[CachedTower]:
    found, clients = [], clients_cache(cache_dir)
    for repo in _repos(cache_root(cache_dir)):
        sweep(repo)
        try:
            folders = _folders(repo)
        except OSError as error:
            state = f"damaged: {_unreadable(error)}"
            found.append(CachedTower(_repo_id(repo), "", None, 0, 0, state, repo))
            continue
        for folder in folders:
            sweep(folder)
            found.append(_describe(folder, clients, thorough=thorough))
    return found


def _repos(root: Path) -> list[Path]:
    try:
        return _subfolders(root, r"models--.+--.+")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"what is kept in {root} is not known: {_unreadable(error)}: make it readable, or pass "
            "another cache_dir"
        ) from error


def _folders(repo: Path) -> list[Path]:
    return _subfolders(repo, r"[0-9a-f].*")


def _subfolders(folder: Path, pattern: str) -> list[Path]:
    """Unlike a glob, this says so if ``folder`` cannot be read."""
    paths = [folder / name for name in os.listdir(folder) if re.fullmatch(pattern, name)]
    return sorted(path for path in paths if path.is_dir())


def _unreadable(error: OSError) -> str:
    return f"{error.filename} cannot be read ({error.strerror})"


def _repo_id(repo: Path) -> str:
    return repo.name.removeprefix("models--").replace("--", "/", 1)


def _describe(folder: Path, clients: Path, *, thorough: bool) -> CachedTower:
    cache, commit = TowerCache(folder), folder.name.partition("-")[0]
    repo_id = _repo_id(folder.parent)
    subfolder, tensors = None, 0
    try:
        if thorough:
            cache.verify_small_files()
        state = "unfinished" if cache.partial.is_dir() else "configs only"
        records = _whole_shards(cache, lambda file: _clients(clients, repo_id, commit, file))
        if records:
            subfolder, state = records[0][0].subfolder, "whole shards"
            tensors = sum(len(record.crc32) for record, _ in records)
        for record, path in records:
            check = record.verify if thorough else record.read_header
            check(path, str(path))
        if cache.tower.is_dir():
            entry = open_entry(cache.tower)
            if thorough:
                entry.verify()
            subfolder, tensors = entry.manifest["subfolder"], len(entry.manifest["crc32"])
            state = "whole"
    except DamagedError as error:
        state = f"damaged: {error}"
    except OSError as error:
        state = f"damaged: {_unreadable(error)}"
    return CachedTower(repo_id, commit, subfolder, disk_bytes(folder), tensors, state, folder)


def _whole_shards(
    cache: TowerCache, find: Callable[[str], Path | None]
) -> list[tuple[ShardRecord, Path]]:
    """The shards that are recorded, and where they are; none unless all are still there."""
    records = [record for place in cache.shard_records() if (record := read_record(place))]
    found = [(record, path) for record in records if (path := find(record.file))]
    return found if len(found) == len(records) else []


def _clients(cache: Path, repo_id: str, commit: str, file: str) -> Path | None:
    found = try_to_load_from_cache(repo_id, file, cache_dir=cache, revision=commit)
    return Path(found) if isinstance(found, str) else None
