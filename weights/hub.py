"""Finding a checkpoint: a repo id through the Hub's own client, a folder, or one safetensors file.

Revision, token, cache, offline mode, endpoint and progress bars are the client's, so they behave as
its users expect. A branch is resolved to a commit once, by the first file; all else is read there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import HfApi, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client's library
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not marked public
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
)

from .errors import CheckpointError
from .snapshot import Snapshot, check_name, open_folder
from .tensor_file import Header, header_length, parse_header, read_header

FIRST_READ = 1 << 17
"""Bytes of the first read of a remote header: most are shorter, and one round trip is saved."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class HubOptions:
    """How to talk to the Hub; the fields are the keywords of ``hf_hub_download``."""

    revision: str | None = None
    subfolder: str | None = None
    cache_dir: str | Path | None = None
    token: bool | str | None = None
    local_files_only: bool = False
    force_download: bool = False
    progress: bool = True


def open_snapshot(repo_id_or_path: str | os.PathLike[str], options: HubOptions) -> Snapshot:
    """Find a checkpoint. An existing path wins over a repo id of the same spelling.

    Raises:
        CheckpointError: a path that is not there, a bad repo id, or a repo that cannot be read.
    """
    text = os.fspath(repo_id_or_path)
    path = Path(text).expanduser()
    if path.exists():
        return open_folder(path, options.subfolder)
    if not isinstance(repo_id_or_path, str) or _looks_like_path(text):
        raise CheckpointError(
            f"{text}: no such file or folder (and not a repo id, which reads owner/name)"
        )
    return HubSnapshot(text, options)


def _looks_like_path(text: str) -> bool:
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or text.count("/") != 1
        or text.endswith((".safetensors", "/"))
    )


class HubSnapshot(Snapshot):
    """A repo of the Hub at one commit, in the client's cache."""

    def __init__(self, repo_id: str, options: HubOptions) -> None:
        if options.force_download and options.local_files_only:
            raise CheckpointError(
                f"{repo_id}: force_download=True needs what local_files_only=True forbids"
            )
        self.repo_id = repo_id
        self.options = options
        self.revision = options.revision or "main"
        self.label = f"{repo_id}@{self.revision}"
        self._fetched: dict[str, Path] = {}
        self._headers: dict[str, Header] = {}
        self._listed: list[str] | None = None
        self.known = self._cached("config.json") is not None
        self.commit = None
        config = self.optional("config.json")
        if config is not None:
            depth = self._inside("config.json").count("/")
            self.commit = self.revision = config.parents[depth].name
            self.label = f"{repo_id}@{options.revision or 'main'} ({self.commit[:10]})"

    def path(self, name: str) -> Path:
        if name not in self._fetched:
            self._fetched[name] = self._ask(lambda: self._download(name), name)
        return self._fetched[name]

    def optional(self, name: str) -> Path | None:
        if self.commit and not self.options.force_download and self._cached(name) is False:
            return None
        try:
            return self.path(name)
        except CheckpointError as error:
            if isinstance(error.__cause__, RemoteEntryNotFoundError):
                return None
            # Offline with the config in the cache: whoever cached it found no such file.
            if isinstance(error.__cause__, LocalEntryNotFoundError) and self.known and self.commit:
                return None
            raise

    def has(self, name: str) -> bool:
        cached = None if self.options.force_download else self._cached(name)
        return name in self.names() if cached is None else cached is not False

    def header(self, name: str) -> Header:
        label = f"{self.label}: {name}"
        if name in self._fetched or (self._cached(name) and not self.options.force_download):
            return read_header(self.path(name), label)
        if name not in self._headers:
            remote = None if self._offline() else self._ask(lambda: self._remote_header(name), name)
            self._headers[name] = remote or read_header(self.path(name), label)
        return self._headers[name]

    def names(self) -> list[str]:
        if self._listed is None:
            self._listed = self._cached_names() if self._offline() else self._remote_names()
        return self._listed

    def _remote_names(self) -> list[str]:
        info = self._ask(
            lambda: HfApi(token=self.options.token).model_info(
                self.repo_id, revision=self.revision
            ),
            "the list of files",
        )
        prefix = self._inside("x")[:-1]
        files = [file.rfilename for file in info.siblings or ()]
        return sorted(file[len(prefix) :] for file in files if file.startswith(prefix))

    def _offline(self) -> bool:
        return self.options.local_files_only or huggingface_hub.constants.HF_HUB_OFFLINE

    def _inside(self, name: str) -> str:
        folder = self.options.subfolder
        return check_name(f"{folder}/{name}" if folder else name, self.label)

    def _cached(self, name: str) -> Path | bool | None:
        """The cached file; False if it is known not to exist; None if nothing is known."""
        try:
            found = try_to_load_from_cache(
                self.repo_id,
                self._inside(name),
                cache_dir=self.options.cache_dir,
                revision=self.revision,
            )
        except HFValidationError as error:
            raise CheckpointError(explain(error, self.repo_id, self.revision, name)) from error
        return Path(found) if isinstance(found, str) else None if found is None else False

    def _cached_names(self) -> list[str]:
        config = self._cached("config.json")
        if not isinstance(config, Path):
            return []
        return sorted(path.name for path in config.parent.iterdir() if path.is_file())

    def _download(self, name: str) -> Path:
        options = self.options
        with progress_bars(options.progress):
            return Path(
                hf_hub_download(
                    self.repo_id,
                    self._inside(name),
                    revision=self.revision,
                    cache_dir=options.cache_dir,
                    token=options.token,
                    local_files_only=options.local_files_only,
                    force_download=options.force_download,
                    library_name="vitgraph",
                )
            )

    def _remote_header(self, name: str) -> Header | None:
        """Read only the header of a remote file; None if the server does not do byte ranges."""
        label = f"{self.label}: {name}"
        url = hf_hub_url(self.repo_id, self._inside(name), revision=self.revision)
        raw = self._read_range(url, 0, FIRST_READ)
        if raw is None:
            return None
        end = 8 + header_length(raw, label)
        if end > len(raw) == FIRST_READ:
            rest = self._read_range(url, len(raw), end)
            raw += rest or b""
        if end > len(raw):
            raise CheckpointError(f"{label}: ends inside its header: truncated on the Hub")
        return parse_header(raw[8:end], label)

    def _read_range(self, url: str, start: int, end: int) -> bytes | None:
        headers = build_hf_headers(token=self.options.token, library_name="vitgraph")
        headers.update({"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"})
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
            hf_raise_for_status(response)
            return response.read() if response.status_code == 206 else None

    def _ask(self, question: Callable[[], _T], name: str) -> _T:
        try:
            return question()
        except CheckpointError:
            raise
        except (EntryNotFoundError, HTTPError, OSError, ValueError) as error:
            raise CheckpointError(explain(error, self.repo_id, self.revision, name)) from error


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Silence the client's bars for a while; its switch is one for the process."""
    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


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
