"""A checkpoint on the Hub, at one commit: what is kept of it, else what is fetched.

Token, offline mode, endpoint and progress bars are the Hub client's, so they behave as its users
expect. A branch is resolved to a commit once, by the config; all else is read there. Of the weights
only headers are read until the tensors are known to fit; then either the byte ranges of the tower
are fetched into a cache of our own, or the shards that hold it into the client's.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ..cache.kept import KeptTower
from ..cache.store import Store, sweep
from ..errors import CheckpointError, DamagedError
from ..snapshot import (
    Located,
    Snapshot,
    Traffic,
    Wanted,
    check_size_of_json,
    json_limit,
    locate_in,
)
from ..tensor_file import Header, parse_json, read_header
from .downloads import download_shards, fetch_tower
from .http import RangesUnsupported
from .messages import OFFLINE, is_absence, is_full, not_here
from .options import HubOptions
from .parallel import in_parallel
from .ranges import in_order, plan_parts
from .repo import Repo
from .revisions import CONFIG, resolve

SAVING = 0.9
"""``fetch="auto"`` takes ranges if they transfer at most this part of what the shards would: whole
shards, which other programs can use too, are worth a tenth."""
FIRST_READ = 1 << 16
"""Bytes of the first read of a header of which nothing is known."""
LISTING = ".listing.json"
"""Where the names of a repo's files are kept, if they had to be asked for."""
_DAMAGE = (
    "if the file in the Hub client's cache is damaged, force_download=True (--force-download) "
    "fetches it again"
)


def open_repo(repo_id: str, options: HubOptions, damage: DamagedError | None = None) -> Snapshot:
    """Open a repo of the Hub: its kept tower if there is one, else what can be fetched of it.

    Args:
        repo_id: ``owner/name``.
        options: how to talk to the Hub.
        damage: what was found to be wrong with the kept tower, which is then not used.

    Raises:
        CheckpointError: a bad repo id, or a repo or revision that cannot be read.
    """
    repo = Repo(repo_id, options)
    commit, brought = resolve(repo)
    store = repo.store(commit)
    sweep(store.folder.parent)
    sweep(store.folder)
    label = f"{repo.label} ({commit[:10]})"
    if store.tower.is_dir() and damage is None and not options.force_download:
        try:
            kept = KeptTower(store.tower)
        except DamagedError as error:
            damage = error
        else:
            kept.label, kept.commit, kept.offline = label, commit, repo.offline
            return kept
    return HubSnapshot(repo, commit, store, brought, damage)


class HubSnapshot(Snapshot):
    """A repo of the Hub at one commit, of which no tower is kept."""

    def __init__(
        self,
        repo: Repo,
        commit: str,
        store: Store,
        brought: Mapping[str, bytes | None],
        damage: DamagedError | None,
    ) -> None:
        self.repo = repo
        self.commit = commit
        self.store = store
        self.damage = damage
        self.offline = repo.offline
        self._contents: dict[str, bytes | None] = {}
        self._headers: dict[str, Header] = {}
        """Headers that were read from the Hub."""
        self._downloaded: dict[str, Path] = {}
        """Whole files that this load has downloaded."""
        self._refused: RangesUnsupported | None = None
        for name, content in brought.items():
            self._keep(name, content)
        if self.content(CONFIG) is not None:
            repo.label += f" ({commit[:10]})"
        self.label = repo.label

    # Small files

    def content(self, name: str) -> bytes | None:
        if name not in self._contents:
            self._contents[name] = self._find(name)
        return self._contents[name]

    def contents(self, names: Iterable[str]) -> dict[str, bytes]:
        workers, names = self.repo.options.max_workers, list(names)
        found = in_parallel(lambda name, _: self.content(name), names, workers)
        return {
            name: content for name, content in zip(names, found, strict=True) if content is not None
        }

    def _find(self, name: str) -> bytes | None:
        """What is kept, else what the client has, else what the Hub answers.

        Offline, a file that nobody asked for before is taken for one that is not there.
        """
        damage: DamagedError | None = None
        if not self.repo.options.force_download:
            if self.store.knows(name):
                try:
                    return self.store.small_file(name)
                except DamagedError as error:
                    damage = error
            theirs = self.repo.clients_file(name)
            if theirs is False:
                return None
            if isinstance(theirs, Path):
                check_size_of_json(name, theirs.stat().st_size, f"{self.repo.label}: {name}")
                self.advice = f"; {_DAMAGE}"
                return self.repo.ask(theirs.read_bytes, name)
        if self.offline:
            if damage is not None:
                raise self._cannot_repair(f"the kept {name}", damage)
            return None
        content: bytes | None = None
        remote = self.repo.remote(name)
        try:
            content = self.repo.ask(lambda: remote.whole(json_limit(name)), name)
        except CheckpointError as error:
            if not is_absence(error.__cause__):
                raise
        return self._keep(name, content)

    def _keep(self, name: str, content: bytes | None) -> bytes | None:
        """Keep what the Hub answered for the next load; a cache that is read-only keeps nothing."""
        self._contents[name] = content
        try:
            self.store.keep_small_file(name, content)
        except OSError as error:
            if is_full(error):
                raise CheckpointError(self.repo.explain(error, name)) from error
        return content

    def has(self, name: str) -> bool:
        if name in self._headers or self._here(name) is not None:
            return True
        if not self.repo.options.force_download and self.store.knows(name):
            return self.content(name) is not None
        if self.offline or not name.endswith(".safetensors"):
            return name in self.names()
        try:  # a file's header tells more than the list of all files, in as many requests
            self.headers([name])
        except CheckpointError as error:
            if is_absence(error.__cause__):
                self._keep(name, None)
                return False
            raise
        return True

    def names(self) -> list[str]:
        store, options = self.store, self.repo.options
        if not options.force_download and store.knows(LISTING):
            with suppress(DamagedError):
                return list(json.loads(store.small_file(LISTING) or b"[]"))
        if self.offline:
            return self._names_here()
        remote, label = self.repo.listing(), f"{self.repo.label}: the list of files"
        raw = self.repo.ask(lambda: remote.whole(json_limit(".index.json")), "the list of files")
        prefix = self.repo.inside("x")[:-1]
        files = [str(file.get("rfilename")) for file in parse_json(raw, label).get("siblings", ())]
        names = sorted(file[len(prefix) :] for file in files if file.startswith(prefix))
        self._keep(LISTING, json.dumps(names).encode())
        return names

    def _names_here(self) -> list[str]:
        config = self.repo.clients_file(CONFIG)
        folder = config.parent.iterdir() if isinstance(config, Path) else ()
        names = sorted(path.name for path in folder if path.is_file())
        if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            raise self._not_here("an index or weights")
        return names

    # Headers

    def headers(
        self, names: Iterable[str], lengths: Mapping[str, int] | None = None
    ) -> dict[str, Header]:
        known = lengths or {}
        return self._each(names, lambda name: self._header(name, known.get(name, FIRST_READ)))

    def _each(self, names: Iterable[str], read: Callable[[str], Header]) -> dict[str, Header]:
        found = list(names)
        workers = self.repo.options.max_workers
        headers = in_parallel(lambda name, _: read(name), found, workers)
        return dict(zip(found, headers, strict=True))

    def _header(self, name: str, length: int) -> Header:
        path = self._here(name)
        if path is None and self.offline:
            raise self._not_here(name)
        if path is None:
            try:
                return self._remote_header(name, length)
            except RangesUnsupported as error:
                self._refused = error
                path = self._download([name])[name]
        try:
            header = read_header(path, f"{self.label}: {name}")
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_DAMAGE}") from error
        self.advice = f"; {_DAMAGE}"
        return header

    def _remote_header(self, name: str, length: int) -> Header:
        if name not in self._headers:
            remote = self.repo.remote(name)
            self._headers[name] = self.repo.ask(lambda: remote.header(length), name)
            if not remote.ranges:
                self._refused = RangesUnsupported(f"{remote.label}: the server ignores byte ranges")
        return self._headers[name]

    # Tensors

    def locate(self, wanted: Wanted) -> dict[str, Located]:
        sizes = wanted.published.shards
        missing = [file for file in sizes if self._here(file) is None]
        if missing and self.offline:
            raise self._not_here(missing[0])
        if self._way(wanted) == "ranges":
            try:
                return self._fetch(wanted).locate(wanted)
            except RangesUnsupported as error:
                self._refused = error
        if self._refused is not None and self.repo.options.fetch == "ranges":
            text = f"{self._refused}: whole shards are fetched instead"
            warnings.warn(text, stacklevel=2)
        self._download(missing)
        found: dict[str, Located] = {}
        for file in sizes:
            path, label = self._here(file), f"{self.label}: {file}"
            if path is None:
                raise DamagedError(f"{label}: removed while it was being loaded")
            pieces = [piece for piece in wanted.pieces if piece.file == file]
            found |= locate_in(path, pieces, label)
        return found

    def _fetch(self, wanted: Wanted) -> KeptTower:
        shards = wanted.published.shards
        headers = self._each(shards, lambda name: self._remote_header(name, FIRST_READ))
        for piece in wanted.pieces:
            if headers[piece.file].tensors.get(piece.name) != piece.entry:
                raise CheckpointError(f"{self.label}: {piece.file}: changed while being loaded")
        return self.repo.ask(
            lambda: fetch_tower(
                self.repo, self.store, wanted, headers, check=self.damage is not None
            ),
            "the tower",
        )

    def _download(self, names: Iterable[str]) -> dict[str, Path]:
        found = download_shards(self.repo, names)
        self._downloaded |= found
        return found

    def traffic(self, wanted: Wanted) -> Traffic:
        here = [self._here(file) is not None for file in wanted.published.shards]
        cached = "shards" if all(here) else "some shards" if any(here) else "nothing"
        unfinished = self.store.partial.is_dir()
        return Traffic(cached, self._way(wanted), self._range_bytes(wanted), unfinished)

    def _way(self, wanted: Wanted) -> str:
        """What would be fetched: ``nothing``, ``ranges`` or ``shards``."""
        sizes = wanted.published.shards
        missing = sum(sizes[file] for file in sizes if self._here(file) is None)
        if not missing:
            return "nothing"
        if self._refused is not None:
            return "shards"
        if self.repo.options.fetch != "auto":
            return self.repo.options.fetch
        return "ranges" if self._range_bytes(wanted) <= SAVING * missing else "shards"

    def _range_bytes(self, wanted: Wanted) -> int:
        parts = plan_parts(in_order(wanted.pieces), self.headers(wanted.published.shards), 0)
        return sum(part.end - part.begin for part in parts)

    def _here(self, name: str) -> Path | None:
        """The whole file in the client's cache, if it is there and may be used."""
        path = self._downloaded.get(name)
        if path is None and not self.repo.options.force_download:
            theirs = self.repo.clients_file(name)
            path = theirs if isinstance(theirs, Path) else None
        return path if path is not None and path.is_file() else None  # else removed meanwhile

    def _not_here(self, name: str) -> CheckpointError:
        """Return the error for a file that is needed and cannot be asked for offline."""
        if self.damage is not None:
            return self._cannot_repair("the kept tower", self.damage)
        return CheckpointError(f"{self.repo.label}: {not_here(name, OFFLINE)}")

    def _cannot_repair(self, what: str, damage: DamagedError) -> CheckpointError:
        return CheckpointError(
            f"{self.repo.label}: {what} is damaged and cannot be fetched again offline "
            f"({damage}): load once with a connection, or remove it (vitgraph cache remove "
            f"{self.repo.repo_id})"
        )
