"""Errors of the Hub as one line each, which says what went wrong and what to do about it."""

from __future__ import annotations

import errno
import re

from huggingface_hub import errors

from ..published import similar_names
from .http import BUSY, Unreachable

OFFLINE = "offline, or local_files_only=True"
KEPT = "what has arrived is kept: load again to go on"
SPACE = "free some space or pass a cache_dir on another disk"


def explain(error: BaseException, repo_id: str, revision: str, name: str, page: str) -> str:
    """Return why a file was not fetched, and what to do about it.

    Args:
        error: the error of the Hub's client.
        repo_id: the repo, ``owner/name``.
        revision: branch, tag or commit that was asked for.
        name: the file.
        page: address of the repo's web page.
    """
    # The client raises a ValueError that says only "due to the above error"; its cause says more.
    if type(error) is ValueError and error.__cause__ is not None:
        error = error.__cause__
    reasons: dict[type[BaseException], str] = {
        errors.GatedRepoError: f"the repo is gated: accept its terms on {page}, then log in "
        "(hf auth login) or pass token=",
        errors.RepositoryNotFoundError: "no such folder here and no such repo on the Hub, or it is "
        "private: check the spelling (owner/name), log in (hf auth login) or pass token="
        + similar_names(repo_id),
        errors.RevisionNotFoundError: f"the repo has no revision {revision!r}: pass a branch, tag "
        "or commit that exists",
        errors.RemoteEntryNotFoundError: f"the repo has no file {name}",
        errors.LocalEntryNotFoundError: missing_file_text(name, obstacle(error)),
        errors.HFValidationError: f"not a repo id: {error}",
        Unreachable: f"{name}: given up after {error}; {KEPT}",
    }
    for kind, reason in reasons.items():
        if isinstance(error, kind):
            return reason
    if status(error) in BUSY:
        return f"{name}: given up after several tries ({obstacle(error)}); {KEPT}"
    if status(error) in (401, 403):
        return (
            f"access to {name} is refused ({_one_line(error)}): log in (hf auth login) or pass a "
            "token= that may read the repo"
        )
    if is_full(error):
        return f"the disk is full: {name} cannot be kept ({_one_line(error)}); {SPACE}"
    return f"{name} could not be fetched ({type(error).__name__}: {_one_line(error)})"


def obstacle(error: BaseException) -> str:
    """Return in a few words why the Hub cannot be reached, as ``error`` says."""
    if isinstance(error, errors.HfHubHTTPError):
        return f"the server answers {status(error)}"
    if isinstance(error, Unreachable):
        return _one_line(error)
    cause = error.__cause__
    if cause is None or isinstance(cause, errors.OfflineModeIsEnabled):
        return OFFLINE
    return f"{type(cause).__name__}: {_one_line(cause)}"


def missing_file_text(name: str, reason: str) -> str:
    """Return a message that the file ``name`` is not on this disk and cannot be fetched.

    The message gives the ``reason`` why the Hub cannot be reached, and says what to do.
    """
    return (
        f"{name} is not in the cache and the Hub cannot be reached ({reason}): load once with a "
        "connection, or pass the cache_dir it is in"
    )


def is_absence(error: BaseException) -> bool:
    """Return whether ``error`` says that a repo exists and has no such file.

    The Hub's answer says so in a header. Mirrors and plain servers answer 404 without that header.
    """
    return isinstance(error, errors.RemoteEntryNotFoundError) or (
        isinstance(error, errors.HfHubHTTPError)
        and error.response.status_code == 404
        and "x-error-code" not in error.response.headers
    )


def is_full(error: BaseException) -> bool:
    """Return whether ``error`` says that the disk, or the user's quota of it, is full."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and status(error) is None and error.errno in full


def status(error: BaseException) -> int | None:
    """Return the HTTP status that ``error`` reports, if it reports one."""
    return int(error.response.status_code) if isinstance(error, errors.HfHubHTTPError) else None


def _one_line(error: BaseException) -> str:
    text = re.sub(r"Bearer\s+[^'\"]*", "Bearer ...", str(error))
    return re.sub(r"\s+", " ", text).strip()
