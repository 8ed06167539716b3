"""What stands between us and a file of the Hub, in one line that says what to do about it."""

from __future__ import annotations

import re

from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


def explain(error: BaseException, repo_id: str, revision: str, name: str) -> str:
    """One line that says what went wrong with ``name`` of a repo, and what to do about it."""
    where = f"{repo_id}@{revision}"
    reasons: list[tuple[type[BaseException], str]] = [
        (
            GatedRepoError,
            "the repo is gated: accept its terms on its page, then log in (hf auth login) or pass "
            "token=",
        ),
        (
            RepositoryNotFoundError,
            "no such folder here and no such repo on the Hub, or it is private: check the spelling "
            "(owner/name), log in (hf auth login) or pass token=",
        ),
        (
            RevisionNotFoundError,
            f"the repo has no revision {revision!r}: pass a branch, tag or commit that exists",
        ),
        (RemoteEntryNotFoundError, f"the repo has no file {name}"),
        (
            LocalEntryNotFoundError,
            f"{name} is not in the cache and the Hub cannot be reached ({_obstacle(error)}): load "
            "once with a connection, or pass the cache_dir it is in",
        ),
        (HFValidationError, f"not a repo id: {error}"),
    ]
    for kind, reason in reasons:
        if isinstance(error, kind):
            return f"{where}: {reason}"
    return f"{where}: {name} could not be fetched ({type(error).__name__}: {_one_line(error)})"


def _obstacle(error: BaseException) -> str:
    cause = error.__cause__
    if cause is None or isinstance(cause, OfflineModeIsEnabled):
        return "offline, or local_files_only=True"
    return f"{type(cause).__name__}: {_one_line(cause)}"


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()
