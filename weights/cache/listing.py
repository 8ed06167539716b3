"""Listing, checking and removing the towers, and text halves, that are kept on this disk."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, DamagedError
from .kept_tower import KeptTower
from .store import TEXT_SUFFIX, TOWERS_FOLDER, Part, Store, cache_root


@dataclass(frozen=True)
class CachedTower:
    """One tower in the cache, downloaded completely or in part."""

    repo_id: str
    commit: str
    subfolder: str | None
    bytes: int
    """The bytes on the disk, with the config and the processor files."""
    tensors: int
    state: str
    """The state of the tower: ``whole``, ``unfinished``, ``configs only`` (its tensors are in the
    Hub client's cache, or were never fetched), or ``damaged: `` and how."""
    folder: Path
    part: Part = "vision tower"
    """The part of the repo that the folder holds."""


def list_cached(cache_dir: str | Path | None = None, *, verify: bool = False) -> list[CachedTower]:
    """Return the towers in the cache, sorted by repo and commit.

    Args:
        cache_dir: the folder that was passed to :func:`~weights.load_encoder`; None is the default.
        verify: compare every tensor and JSON file with its CRC-32; otherwise only the header.
    """
    towers: list[CachedTower] = []
    for repo in _repos(cache_root(cache_dir)):
        repo_id = _repo_id(repo)
        try:
            folders = _subfolders(repo, r"[0-9a-f].*")
        except OSError as error:
            state = f"damaged: {_unreadable(error)}"
            towers.append(CachedTower(repo_id, "", None, 0, 0, state, repo))
            continue
        for folder in folders:
            subfolder, tensors, state = _state(Store(folder), verify=verify)
            size, commit = _disk_bytes(folder), _commit(folder)
            is_text = folder.name.endswith(TEXT_SUFFIX)
            part: Part = "text half" if is_text else "vision tower"
            tower = CachedTower(repo_id, commit, subfolder, size, tensors, state, folder, part)
            towers.append(tower)
    return towers


def remove_cached(
    repo_id: str, cache_dir: str | Path | None = None, *, commit: str | None = None
) -> int:
    """Remove the towers of a repo from the cache, and return the number of bytes freed.

    Args:
        repo_id: the repo, ``owner/name``.
        cache_dir: the folder that was passed to :func:`~weights.load_encoder`; None is the default.
        commit: the commit whose towers are removed, or its first characters; None removes all.

    Raises:
        CheckpointError: the cache has nothing of the repo or commit, or cannot be written to.
    """
    root = cache_root(cache_dir)
    repos = [repo for repo in _repos(root) if _repo_id(repo) == repo_id]
    if not repos:
        kept_ids = ", ".join(sorted({_repo_id(repo) for repo in _repos(root)})) or "none"
        raise CheckpointError(f"{repo_id}: no tower of it is kept in {root}; kept are: {kept_ids}")
    freed = 0
    try:
        folders = [folder for repo in repos for folder in _subfolders(repo, r"[0-9a-f].*")]
        for folder in folders if commit is None else _of_commit(repo_id, folders, commit):
            freed += _disk_bytes(folder)
            with Store(folder).lock():
                shutil.rmtree(folder)
        for repo in repos if commit is None else ():
            shutil.rmtree(repo / "refs", ignore_errors=True)
            with suppress(OSError):  # the folder is not empty if another load is filling it again
                repo.rmdir()
    except OSError as error:
        raise CheckpointError(
            f"{repo_id}: cannot be removed ({error.strerror}: {error.filename}): remove it as the "
            "user who owns the cache"
        ) from error
    return freed


def _of_commit(repo_id: str, folders: list[Path], commit: str) -> list[Path]:
    """Return the ``folders`` of the one commit whose hash begins with ``commit``.

    A CheckpointError, which names ``repo_id``, is raised if no or several commits begin so.
    """
    commits = sorted({_commit(folder) for folder in folders})
    matching = [name for name in commits if commit and name.startswith(commit)]
    if len(matching) != 1:
        count = "several commits begin so" if matching else "no tower of that commit is kept"
        raise CheckpointError(
            f"{repo_id}@{commit}: {count}; kept are: "
            f"{', '.join(name[:10] for name in commits) or 'none'}. A branch is not kept under "
            "its name: `vitgraph cache list` shows commits"
        )
    return [folder for folder in folders if _commit(folder) == matching[0]]


def _state(store: Store, *, verify: bool) -> tuple[str | None, int, str]:
    """Return subfolder, number of tensors and state of the tower in one folder of the cache."""
    try:
        if store.tower.is_dir():
            tower = KeptTower(store.tower)
            if verify:
                tower.verify()
            return tower.record["subfolder"], len(tower.sums), "whole"
        if verify:
            store.read_answers()
        return None, 0, "unfinished" if store.partial.is_dir() else "configs only"
    except DamagedError as error:
        return None, 0, f"damaged: {error}"
    except OSError as error:
        return None, 0, f"damaged: {_unreadable(error)}"


def _repos(root: Path) -> list[Path]:
    """Return the folders of all repos in the cache folder ``root``."""
    try:
        return _subfolders(root / TOWERS_FOLDER, r"models--.+--.+")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"what is kept in {root} is not known: {_unreadable(error)}: make it readable, or pass "
            "another cache_dir"
        ) from error


def _subfolders(folder: Path, pattern: str) -> list[Path]:
    """Return the folders in ``folder`` whose whole name matches ``pattern``, sorted.

    Unlike a glob, this raises an OSError if ``folder`` cannot be read.
    """
    paths = [folder / name for name in os.listdir(folder) if re.fullmatch(pattern, name)]
    return sorted(path for path in paths if path.is_dir())


def _disk_bytes(folder: Path) -> int:
    """Return the bytes that a folder's files occupy on the disk, without holes of sparse files."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process may have removed the file meanwhile
            status = path.stat()
            total += min(status.st_size, status.st_blocks * 512) * path.is_file()
    return total


def _unreadable(error: OSError) -> str:
    return f"{error.filename} cannot be read ({error.strerror})"


def _repo_id(repo: Path) -> str:
    return repo.name.removeprefix("models--").replace("--", "/", 1)


def _commit(folder: Path) -> str:
    return folder.name.partition("-")[0]
