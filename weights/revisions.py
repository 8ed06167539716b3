"""From a branch or tag to a commit: one request for ``config.json``, which comes with it.

Which commit a revision was last seen at is recorded, by us beside the kept towers and by the Hub's
client in its cache. Offline the newer record counts; so it does, as for the client, when the Hub
cannot be reached or refuses.
"""

from __future__ import annotations

import re
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RevisionNotFoundError

from .errors import CheckpointError, DamagedError
from .obstacles import OFFLINE, not_here
from .remote import ATTEMPTS, LONGEST_ASKED_WAIT, GivenUpError, TryAgain
from .repo import Repo
from .small_files import SmallFiles
from .snapshot import json_limit
from .tower_cache import TowerCache, write_whole

CONFIG = "config.json"
SHOWN = 4
"""Kept commits that a message lists."""
PATIENCE = 2, 5.0
"""Tries, and the longest wait asked for in seconds, where a commit is known to go on with."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


class _Unreachable(CheckpointError):
    """The Hub does not say which commit it is; a commit that is known will do."""


def resolve(repo: Repo) -> tuple[str, SmallFiles]:
    """Pin ``repo`` to the commit of its revision; returns it, and the small files there.

    Raises:
        CheckpointError: no such repo or revision, or the Hub cannot be reached and no commit of it
            is in the cache.
    """
    asked = repo.revision
    if _COMMIT.fullmatch(asked):
        return asked, _pinned(repo, asked)
    known = None if repo.options.force_download else known_commit(repo)
    if repo.offline:
        if known is None:
            raise _unknown(repo, OFFLINE)
        return known, _pinned(repo, known)
    try:
        commit, content = _ask(repo, known is not None)
    except _Unreachable as error:
        if known is None:  # a traceback shows the class that users catch
            raise CheckpointError(str(error)) from error.__cause__
        return known, _pinned(repo, known)
    files = _pinned(repo, commit)
    _keep_config(files, content)
    _record(_place(repo, asked), commit)
    return commit, files


def _pinned(repo: Repo, commit: str) -> SmallFiles:
    repo.pin(commit)
    return SmallFiles(repo, repo.kept(commit))


def _ask(repo: Repo, known: bool) -> tuple[str, bytes | None]:
    """The commit that the Hub names, and the config there, None if there is none."""
    remote = repo.remote(CONFIG)
    attempts, longest = PATIENCE if known else (ATTEMPTS, LONGEST_ASKED_WAIT)
    limit = json_limit(CONFIG)
    try:
        content = repo.ask(lambda: remote.whole(limit, attempts=attempts, longest=longest), CONFIG)
    except GivenUpError as error:
        cause = error.__cause__
        obstacle = str(cause) if isinstance(cause, TryAgain) else f"{type(cause).__name__}: {cause}"
        raise _Unreachable(str(_unknown(repo, obstacle))) from cause
    except CheckpointError as error:
        return _without_config(error), None
    if remote.commit is None or not _COMMIT.fullmatch(remote.commit):
        raise _Unreachable(
            f"{repo.label}: the answer for {CONFIG} names no commit (X-Repo-Commit), so it is not "
            "from a Hub: check HF_ENDPOINT, proxy and firewall, or pass revision= a commit"
        )
    return remote.commit, content


def _without_config(error: CheckpointError) -> str:
    """The commit that has no config, if that is what ``error`` says; else it is raised."""
    cause = error.__cause__
    if isinstance(cause, RemoteEntryNotFoundError):
        commit = cause.response.headers.get("x-repo-commit")
        if commit is not None and _COMMIT.fullmatch(commit):
            return str(commit)
    elif isinstance(cause, HfHubHTTPError) and not isinstance(cause, RevisionNotFoundError):
        raise _Unreachable(str(error)) from cause
    raise error


def _keep_config(files: SmallFiles, content: bytes | None) -> None:
    """Unless it is kept already; a cache that cannot be written may still have the client's."""
    if not files.repo.options.force_download:
        with suppress(DamagedError):
            if files.cache.small_file(CONFIG) is not None:
                return
    try:
        files.keep(CONFIG, content)
    except CheckpointError:
        if not isinstance(files.repo.clients(CONFIG), Path):
            raise


def _unknown(repo: Repo, obstacle: str) -> CheckpointError:
    """The error where nobody says at which commit the revision is; others may be kept."""
    commits = kept_commits(repo)
    if not commits:
        return CheckpointError(
            f"{repo.label}: no such folder here, and {not_here(CONFIG, obstacle)}"
        )
    more = f" and {len(commits) - SHOWN} more" if len(commits) > SHOWN else ""
    return CheckpointError(
        f"{repo.label}: the Hub cannot be asked where {repo.revision!r} stands ({obstacle}), nor "
        f"was it before; commits kept of this repo, newest first: {', '.join(commits[:SHOWN])}"
        f"{more}: pass one as revision={commits[0]!r} (--revision), or load once with a connection"
    )


def kept_commits(repo: Repo) -> list[str]:
    """The commits whose config is on this disk, in our cache or the client's, newest first."""
    folders = [repo.kept("0" * 40).folder.parent, repo.clients_cache / repo.folder_name]
    found: dict[str, int] = {}
    for place in (folders[0], folders[1] / "snapshots"):
        with suppress(OSError):
            for folder in place.iterdir():
                commit = folder.name.partition("-")[0]
                if _COMMIT.fullmatch(commit) and _has_config(repo, commit):
                    when = folder.stat().st_mtime_ns
                    found[commit] = max(when, found.get(commit, 0))
    return sorted(found, key=lambda commit: -found[commit])


def known_commit(repo: Repo) -> str | None:
    """The commit that the revision was last seen at, and whose config is on this disk."""
    found: list[tuple[int, str]] = []
    with suppress(OSError, UnicodeDecodeError):
        place = _place(repo, repo.revision)
        commit = place.read_text().strip()
        if _COMMIT.fullmatch(commit) and _has_config(repo, commit):
            found.append((place.stat().st_mtime_ns, commit))
    config = repo.clients(CONFIG)
    if isinstance(config, Path):
        snapshot = config.parents[repo.inside(CONFIG).count("/")]
        with suppress(OSError):
            place = snapshot.parent.parent / "refs" / repo.revision
            found.append((place.stat().st_mtime_ns, snapshot.name))
    return max(found)[1] if found else None


def _has_config(repo: Repo, commit: str) -> bool:
    kept: TowerCache = repo.kept(commit)
    return (kept.files / CONFIG).is_file() or isinstance(repo.clients(CONFIG, commit), Path)


def _place(repo: Repo, revision: str) -> Path:
    """Where the commit of a branch is recorded; branches have names that files cannot have."""
    name = sha256(revision.encode()).hexdigest()[:32]
    return repo.kept("0" * 40).folder.parent / "refs" / name


def _record(place: Path, commit: str) -> None:
    with suppress(OSError):  # needed offline only
        if not (place.is_file() and place.read_text() == commit):
            write_whole(place, commit.encode())
