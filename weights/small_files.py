"""Config, index and processor files of a repo: ours if kept, else the client's, else fetched."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .errors import CheckpointError, DamagedError
from .obstacles import is_absence, is_full
from .repo import Repo
from .snapshot import json_limit
from .tensor_file import parse_json
from .tower_cache import TowerCache
from .workers import in_parallel


class SmallFiles:
    """The small files of a repo at its commit, each checked before it is used."""

    def __init__(self, repo: Repo, cache: TowerCache) -> None:
        self.repo = repo
        self.cache = cache
        self._found: dict[str, Path] = {}

    def find(self, name: str) -> Path | None:
        """The file on this disk, fetched if need be; None if the checkpoint has none.

        Offline, a file that nobody asked for before is taken for one that is not there.

        Raises:
            CheckpointError: it cannot be had, or what is kept is damaged and we are offline.
        """
        if name in self._found and self._found[name].is_file():  # else removed meanwhile
            return self._found[name]
        found = None if self.repo.options.force_download else self._here(name)
        if found is None and not self.repo.offline:
            found = self._fetch(name)
        if not isinstance(found, Path):
            return None
        self._found[name] = found
        return found

    def bring(self, names: Iterable[str]) -> None:
        """Have several at once."""
        in_parallel(lambda name, _: self.find(name), list(names), self.repo.options.max_workers)

    def adopt(self) -> None:
        """Keep copies of what the client has, so that a kept tower can do without it."""
        for name, path in self._found.items():
            if not path.is_relative_to(self.cache.files):
                with suppress(OSError):
                    self.cache.keep_small_file(name, path.read_bytes())

    def keep(self, name: str, content: bytes | None) -> Path | None:
        """Keep what the Hub answered: a file, or that there is none.

        Raises:
            CheckpointError: the cache cannot be written.
        """
        if content is None:
            with suppress(OSError):  # it will be asked for again
                self.cache.keep_small_file(name, None)
            return None
        try:
            self._found[name] = self.cache.keep_small_file(name, content)
        except OSError as error:
            repo = self.repo
            reason = (
                repo.explain(error, name)
                if is_full(error)
                else f"{repo.label}: {self.cache.folder}: cannot be written ({error}): pass a "
                "cache_dir that can be"
            )
            raise CheckpointError(reason) from error
        return self._found[name]

    def _here(self, name: str) -> Path | bool | None:
        try:
            found = self.cache.small_file(name)
        except DamagedError as error:
            if not self.repo.offline:
                return None
            found = self._clients(name)
            if isinstance(found, Path):
                return found
            raise CheckpointError(
                f"{self.repo.label}: the kept {name} is damaged and cannot be fetched again "
                f"offline ({error}): load once with a connection, or remove it (vitgraph cache "
                f"remove {self.repo.repo_id})"
            ) from error
        return self._clients(name) if found is None else found

    def _clients(self, name: str) -> Path | bool | None:
        """The client records no checksum: online, what is not even JSON is fetched again."""
        found = self.repo.clients(name)
        if isinstance(found, Path) and not self.repo.offline and not _reads(found, name):
            return None
        return found

    def _fetch(self, name: str) -> Path | None:
        """One request, where the client would send two; and no more bytes than will be read."""
        content: bytes | None = None
        try:
            remote = self.repo.remote(name)
            content = self.repo.ask(lambda: remote.whole(json_limit(name)), name)
        except CheckpointError as error:
            if not is_absence(error.__cause__):
                raise
        return self.keep(name, content)


def _reads(path: Path, name: str) -> bool:
    try:
        if path.stat().st_size > json_limit(name):
            return True  # refused where it is read
        parse_json(path.read_bytes(), name)
    except (OSError, CheckpointError):
        return False
    return True
