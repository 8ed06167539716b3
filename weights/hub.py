"""Finding a checkpoint: a repo id through the Hub's own client, a folder, or one safetensors file.

Token, offline mode, endpoint and progress bars are the client's, so they behave as its users
expect. A branch is resolved to a commit once, by the config; all else is read there. Of the weights
only headers are read until the tensors are known to fit; then either the byte ranges of the tower
are fetched into a cache of our own, or the shards that hold it into the client's.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # as in remote.py

from .client import list_files
from .contents import PROCESSOR_FILES
from .errors import CheckpointError, DamagedError
from .hub_options import HubOptions
from .kept_tower import KeptTower
from .obstacles import OFFLINE, is_absence
from .ranges import in_order, plan_parts
from .remote import RangesUnsupported, TryAgain
from .remote_headers import FIRST_READ, header_without_ranges, remote_header
from .repo import Repo
from .revisions import CONFIG, resolve
from .snapshot import Located, Piece, Snapshot, Traffic, open_folder
from .tensor_file import Header
from .whole_shards import WholeShards
from .workers import in_parallel

SAVING = 0.9
"""``fetch="auto"`` takes ranges if they transfer at most this part of what the shards would: whole
shards, which other programs can use too, are worth a tenth."""
LISTING = ".listing.json"
"""Where the names of a repo's files are kept, if they had to be asked for."""


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
        self.repo = Repo(repo_id, options)
        self.options = options
        self.commit, self.small = resolve(self.repo)
        self.kept = KeptTower(self.repo, self.small.cache, self.commit)
        self.shards = WholeShards(self.repo, self.small.cache)
        self._from_shards: list[str] = []
        """The shards that tensors were last located in; none if that was the kept tower."""
        self._headers: dict[str, Header] = {}
        self._listed: list[str] | None = None
        self._fetch = options.fetch
        self._giving_up = Lock()
        if self.small.find(CONFIG) is not None:
            self.repo.label += f" ({self.commit[:10]})"
        self.label = self.repo.label

    # Files

    def path(self, name: str) -> Path:
        return self.shards.path(name)

    def optional(self, name: str) -> Path | None:
        return self.small.find(name)

    def has(self, name: str) -> bool:
        if name in self._headers or self.kept.header(name) is not None or self._have(name):
            return True
        if self.repo.offline or not name.endswith(".safetensors"):
            return name in self.names()
        return not self._is_absent(name)

    def _is_absent(self, name: str) -> bool:
        """Reading a file's header tells more than the list of all files, in as many requests."""
        cache = self.small.cache
        if not self.options.force_download and cache.small_file(name) is False:
            return True
        try:
            self.header(name)
        except CheckpointError as error:
            if is_absence(error.__cause__):
                self.small.keep(name, None)
                return True
            raise
        return False

    def names(self) -> list[str]:
        if self._listed is None:
            self._listed = self._kept_names()
        if self._listed is None and self.repo.offline:
            self._listed = self._cached_names()
        if self._listed is None:
            self._listed = list_files(self.repo)
            with suppress(CheckpointError):  # needed offline only
                self.small.keep(LISTING, json.dumps({"files": self._listed}).encode())
        return self._listed

    def _kept_names(self) -> list[str] | None:
        if self.options.force_download:
            return None
        with suppress(DamagedError):
            kept = self.small.cache.small_file(LISTING)
            return json.loads(kept.read_bytes())["files"] if isinstance(kept, Path) else None
        return None

    def _cached_names(self) -> list[str]:
        config = self.repo.clients(CONFIG)
        folder = config.parent.iterdir() if isinstance(config, Path) else ()
        names = sorted(path.name for path in folder if path.is_file())
        if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            raise CheckpointError(
                f"{self.label}: neither an index nor weights are in the cache, and which there are "
                f"cannot be asked ({OFFLINE}): load once with a connection, or pass the cache_dir "
                "they are in"
            )
        return names

    # Headers

    def header(self, name: str) -> Header:
        return self._header(name, FIRST_READ)

    def headers(
        self, names: Iterable[str], lengths: Mapping[str, int] | None = None
    ) -> dict[str, Header]:
        names, lengths = list(names), lengths or {}
        found = in_parallel(
            lambda name, _: self._header(name, lengths.get(name, FIRST_READ)),
            names,
            self.options.max_workers,
        )
        return dict(zip(names, found, strict=True))

    def _header(self, name: str, length: int) -> Header:
        if name in self._headers:
            return self._headers[name]
        kept = self.kept.header(name)
        if kept is not None:
            return kept
        if not self._have(name):
            if self.repo.offline:
                self.kept.refuse_offline()
            elif self._fetch_header(name, length):
                return self._headers[name]
        return self.shards.header(name)

    def _header_here(self, name: str) -> Header:
        return self.shards.header(name)

    def mend(self) -> bool:
        return self.shards.mend()

    def _fetch_header(self, name: str, length: int) -> bool:
        remote = self.repo.remote(name)
        try:
            self._headers[name] = self.repo.ask(lambda: remote_header(remote, length), name)
        except RangesUnsupported as error:
            self._give_up_ranges(error)
            return self._fetch_beginning(name, length)
        return True

    def _fetch_beginning(self, name: str, length: int) -> bool:
        """The header from the beginning of a whole answer, if that is the file as it is."""
        remote = self.repo.remote(name)
        with suppress(RangesUnsupported, HTTPError, TryAgain):
            self._headers[name] = header_without_ranges(remote, length)
        return name in self._headers

    # Tensors

    def locate(self, pieces: Sequence[Piece]) -> dict[str, Located]:
        files = list(dict.fromkeys(piece.file for piece in pieces))
        if self.kept.holds(pieces):
            self._from_shards = []
            return self.kept.locate(pieces)
        missing = [file for file in files if not self._have(file)]
        if self.repo.offline or not missing:
            if missing:
                self.kept.refuse_offline()
            return self._locate_in_shards(pieces)
        self.small.bring(f"{name}.json" for name in PROCESSOR_FILES)
        if self._ranges_pay(pieces):
            try:
                self.kept.fetch(pieces, self.headers(files))
                self.small.adopt()
                return self.kept.locate(pieces)
            except RangesUnsupported as error:
                self._give_up_ranges(error)
        headers = self.headers(missing)
        sizes = {file: header.file_bytes for file, header in headers.items()}
        self.shards.fetch(sizes)
        return self._locate_in_shards(pieces)

    def _locate_in_shards(self, pieces: Sequence[Piece]) -> dict[str, Located]:
        wanted: dict[str, list[str]] = {}
        for piece in pieces:
            wanted.setdefault(piece.file, []).append(piece.name)
        self._from_shards = list(wanted)
        sums = self.shards.verified(wanted)
        found = super().locate(pieces)
        return {
            piece.name: replace(found[piece.name], crc32=sums[piece.file].get(piece.name))
            for piece in pieces
        }

    def repair(self, error: DamagedError) -> None:
        if self._from_shards:
            self.shards.repair(self._from_shards, error)
        elif self.repo.offline and all(self._have(file) for file in self.kept.files()):
            self.kept.leave(error)
        else:
            self.kept.repair(error)

    def traffic(self, pieces: Sequence[Piece]) -> Traffic:
        headers = self.headers({piece.file for piece in pieces})
        have = [self._have(file) for file in headers]
        shards = "shards" if all(have) else "some shards" if any(have) else "nothing"
        return Traffic(
            _range_bytes(pieces, headers),
            sum(header.file_bytes for header in headers.values()),
            "tower" if self.kept.holds(pieces) else shards,
        )

    def _ranges_pay(self, pieces: Sequence[Piece]) -> bool:
        if self._fetch != "auto":
            return self._fetch == "ranges"
        headers = self.headers({piece.file for piece in pieces})
        shards = sum(h.file_bytes for file, h in headers.items() if not self._have(file))
        return _range_bytes(pieces, headers) <= SAVING * shards

    def _give_up_ranges(self, error: RangesUnsupported) -> None:
        with self._giving_up:  # of several headers at once, one says so
            before, self._fetch = self._fetch, "shards"
        if before == "ranges":
            warnings.warn(f"{error}: whole shards are fetched instead", stacklevel=2)

    def _have(self, name: str) -> bool:
        """Whether the whole file is here, and may be used."""
        return self.shards.find(name) is not None


def _range_bytes(pieces: Sequence[Piece], headers: Mapping[str, Header]) -> int:
    return sum(part.end - part.begin for part in plan_parts(in_order(pieces), headers, 0))
