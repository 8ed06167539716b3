"""Finding a checkpoint: a repo id through the Hub's own client, a folder, or one safetensors file.

Revision, token, cache, offline mode, endpoint and progress bars are the client's, so they behave as
its users expect. A branch is resolved to a commit once, by the config; all else is read there. Of
the weights only headers are read until the tensors are known to fit; then either the byte ranges of
the tower are fetched into a cache of our own, or the shards that hold it into the client's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import HfApi, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client's library
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    RemoteEntryNotFoundError,
)

from .errors import CheckpointError, DamagedError
from .fetch import Order, fetch_tower
from .hub_options import HubOptions, progress_bars
from .obstacles import explain
from .ranges import in_order, plan_parts
from .remote import RangesUnsupported, RemoteFile
from .snapshot import Located, Piece, Snapshot, Traffic, check_name, json_limit, open_folder
from .tensor_file import Header, check_size, header_length, parse_header, read_header
from .tower_cache import Entry, TowerCache, cache_root, drop

FIRST_READ = 1 << 16
"""Bytes of the first read of a header of which nothing is known."""
SAVING = 0.9
"""``fetch="auto"`` takes ranges if they transfer at most this part of what the shards would: whole
shards, which other programs can use too, are worth a tenth."""

_T = TypeVar("_T")


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
    """A repo of the Hub at one commit, in the client's cache and ours."""

    def __init__(self, repo_id: str, options: HubOptions) -> None:
        if options.force_download and options.local_files_only:
            raise CheckpointError(
                f"{repo_id}: force_download=True needs what local_files_only=True forbids"
            )
        self.repo_id = repo_id
        self.options = options
        self.revision = options.revision or "main"
        self.label = f"{repo_id}@{self.revision}"
        self.commit = None
        self.cache: TowerCache | None = None
        self._fetched: dict[str, Path] = {}
        self._headers: dict[str, Header] = {}
        self._remotes: dict[str, RemoteFile] = {}
        self._listed: list[str] | None = None
        self._entry: Entry | None = None
        self._damage: DamagedError | None = None
        self._fetch = options.fetch
        self.known = self._cached("config.json") is not None
        config = self.optional("config.json")
        if config is not None:
            self._pin(config.parents[self._inside("config.json").count("/")].name)

    def _pin(self, commit: str) -> None:
        """From here on everything is read at ``commit``."""
        self.commit = self.revision = commit
        self.label = f"{self.repo_id}@{self.options.revision or 'main'} ({commit[:10]})"
        self.cache = TowerCache.of(
            cache_root(self.options.cache_dir), self.repo_id, commit, self.options.subfolder
        )
        if not self.options.force_download:
            try:
                self._entry = self.cache.entry()
            except DamagedError as error:
                self._damage = error

    # Small files

    def path(self, name: str) -> Path:
        if name not in self._fetched:
            self._fetched[name] = self._ask(lambda: self._download(name), name)
        return self._fetched[name]

    def optional(self, name: str) -> Path | None:
        if self.cache is None:
            return self._optional_unpinned(name)
        if name in self._fetched:
            return self._fetched[name]
        found = None if self.options.force_download else self._cached(name)
        if found is None and not self.options.force_download:
            found = self.cache.small_file(name)
        if found is None and not self._offline():
            found = self._fetch_small(self.cache, name)
        if not isinstance(found, Path):  # offline, the repo in the cache: nobody found one before
            return None
        self._fetched[name] = found
        return found

    def _optional_unpinned(self, name: str) -> Path | None:
        try:
            return self.path(name)
        except CheckpointError as error:
            if isinstance(error.__cause__, RemoteEntryNotFoundError):
                return None
            raise

    def _fetch_small(self, cache: TowerCache, name: str) -> Path | bool | None:
        """One request, where the client would send two; and no more bytes than will be read."""
        content: bytes | None = None
        try:
            content = self._ask(lambda: self._remote(name).whole(json_limit(name)), name)
        except CheckpointError as error:
            if not isinstance(error.__cause__, RemoteEntryNotFoundError):
                raise
        self._ask(lambda: cache.keep_small_file(name, content), name)
        return cache.small_file(name)

    def has(self, name: str) -> bool:
        cached = None if self.options.force_download else self._cached(name)
        if cached is None and self._entry is not None and name in self._entry.headers:
            return True
        return name in self.names() if cached is None else cached is not False

    def names(self) -> list[str]:
        if self._listed is None and self._entry is not None:
            self._listed = self._entry.manifest.get("listed")
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

    def _cached_names(self) -> list[str]:
        config = self._cached("config.json")
        if not isinstance(config, Path):
            return []
        return sorted(path.name for path in config.parent.iterdir() if path.is_file())

    # Headers

    def header(self, name: str) -> Header:
        return self.headers([name])[name]

    def headers(
        self, names: Iterable[str], lengths: Mapping[str, int] | None = None
    ) -> dict[str, Header]:
        names, lengths = list(names), lengths or {}
        with (
            progress_bars(self.options.progress),
            ThreadPoolExecutor(self.options.max_workers) as pool,
        ):
            found = pool.map(lambda name: self._header(name, lengths.get(name, FIRST_READ)), names)
            return dict(zip(names, found, strict=True))

    def _header(self, name: str, length: int) -> Header:
        if name in self._headers:
            return self._headers[name]
        if self._entry is not None and name in self._entry.headers:
            return self._entry.headers[name]
        label = f"{self.label}: {name}"
        if self._have(name):
            return read_header(self.path(name), label)
        if self._offline():
            self._explain_damage()
            return read_header(self.path(name), label)
        try:
            header = self._ask(lambda: self._remote_header(name, length), name)
        except RangesUnsupported as error:
            self._give_up_ranges(error)
            header = read_header(self.path(name), label)
        self._headers[name] = header
        return header

    def _remote_header(self, name: str, length: int) -> Header:
        """Read only the header of a remote file, in one request if ``length`` is not too short."""
        label, remote = f"{self.label}: {name}", self._remote(name)
        raw = remote.read(0, length)
        end = 8 + header_length(raw, label)
        if end > len(raw):
            raw += remote.read(len(raw), end)
        if end > len(raw):
            raise CheckpointError(f"{label}: ends inside its header: truncated on the Hub")
        header = parse_header(raw[8:end], label)
        if remote.size is not None:
            check_size(header, remote.size, label)
        return header

    # Tensors

    def locate(self, pieces: Sequence[Piece]) -> dict[str, Located]:
        files = list(dict.fromkeys(piece.file for piece in pieces))
        if self._entry is not None and self._entry.holds(pieces):
            return self._entry.locate(pieces)
        if self._offline() or all(self._have(file) for file in files):
            if not all(self._have(file) for file in files):
                self._explain_damage()
            return super().locate(pieces)
        if self.cache is not None and self._ranges_pay(pieces):
            try:
                self._entry = self._fetch_ranges(self.cache, pieces)
                return self._entry.locate(pieces)
            except RangesUnsupported as error:
                self._give_up_ranges(error)
        with (
            progress_bars(self.options.progress),
            ThreadPoolExecutor(self.options.max_workers) as pool,
        ):
            list(pool.map(self.path, files))
        return super().locate(pieces)

    def traffic(self, pieces: Sequence[Piece]) -> Traffic:
        headers = self.headers({piece.file for piece in pieces})
        have = [self._have(file) for file in headers]
        kept = self._entry is not None and self._entry.holds(pieces)
        shards = "shards" if all(have) else "some shards" if any(have) else "nothing"
        return Traffic(
            self._range_bytes(pieces, headers),
            sum(header.file_bytes for header in headers.values()),
            "tower" if kept else shards,
        )

    def repair(self, error: DamagedError) -> None:
        self._damage = error
        if self._offline() or self.cache is None:
            self._explain_damage()
            raise error
        with self.cache.lock():
            try:
                self._entry = self.cache.entry()
                if self._entry is not None:  # another process may have been faster
                    self._entry.verify()
            except DamagedError:
                self._entry = None
                drop(self.cache.tower)

    def _ranges_pay(self, pieces: Sequence[Piece]) -> bool:
        if self._fetch != "auto":
            return self._fetch == "ranges"
        headers = self.headers({piece.file for piece in pieces})
        shards = sum(h.file_bytes for file, h in headers.items() if not self._have(file))
        return self._range_bytes(pieces, headers) <= SAVING * shards

    def _range_bytes(self, pieces: Sequence[Piece], headers: Mapping[str, Header]) -> int:
        return sum(part.end - part.begin for part in plan_parts(in_order(pieces), headers, 0))

    def _fetch_ranges(self, cache: TowerCache, pieces: Sequence[Piece]) -> Entry:
        files = sorted({piece.file for piece in pieces})
        about = {
            "repo": self.repo_id,
            "commit": self.commit,
            "subfolder": self.options.subfolder,
            "listed": self._listed,
        }
        order = Order(
            label=self.label,
            pieces=pieces,
            headers=self.headers(files),
            remotes={file: self._remote(file) for file in files},
            about=about,
            max_workers=self.options.max_workers,
            progress=self.options.progress,
        )
        force = self.options.force_download
        return self._ask(lambda: fetch_tower(cache, order, force=force), "the tower")

    def _give_up_ranges(self, error: RangesUnsupported) -> None:
        if self._fetch == "ranges":
            warnings.warn(f"{error}: whole shards are fetched instead", stacklevel=2)
        self._fetch = "shards"

    def _explain_damage(self) -> None:
        if self._damage is not None:
            raise CheckpointError(
                f"{self.label}: the kept tower is damaged and cannot be fetched again offline "
                f"({self._damage}): load once with a connection, or remove it (vitgraph cache "
                f"remove {self.repo_id})"
            ) from self._damage

    # The Hub

    def _offline(self) -> bool:
        return self.options.local_files_only or huggingface_hub.constants.HF_HUB_OFFLINE

    def _inside(self, name: str) -> str:
        folder = self.options.subfolder
        return check_name(f"{folder}/{name}" if folder else name, self.label)

    def _have(self, name: str) -> bool:
        """Whether the whole file is here, and may be used."""
        if name in self._fetched:
            return True
        return not self.options.force_download and isinstance(self._cached(name), Path)

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

    def _remote(self, name: str) -> RemoteFile:
        if name not in self._remotes:
            url = hf_hub_url(self.repo_id, self._inside(name), revision=self.revision)
            label = f"{self.label}: {name}"
            self._remotes[name] = RemoteFile(url, self.options.token, label)
        return self._remotes[name]

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

    def _ask(self, question: Callable[[], _T], name: str) -> _T:
        try:
            return question()
        except CheckpointError:
            raise
        except (EntryNotFoundError, HTTPError, OSError, ValueError) as error:
            raise CheckpointError(explain(error, self.repo_id, self.revision, name)) from error
