"""Listing, checking and removing the towers that fetching has kept on this disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError, DamagedError
from .tower_cache import TowerCache, cache_root, disk_bytes, drop, open_entry, sweep


@dataclass(frozen=True)
class CachedTower:
    """One tower, or what has arrived of one."""

    repo_id: str
    commit: str
    subfolder: str | None
    bytes: int
    """On the disk, small files included."""
    tensors: int
    state: str
    """``whole``, ``unfinished``, ``configs only``, or how it is damaged."""
    folder: Path


def list_cached(cache_dir: str | Path | None = None) -> list[CachedTower]:
    """What is kept, by repo and commit; manifests and headers are checked, tensors are not read."""
    return [_describe(folder) for folder in _swept_folders(cache_root(cache_dir))]


def verify_cached(cache_dir: str | Path | None = None) -> list[CachedTower]:
    """As :func:`list_cached`, every tensor and small file read and held against its CRC-32."""
    return [_describe(folder, thorough=True) for folder in _swept_folders(cache_root(cache_dir))]


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


def _swept_folders(root: Path) -> Iterator[Path]:
    for repo in _repos(root):
        sweep(repo)
        for folder in _folders(repo):
            sweep(folder)
            yield folder


def _repos(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("models--*--*") if path.is_dir())


def _folders(repo: Path) -> list[Path]:
    return sorted(path for path in repo.glob("[0-9a-f]*") if path.is_dir())


def _repo_id(repo: Path) -> str:
    return repo.name.removeprefix("models--").replace("--", "/", 1)


def _describe(folder: Path, *, thorough: bool = False) -> CachedTower:
    cache = TowerCache(folder)
    subfolder, tensors = None, 0
    state = "unfinished" if cache.partial.is_dir() else "configs only"
    try:
        if thorough:
            cache.verify_small_files()
        if cache.tower.is_dir():
            entry = open_entry(cache.tower)
            if thorough:
                entry.verify()
            subfolder, tensors = entry.manifest["subfolder"], len(entry.manifest["crc32"])
            state = "whole"
    except DamagedError as error:
        state = f"damaged: {error}"
    commit = folder.name.partition("-")[0]
    repo_id = _repo_id(folder.parent)
    return CachedTower(repo_id, commit, subfolder, disk_bytes(folder), tensors, state, folder)
