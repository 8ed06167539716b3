"""From a branch or tag to a commit: one request for ``config.json``, whose answer names it.

Which commit a revision was last seen at is recorded, by us beside the kept towers and by the Hub's
client in its cache. The newer record counts where no request may be sent, and where the Hub cannot
be reached or refuses.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RevisionNotFoundError

from ..cache.store import branch_file, repo_folder, write_whole
from ..errors import CheckpointError, similar_names
from ..snapshot import json_limit
from .http import Unreachable
from .messages import OFFLINE, not_here, obstacle
from .repo import Repo

CONFIG = "config.json"
SHOWN = 4
"""Kept commits that a message lists."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve(repo: Repo) -> tuple[str, dict[str, bytes | None]]:
    """Pin ``repo`` to the commit of its revision.

    Returns:
        The commit, and what the answer brought: ``config.json``, None if there is none; or nothing
        if no request was sent.

    Raises:
        CheckpointError: no such repo or revision, or the Hub cannot be reached and no commit of it
            is in the cache.
    """
    asked = repo.revision
    commit, brought = (asked, {}) if _COMMIT.fullmatch(asked) else _resolve_branch(repo)
    repo.pin(commit)
    return commit, brought


def _resolve_branch(repo: Repo) -> tuple[str, dict[str, bytes | None]]:
    known = None if repo.options.force_download else _known_commit(repo)
    if repo.offline:
        if known is None:
            raise _nobody_knows(repo, OFFLINE)
        return known, {}
    try:
        commit, content = _ask(repo, patient=known is None)
    except (HfHubHTTPError, OSError, Unreachable) as error:
        stands = isinstance(error, (HfHubHTTPError, Unreachable))
        if known is not None and stands and not isinstance(error, RevisionNotFoundError):
            return known, {}
        if isinstance(error, Unreachable):
            raise _nobody_knows(repo, obstacle(error)) from error
        raise CheckpointError(repo.explain(error, CONFIG)) from error
    place = branch_file(repo.root, repo.repo_id, repo.revision)
    with suppress(OSError):  # needed offline only
        if not (place.is_file() and place.read_text() == commit):
            write_whole(place, commit.encode())
    return commit, {CONFIG: content}


def _ask(repo: Repo, *, patient: bool) -> tuple[str, bytes | None]:
    """Return the commit that the Hub names, and the config there, None if there is none."""
    remote, content = repo.remote(CONFIG), None
    try:
        content = remote.whole(json_limit(CONFIG), patient=patient, first=True)
    except RemoteEntryNotFoundError as error:
        remote.commit = error.response.headers.get("x-repo-commit")
    if remote.commit is None or not _COMMIT.fullmatch(remote.commit):
        raise Unreachable(
            f"the answer for {CONFIG} names no commit (X-Repo-Commit), so it is not from a Hub: "
            "check HF_ENDPOINT, proxy and firewall, or pass revision= a commit"
        )
    return remote.commit, content


def _nobody_knows(repo: Repo, why: str) -> CheckpointError:
    """Return the error where nobody says which commit the revision is; others may be kept."""
    commits = _kept_commits(repo)
    if not commits:
        return CheckpointError(
            f"{repo.label}: no such folder here, and {not_here(CONFIG, why)}"
            f"{similar_names(repo.repo_id)}"
        )
    more = f" and {len(commits) - SHOWN} more" if len(commits) > SHOWN else ""
    return CheckpointError(
        f"{repo.label}: the Hub cannot be asked where {repo.revision!r} stands ({why}), nor "
        f"was it before; commits kept of this repo, newest first: {', '.join(commits[:SHOWN])}"
        f"{more}: pass one as revision={commits[0]!r} (--revision), or load once with a connection"
    )


def _kept_commits(repo: Repo) -> list[str]:
    """Return the commits whose config is in our cache or the client's, newest first."""
    found: dict[str, int] = {}
    ours = repo_folder(repo.root, repo.repo_id)
    for place in (ours, repo.clients_folder / "snapshots"):
        with suppress(OSError):
            for folder in place.iterdir():
                commit = folder.name.partition("-")[0]
                if _COMMIT.fullmatch(commit) and _has_config(repo, commit):
                    when = folder.stat().st_mtime_ns
                    found[commit] = max(when, found.get(commit, 0))
    return sorted(found, key=lambda commit: -found[commit])


def _known_commit(repo: Repo) -> str | None:
    """Return the commit that the revision was last seen at, if its config is on this disk."""
    places = (
        branch_file(repo.root, repo.repo_id, repo.revision),
        repo.clients_folder / "refs" / repo.revision,
    )
    found: list[tuple[int, str]] = []
    for place in places:
        with suppress(OSError, ValueError):
            commit = place.read_text().strip()
            if _COMMIT.fullmatch(commit) and _has_config(repo, commit):
                found.append((place.stat().st_mtime_ns, commit))
    return max(found)[1] if found else None


def _has_config(repo: Repo, commit: str) -> bool:
    store = repo.store(commit)
    return (
        store.tower.is_dir()
        or store.knows(CONFIG)
        or isinstance(repo.clients_file(CONFIG, commit), Path)
    )
