"""One repo of the Hub at one revision: its commit, and the addresses of its files on Hub and disk.

A branch is resolved by one request for ``config.json``, whose answer names the commit. The commit
is recorded in the cache of this package; the Hub's client records commits in its own cache, too.
The newer record is used if no request may be sent, or if the Hub cannot be reached.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias, TypeVar, get_args

import huggingface_hub
from huggingface_hub import hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ..cache.store import TEXT_SUFFIX, Part, Store, cache_root, repo_folder
from ..errors import AbsentError, CheckpointError, legible
from ..files.checkpoint import LONGEST_PART, check_name, json_limit
from ..files.writing import write_atomic
from ..published import similar_names
from .http import RemoteFile, Unreachable
from .messages import OFFLINE, explain, is_absence, missing_file_text, obstacle

CONFIG = "config.json"
Fetch: TypeAlias = Literal["auto", "ranges", "shards"]
"""Whether a tower is downloaded as byte ranges of shards, as whole shards, or ("auto") as ranges if
these transfer clearly fewer bytes."""
FETCHES: tuple[Fetch, ...] = get_args(Fetch)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_T = TypeVar("_T")


@dataclass(frozen=True)
class HubOptions:
    """The settings of requests to the Hub: keywords of :func:`~weights.load_encoder`.

    A ``subfolder`` like ``./a//b/`` is stored as ``a/b``, a ``token`` without surrounding spaces.
    """

    revision: str | None = None
    subfolder: str | None = None
    cache_dir: str | Path | None = None
    token: bool | str | None = field(default=None, repr=False)
    local_files_only: bool = False
    force_download: bool = False
    fetch: Fetch = "auto"
    max_workers: int = 8
    progress: bool = True
    part: Part = "vision tower"

    def __post_init__(self) -> None:
        if self.fetch not in FETCHES:
            raise ValueError(f"fetch={self.fetch!r}: must be one of {', '.join(FETCHES)}")
        if type(self.max_workers) is not int or not 1 <= self.max_workers <= 64:
            raise ValueError(f"max_workers={self.max_workers!r}: must be an integer from 1 to 64")
        for name, value in (("revision", self.revision), ("subfolder", self.subfolder)):
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name}={value!r}: must be a string, or None")
        if not isinstance(self.cache_dir, str | Path | None):
            raise ValueError(f"cache_dir={self.cache_dir!r}: must be a path, or None")
        if self.cache_dir == "":
            raise ValueError("cache_dir='': pass a folder, or None for the Hub client's own cache")
        parts = Path(self.cache_dir or ".").parts
        if any(len(part.encode(errors="replace")) > LONGEST_PART for part in parts):
            raise ValueError(
                f"cache_dir={legible(str(self.cache_dir))!r}: has a name of over {LONGEST_PART} "
                "bytes, which no file system allows; pass another folder"
            )
        object.__setattr__(self, "subfolder", _plain_folder(self.subfolder))
        object.__setattr__(self, "token", _plain_token(self.token))


def _plain_folder(subfolder: str | None) -> str | None:
    """Return a folder of a repo in plain form, ``a/b`` for ``./a//b/``; None is the repo itself.

    A path that leads out of the repo raises a CheckpointError.
    """
    path = PurePosixPath(subfolder or "")
    if path.is_absolute() or ".." in path.parts or "\\" in str(path):
        raise CheckpointError(
            f"subfolder={str(path)[:200]!r}: leaves the checkpoint; pass the names of folders "
            "inside it, joined by '/'"
        )
    return path.as_posix() if path.parts else None


def _plain_token(token: bool | str | None) -> bool | str | None:
    if not isinstance(token, str):
        return token
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"token=<{len(token)} characters, not shown>: a token is one line of letters, digits "
            "and signs without spaces; copy it again, or log in (hf auth login)"
        )
    return token


class Repo:
    """A repo on the Hub at one revision; :meth:`resolve` finds the commit of the revision."""

    def __init__(self, repo_id: str, options: HubOptions) -> None:
        self.repo_id = repo_id
        self.options = options
        self.revision = options.revision or "main"
        self.label = f"{repo_id}@{self.revision}"
        # This package's cache folder, for towers and JSON files.
        self.root = cache_root(options.cache_dir)
        constants = huggingface_hub.constants
        self.offline: bool = options.local_files_only or constants.HF_HUB_OFFLINE
        cache = Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser()
        self.clients_folder = cache / ("models--" + repo_id.replace("/", "--"))
        self._remotes: dict[str, RemoteFile] = {}
        self.ask(lambda: validate_repo_id(repo_id), "it")
        if options.force_download and self.offline:
            raise CheckpointError(
                f"{repo_id}: force_download=True needs what local_files_only=True or "
                "HF_HUB_OFFLINE forbids"
            )

    def resolve(self) -> dict[str, bytes | None]:
        """Find the commit of the revision; all files are read at this commit afterwards.

        Returns:
            ``config.json``, which the Hub's answer contains: name -> bytes, None if the repo has no
            such file. The dict is empty if no request was sent or answered.
        """
        answer: dict[str, bytes | None] = {}
        if not _COMMIT.fullmatch(self.revision):
            self.revision, answer = self._resolve_branch()
            self._remotes.clear()
        self.label += f" ({self.revision[:10]})"
        return answer

    def _resolve_branch(self) -> tuple[str, dict[str, bytes | None]]:
        # The record is named by a hash, because a branch may have a name that no file can have.
        name = sha256(self.revision.encode()).hexdigest()[:32]
        record = repo_folder(self.root, self.repo_id) / "refs" / name
        last_commit = None if self.options.force_download else self._known_commit(record)
        if self.offline:
            if last_commit is None:
                raise self._unknown_revision(OFFLINE)
            return last_commit, {}
        try:
            commit, config = self.ask(lambda: self._ask_commit(patient=last_commit is None), CONFIG)
        except CheckpointError as error:
            cause = error.__cause__
            may_recover = isinstance(cause, (HfHubHTTPError, Unreachable))
            may_recover = may_recover and not isinstance(cause, RevisionNotFoundError)
            if last_commit is not None and may_recover:
                return last_commit, {}
            if isinstance(cause, Unreachable):
                raise self._unknown_revision(obstacle(cause)) from cause
            raise
        with suppress(OSError):  # only later loads without a connection need the record
            if not (record.is_file() and record.read_text() == commit):
                write_atomic(record, commit.encode())
        return commit, {CONFIG: config}

    def _ask_commit(self, *, patient: bool) -> tuple[str, bytes | None]:
        """Ask the Hub for the commit of the revision and for ``config.json`` (None if missing).

        If ``patient``, busy servers are asked again, and broken connections tried up to six times.
        """
        remote, content = self.remote(CONFIG), None
        try:
            content = remote.read_all(json_limit(CONFIG), patient=patient, first=True)
        except RemoteEntryNotFoundError as error:
            remote.commit = error.response.headers.get("x-repo-commit")
        if remote.commit is None or not _COMMIT.fullmatch(remote.commit):
            raise Unreachable(
                f"the answer for {CONFIG} names no commit (X-Repo-Commit), so it is not from a "
                "Hub: check HF_ENDPOINT, proxy and firewall, or pass revision= a commit"
            )
        return remote.commit, content

    def _known_commit(self, record: Path) -> str | None:
        """Return the commit that the revision was last seen at; None if no record is usable.

        There are two records, the file ``record`` and one of the Hub's client. A record is usable
        if the config of its commit is on this disk; the newer one is used.
        """
        dated: list[tuple[int, str]] = []
        for path in (record, self.clients_folder / "refs" / self.revision):
            with suppress(OSError, ValueError):
                commit = path.read_text().strip()
                if not _COMMIT.fullmatch(commit):
                    continue
                store = self.store(commit)
                is_kept = store.tower.is_dir() or store.answers.is_file()
                if is_kept or self.clients_file(CONFIG, commit):
                    dated.append((path.stat().st_mtime_ns, commit))
        return max(dated)[1] if dated else None

    def _unknown_revision(self, reason: str) -> CheckpointError:
        """Return the error for a revision whose commit is not cached while the Hub is unreachable.

        The message gives the ``reason`` why the Hub cannot be reached.
        """
        has_files = repo_folder(self.root, self.repo_id).is_dir() or self.clients_folder.is_dir()
        hint = "; `vitgraph cache list` shows commits that load as revision= (--revision)"
        return CheckpointError(
            f"{self.label}: no such folder here, and {missing_file_text(CONFIG, reason)}"
            f"{hint if has_files else similar_names(self.repo_id)}"
        )

    def store(self, commit: str) -> Store:
        """Return the folder in the cache for the repo, or for its subfolder, at a commit."""
        subfolder = self.options.subfolder
        suffix = f"-{sha256(subfolder.encode()).hexdigest()[:16]}" if subfolder else ""
        suffix += TEXT_SUFFIX if self.options.part == "text half" else ""
        return Store(repo_folder(self.root, self.repo_id) / f"{commit}{suffix}")

    def inside(self, name: str) -> str:
        """Return the path inside the repo of the checkpoint's file ``name``.

        The path begins with the subfolder that holds the checkpoint, if there is one.
        """
        folder = self.options.subfolder
        return check_name(f"{folder}/{name}" if folder else name, self.label)

    def remote(self, name: str) -> RemoteFile:
        """Return the remote file on the Hub for the checkpoint's file ``name``."""
        if name not in self._remotes:
            url = hf_hub_url(self.repo_id, self.inside(name), revision=self.revision)
            self._remotes[name] = RemoteFile(url, self.options.token, f"{self.label}: {name}")
        return self._remotes[name]

    def clients_file(self, name: str, revision: str | None = None) -> Path | Literal[False] | None:
        """Look the file ``name`` up in the cache of the Hub's client.

        Args:
            name: name of the file in the checkpoint.
            revision: commit to look at; None for this object's own revision.

        Returns:
            The path of the file; False if the cache says that the repo has no such file, None if
            the cache does not know.
        """
        cached = try_to_load_from_cache(
            self.repo_id,
            self.inside(name),
            cache_dir=self.clients_folder.parent,
            revision=revision or self.revision,
        )
        return Path(cached) if isinstance(cached, str) else None if cached is None else False

    def ask(self, question: Callable[[], _T], name: str) -> _T:
        """Return ``question()``, which asks the Hub's client about the file ``name``.

        Raises:
            AbsentError: the repo has no such file.
            CheckpointError: the client raised another error; the message says why in one line.
        """
        try:
            return question()
        except CheckpointError:
            raise
        except (EntryNotFoundError, HTTPError, OSError, Unreachable, ValueError) as error:
            page = f"{huggingface_hub.constants.ENDPOINT}/{self.repo_id}"
            kind = AbsentError if is_absence(error) else CheckpointError
            reason = explain(error, self.repo_id, self.revision, name, page)
            raise kind(f"{self.label}: {reason}") from error
