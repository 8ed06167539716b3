"""The tower of one repo at one commit in our own cache: looked up, fetched, repaired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import CheckpointError, DamagedError
from .fetch import Order, fetch_tower
from .repo import Repo
from .snapshot import Located, Piece
from .tensor_file import Header
from .tower_cache import Entry, TowerCache, drop, sweep


class KeptTower:
    """What is kept of a repo's tensors, if anything."""

    def __init__(self, repo: Repo, cache: TowerCache, commit: str) -> None:
        self.repo = repo
        self.cache = cache
        self.commit = commit
        self._entry: Entry | None = None
        self._damage: DamagedError | None = None
        sweep(cache.folder.parent)
        sweep(cache.folder)
        if not repo.options.force_download:
            try:
                self._entry = cache.entry()
            except DamagedError as error:
                self._damage = error

    def header(self, name: str) -> Header | None:
        """The header of a shard that the tower was taken from."""
        return None if self._entry is None else self._entry.headers.get(name)

    def holds(self, pieces: Sequence[Piece]) -> bool:
        """Whether every one of ``pieces`` is kept."""
        return self._entry is not None and self._entry.holds(pieces)

    def files(self) -> list[str]:
        """The shards that the tower was taken from."""
        return [] if self._entry is None else list(self._entry.headers)

    def locate(self, pieces: Sequence[Piece]) -> dict[str, Located]:
        """Where each of ``pieces`` lies; they must be held."""
        assert self._entry is not None
        return self._entry.locate(pieces)

    def fetch(self, pieces: Sequence[Piece], headers: Mapping[str, Header]) -> None:
        """Fetch ``pieces`` by byte ranges; from then on they are held.

        Raises:
            RangesUnsupported: the server does not do byte ranges.
            CheckpointError: they cannot be had, or the disk is full.
        """
        repo = self.repo
        order = Order(
            label=repo.label,
            pieces=pieces,
            headers=headers,
            remotes={file: repo.remote(file) for file in headers},
            about={
                "repo": repo.repo_id,
                "commit": self.commit,
                "subfolder": repo.options.subfolder,
            },
            max_workers=repo.options.max_workers,
            progress=repo.options.progress,
        )
        force = repo.options.force_download
        self._entry = repo.ask(lambda: fetch_tower(self.cache, order, force=force), "the tower")

    def repair(self, error: DamagedError) -> None:
        """Drop what turned out damaged, so that it is fetched again.

        Raises:
            CheckpointError: it cannot be, offline.
        """
        self._damage = error
        if self.repo.offline:
            self.refuse_offline()
        try:
            self._drop_damaged()
        except OSError as failure:
            raise CheckpointError(
                f"{error}; it cannot be replaced ({failure.strerror}: {failure.filename}): remove "
                "it yourself, or pass a cache_dir that can be written"
            ) from failure

    def leave(self, error: DamagedError) -> None:
        """Do without what turned out damaged, where the shards that it was taken from are here."""
        self._entry, self._damage = None, error

    def _drop_damaged(self) -> None:
        with self.cache.lock():
            try:
                self._entry = self.cache.entry()
                if self._entry is not None:  # another process may have been faster
                    self._entry.verify()
            except DamagedError:
                self._entry = None
                drop(self.cache.tower)

    def refuse_offline(self) -> None:
        """Raise a :class:`CheckpointError` if the kept tower is damaged."""
        if self._damage is not None:
            raise CheckpointError(
                f"{self.repo.label}: the kept tower is damaged and cannot be fetched again offline "
                f"({self._damage}): load once with a connection, or remove it (vitgraph cache "
                f"remove {self.repo.repo_id})"
            ) from self._damage
