"""Listing, checking and removing the towers that fetching has kept on this disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError, DamagedError
from .tower_cache import TowerCache, cache_root, drop, open_entry


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
    return [_describe(folder) for folder in _folders(cache_root(cache_dir))]


def verify_cached(cache_dir: str | Path | None = None) -> list[CachedTower]:
    """As :func:`list_cached`, every whole tower read and held against its recorded CRC-32s."""
    return [_describe(folder, thorough=True) for folder in _folders(cache_root(cache_dir))]


def remove_cached(repo_id: str, cache_dir: str | Path | None = None) -> int:
    """Remove every kept tower of a repo, of all its commits.

    Returns:
        The bytes that were freed.

    Raises:
        CheckpointError: nothing of that repo is kept.
    """
    root = cache_root(cache_dir)
    found = [folder for folder in _folders(root) if _repo_id(folder) == repo_id]
    if not found:
        known = sorted({_repo_id(folder) for folder in _folders(root)})
        raise CheckpointError(
            f"{repo_id}: no tower of it is kept in {root}; kept are: {', '.join(known) or 'none'}"
        )
    freed = sum(_disk_bytes(folder) for folder in found)
    for folder in found:
        with TowerCache(folder).lock():
            drop(folder)
    with suppress(OSError):  # another load may be filling it again
        found[0].parent.rmdir()
    return freed


def _folders(root: Path) -> Iterator[Path]:
    for repo in sorted(root.glob("models--*--*")):
        yield from sorted(path for path in repo.glob("[0-9a-f]*") if path.is_dir())


def _repo_id(folder: Path) -> str:
    return folder.parent.name.removeprefix("models--").replace("--", "/", 1)


def _describe(folder: Path, *, thorough: bool = False) -> CachedTower:
    cache = TowerCache(folder)
    subfolder, tensors = None, 0
    state = "unfinished" if cache.partial.is_dir() else "configs only"
    if cache.tower.is_dir():
        try:
            entry = open_entry(cache.tower)
            if thorough:
                entry.verify()
            subfolder, tensors = entry.manifest["subfolder"], len(entry.manifest["crc32"])
            state = "whole"
        except DamagedError as error:
            state = f"damaged: {error}"
    commit = folder.name.partition("-")[0]
    return CachedTower(
        _repo_id(folder), commit, subfolder, _disk_bytes(folder), tensors, state, folder
    )


def _disk_bytes(folder: Path) -> int:
    """Of files that may have holes: what they take, not how long they are."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(min(status.st_size, status.st_blocks * 512) for status in found)
