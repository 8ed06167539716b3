"""Whole shards in the Hub client's cache: verified when first used, checked since, fetched again.

Other programs put shards there too, and the client checks nothing but their length. What holds of
one is recorded in our own cache (:mod:`.shard_records`), under the lock of the repo's commit, so
that several processes read a shard through once. A cache of ours that cannot be written has the
records that it has: without one, a shard is read through only if this load fetched it or it is
little but the tower; of any other the size and the header are all that is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event

from .client import download
from .errors import CheckpointError, DamagedError
from .repo import Repo
from .shard_records import (
    ShardRecord,
    file_sha256,
    measure,
    named_sha256,
    read_record,
    write_record,
)
from .tensor_file import Header, read_header
from .tower_cache import TowerCache
from .workers import Stopped, in_parallel

LITTLE_ELSE = 0.5
"""A shard of which the tower is at least this part costs little more to read than the tower."""


class WholeShards:
    """The shards of a repo at its commit."""

    def __init__(self, repo: Repo, cache: TowerCache) -> None:
        self.repo = repo
        self.cache = cache
        self._paths: dict[str, Path] = {}
        """Fetched by this load."""
        self._records: dict[str, ShardRecord] = {}
        self._unproved: set[str] = set()
        """Their headers were read, and nothing is recorded of them."""

    def find(self, name: str) -> Path | None:
        """The whole file, if it is here and may be used."""
        if name in self._paths and self._paths[name].is_file():  # else removed meanwhile
            return self._paths[name]
        found = None if self.repo.options.force_download else self.repo.clients(name)
        return found if isinstance(found, Path) else None

    def path(self, name: str) -> Path:
        """The same, fetched if need be: of a commit, a file that is here is the file."""
        found = self.find(name)
        if found is None:
            self.fetch({name: 0})
        return found or self._paths[name]

    def fetch(self, sizes: Mapping[str, int], *, force: bool = False) -> None:
        """Fetch whole files of so many bytes (0 where not known), even if here by ``force``."""
        self._paths |= download(self.repo, sizes, force=force)

    def header(self, name: str) -> Header:
        """The header of a shard, which is fetched again if it turns out damaged.

        Raises:
            CheckpointError: it is damaged on the Hub too, or cannot be fetched.
        """
        with suppress(DamagedError):
            return self._header(name)
        with self._alone():
            return self._sound_header(name)

    def _sound_header(self, name: str) -> Header:
        """The same, for who is alone."""
        try:
            return self._header(name)
        except DamagedError as error:
            self._replace(name, error)
        return read_header(self.path(name), self._label(name))

    def _header(self, name: str) -> Header:
        path, label, record = self.path(name), self._label(name), self._record(name)
        if record is not None:
            return record.read_header(path, label)
        self._unproved.add(name)
        try:
            return read_header(path, label)
        except CheckpointError as error:
            raise DamagedError(str(error)) from error

    def verified(self, wanted: Mapping[str, Collection[str]]) -> dict[str, Mapping[str, int]]:
        """The CRC-32 of tensors ``wanted`` of each shard, recorded or of one that proves sound.

        Nothing of a shard of which nothing is known, where no record can be kept.
        """
        unknown = [file for file, names in wanted.items() if not self._knows(file, names)]
        if unknown:
            with self._alone() as keep:
                task = lambda file, stop: self._prove(file, wanted[file], stop, keep=keep)  # noqa: E731
                in_parallel(task, unknown, self.repo.options.max_workers)
        known = {file: self._record(file) for file in wanted}
        return {file: record.crc32 if record else {} for file, record in known.items()}

    def _prove(self, file: str, names: Collection[str], stop: Event, *, keep: bool) -> None:
        if self._knows(file, names):  # another process was faster
            return
        header = self._sound_header(file)
        tower = sum(header.tensors[name].nbytes for name in names if name in header.tensors)
        if not (keep or file in self._paths or tower >= LITTLE_ELSE * header.file_bytes):
            return
        record = self._measure(file, names)
        named = self._named(file)
        if stop.is_set():  # whoever waited has let go of the lock
            raise Stopped
        if named not in (None, record.sha256):
            self._replace(file, DamagedError(f"{self._label(file)}: its SHA-256 is not its name"))
            record = self._measure(file, names)
        self._records[file] = record
        with suppress(OSError):
            write_record(self._place(file), record)

    def _measure(self, file: str, names: Collection[str]) -> ShardRecord:
        path, repo = self.path(file), self.repo
        header = read_header(path, self._label(file))
        return measure(path, header, names, repo.inside(file), repo.options.subfolder)

    def mend(self) -> bool:
        """Replace shards whose unproved headers were read and are damaged; whether any was.

        Raises:
            CheckpointError: one cannot be replaced.
        """
        if not self._unproved:
            return False
        with self._alone():
            damaged = [file for file in sorted(self._unproved) if self._is_misnamed(file)]
            for file in damaged:
                self._replace(file, DamagedError(f"{self._label(file)}: SHA-256 is not its name"))
        return bool(damaged)

    def repair(self, files: Collection[str], damage: DamagedError) -> None:
        """Replace those of ``files`` that are not what was recorded.

        Raises:
            CheckpointError: one cannot be replaced.
        """
        with self._alone():
            for file in files:
                path, record = self.find(file), self._record(file)
                if path is None or record is None:
                    continue
                try:
                    record.verify(path, self._label(file))
                except DamagedError:
                    self._replace(file, damage)

    def _replace(self, file: str, damage: DamagedError) -> None:
        """Fetch a shard again unless it is, after all, what the Hub calls it; forget its record.

        Two downloads that agree with each other, or one with what was recorded, and not with the
        name are of a server that does not name its files by their SHA-256.
        """
        path, record = self.find(file), self._record(file)
        before = None if path is None else file_sha256(path)
        if before is None or before != self._named(file):
            self._fetch_again(file, damage)
            after, named = file_sha256(self._paths[file]), self._named(file)
            if named is not None and after not in (named, before, record and record.sha256):
                raise CheckpointError(
                    f"{self._label(file)}: arrives damaged, two times (its SHA-256 is not its name "
                    "on the Hub): check disk, memory and proxy of this machine, and load again"
                )
        self._records.pop(file, None)
        with suppress(OSError):
            self._place(file).unlink(missing_ok=True)

    def _fetch_again(self, file: str, damage: DamagedError) -> None:
        if self.repo.offline:
            raise CheckpointError(
                f"{damage}; the file in the Hub client's cache is damaged and cannot be fetched "
                "again offline: load once with a connection, or pass the cache_dir of a sound one"
            ) from damage
        try:
            path = self.find(file)
            if path is not None and not path.is_symlink():  # the client would leave it there
                path.unlink()
            self.fetch({file: 0}, force=True)
        except (CheckpointError, OSError) as failure:
            raise CheckpointError(
                f"{damage}; the file in the Hub client's cache is damaged and could not be fetched "
                f"again: {failure}"
            ) from failure

    def _is_misnamed(self, file: str) -> bool:
        path, named = self.find(file), self._named(file)
        return path is not None and named is not None and file_sha256(path) != named

    def _named(self, file: str) -> str | None:
        path = self.find(file)
        return None if path is None else named_sha256(path, self.repo.remote(file).etag)

    def _knows(self, file: str, names: Collection[str]) -> bool:
        record = self._record(file)
        return record is not None and record.crc32.keys() >= set(names)

    def _record(self, file: str) -> ShardRecord | None:
        if file not in self._records:
            found = read_record(self._place(file))
            if found is None:
                return None
            self._records[file] = found
        return self._records[file]

    def _place(self, file: str) -> Path:
        return self.cache.record_of(file)

    def _label(self, file: str) -> str:
        return f"{self.repo.label}: {file}"

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Keep others out; yields False where our cache cannot be written."""
        with ExitStack() as held:
            try:
                held.enter_context(self.cache.lock())
                keep = True
            except OSError:
                keep = False
            yield keep
