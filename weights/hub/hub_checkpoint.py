"""A checkpoint on the Hub at one commit: its tower on this disk, else the files that are fetched.

Token, offline mode, endpoint and progress bars are the Hub client's, so that they behave as its
users expect. Of the weights only headers are read until the tensors are known to fit. Then either
the byte ranges of the tower are fetched into a cache of this package, or the shards that hold it
into the cache of the client.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import huggingface_hub

from ..cache.kept_tower import KeptTower
from ..errors import AbsentError, CheckpointError, DamagedError
from ..files.checkpoint import Checkpoint, Route, TensorLocation, TowerFiles, Traffic, json_limit
from ..files.tensor_file import Header
from ..strict_json import parse_json
from ..threads import in_parallel
from .downloads import download_shards, fetch_tower
from .http import RangesUnsupported, RemoteFile
from .messages import OFFLINE, missing_file_text
from .ranges import in_order, plan_requests
from .repo import HubOptions, Repo

SAVING = 0.9
"""``fetch="auto"`` fetches byte ranges if they transfer at most this fraction of what whole shards
would. Shards are preferred beyond it, because other programs can use them, too."""
FIRST_READ = 1 << 16
"""The bytes to read of a file for its header, if the length of the header is unknown."""
LISTING = ".listing.json"
"""The file name of the cached list of a repo's files; no repo has a file of this name."""
_DAMAGE = (
    "; if the file in the Hub client's cache is damaged, force_download=True (--force-download) "
    "fetches it again"
)


def open_repo(repo_id: str, options: HubOptions, damage: DamagedError | None = None) -> Checkpoint:
    """Open a repo of the Hub: its tower in the cache if there is one, else its files on the Hub.

    Args:
        repo_id: the repo, ``owner/name``.
        options: settings of requests.
        damage: the error of an earlier try to read the tower in the cache, which is then not used;
            else None.
    """
    repo = Repo(repo_id, options)
    answers = repo.resolve()
    tower = repo.store(repo.revision).tower
    if tower.is_dir() and damage is None and not options.force_download:
        try:
            return KeptTower(tower, repo.label, repo.revision, repo.offline)
        except DamagedError as error:
            damage = error
    return HubCheckpoint(repo, answers, damage)


class HubCheckpoint(Checkpoint):
    """A repo of the Hub at one commit, whose tower is not in the cache of this package, or damaged.

    ``folder`` is the commit's folder in the cache of the Hub's client, where whole files lie.

    Args:
        repo: the repo at its commit.
        answers: JSON files that were fetched to find the commit, by name; None for a file that the
            repo does not have.
        damage: why the tower in the cache is not used; None if the cache has none.
    """

    def __init__(
        self, repo: Repo, answers: Mapping[str, bytes | None], damage: DamagedError | None
    ) -> None:
        folder = repo.clients_folder / "snapshots" / repo.revision
        super().__init__(folder / (repo.options.subfolder or ""), label=repo.label)
        self.repo, self.store, self.damage = repo, repo.store(repo.revision), damage
        self.commit, self.offline = repo.revision, repo.offline
        # JSON files in the cache of this package, by name; None if the repo has no such file.
        self._kept_answers: dict[str, bytes | None] = {}
        if not repo.options.force_download:
            try:
                self._kept_answers = self.store.read_answers()
            except DamagedError as error:
                if self.offline:
                    raise self._cannot_repair("what is kept", error) from error
        self._answers = {**self._kept_answers, **answers}
        # Headers that were read from the Hub, by the name of the file.
        self._headers: dict[str, Header] = {}
        self._downloaded: set[str] = set()  # files that this load has fetched whole
        self._ranges_error: RangesUnsupported | None = None

    def content(self, name: str) -> bytes | None:
        """Return the bytes of the JSON file ``name``, requested at most once; None if absent."""
        if name not in self._answers:
            self._answers[name] = self._find(name)
        return self._answers[name]

    def contents(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of the JSON files that exist, by name; they are fetched in parallel."""
        names = list(names)
        in_parallel(lambda name, _: self.content(name), names, self.repo.options.max_workers)
        return super().contents(names)

    def _find(self, name: str) -> bytes | None:
        """Return the JSON file ``name`` from the client's cache, else the Hub; None if absent.

        Offline, a file that no cache knows is taken for one that the repo does not have.
        """
        if self._path(name) is not None:
            return super().content(name)
        forced = self.repo.options.force_download
        if self.offline or (not forced and self.repo.clients_file(name) is False):
            return None
        if self._answers.get(LISTING) is not None and name not in self.names():
            return None
        remote = self.repo.remote(name)
        try:
            return self.repo.ask(lambda: remote.read_all(json_limit(name)), name)
        except AbsentError:
            return None

    def _keep_answers(self) -> None:
        """Write the JSON files that the client's cache lacks to this package's, for later loads."""
        answers = {name: raw for name, raw in self._answers.items() if self._path(name) is None}
        if answers != self._kept_answers and not self.offline:
            with suppress(OSError):  # if they cannot be written, the next load asks the Hub again
                self.store.keep_answers(answers)

    def has(self, name: str) -> bool:
        """Return whether the repo has the safetensors file ``name``; this may fetch its header."""
        if name in self._headers or self._path(name) is not None:
            return True
        if self.offline or name in self._answers:
            return name not in self._answers and name in self.names()
        try:  # the header costs one request, as a list of files would, and is needed next anyway
            self.headers({name: 0})
        except AbsentError:
            self._answers[name] = None
        return name not in self._answers

    def names(self) -> list[str]:
        """Return the names of the repo's files or, offline, of its files on this disk."""
        listing = self._answers.get(LISTING)
        if listing is not None:
            return list(json.loads(listing))
        if self.offline:
            names = super().names() if self.folder.is_dir() else []
            if not any(name.endswith((".safetensors", ".index.json")) for name in names):
                raise self._not_here("an index or weights")
            return names
        repo, subject = self.repo, "the list of files"
        endpoint = huggingface_hub.constants.ENDPOINT
        url = f"{endpoint}/api/models/{repo.repo_id}/revision/{self.commit}"
        remote = RemoteFile(url, repo.options.token, f"{self.label}: {subject}")
        raw = repo.ask(lambda: remote.read_all(json_limit(".index.json")), subject)
        prefix = self.repo.inside("x")[:-1]
        siblings = parse_json(raw, f"{self.label}: {subject}").get("siblings")
        siblings = siblings if isinstance(siblings, list) else []
        files = [str(file.get("rfilename")) for file in siblings if isinstance(file, Mapping)]
        names = sorted(file[len(prefix) :] for file in files if file.startswith(prefix))
        self._answers[LISTING] = json.dumps(names).encode()
        return names

    def headers(self, guesses: Mapping[str, int]) -> dict[str, Header]:
        """Return the headers of the files in ``guesses``, fetched unless a file is on this disk.

        ``guesses`` has about how many bytes each header has, 0 if unknown.
        """
        names, workers = list(guesses), self.repo.options.max_workers
        headers = in_parallel(lambda name, _: self._header(name, guesses[name]), names, workers)
        return dict(zip(names, headers, strict=True))

    def _header(self, name: str, guess: int) -> Header:
        if self._path(name) is None:
            if self.offline:
                raise self._not_here(name)
            try:
                return self._remote_header(name, guess or FIRST_READ)
            except RangesUnsupported as error:
                self._ranges_error = error
                self._download([name])
        return super().headers({name: guess})[name]

    def _remote_header(self, name: str, length: int) -> Header:
        if name not in self._headers:
            remote = self.repo.remote(name)
            self._headers[name] = self.repo.ask(lambda: remote.header(length), name)
            if not remote.ranges:
                self._ranges_error = RangesUnsupported(
                    f"{remote.label}: the server ignores byte ranges"
                )
        return self._headers[name]

    def locate(self, tower_files: TowerFiles) -> dict[str, TensorLocation]:
        """Fetch the tower as byte ranges or shards, and return where each of its tensors lies."""
        tower_files.files()
        self._keep_answers()
        if self._route(tower_files) == "ranges":
            headers = self.headers(dict.fromkeys(tower_files.published.shards, 0))
            check = self.damage is not None
            try:
                fetch = partial(fetch_tower, self.repo, tower_files, headers, check=check)
                return self.repo.ask(fetch, "the tower")
            except RangesUnsupported as error:
                self._ranges_error = error
        if self._ranges_error is not None and self.repo.options.fetch == "ranges":
            from encoders.contract import warn_caller  # with torch, which fetching does not need

            warn_caller(f"{self._ranges_error}: whole shards are downloaded instead")
        missing = [file for file in tower_files.published.shards if self._path(file) is None]
        if missing and self.offline:
            raise self._not_here(missing[0])
        self._download(missing)
        return super().locate(tower_files)

    def _download(self, names: list[str]) -> None:
        download_shards(self.repo, names)
        self._downloaded.update(names)

    def traffic(self, tower_files: TowerFiles) -> Traffic:
        """Return which files are cached, and how many bytes fetching the tower would transfer."""
        self._keep_answers()
        present = [self._path(file) is not None for file in tower_files.published.shards]
        cached = "shards" if all(present) else "some shards" if any(present) else "nothing"
        unfinished = self.store.partial.is_dir()
        return Traffic(cached, self._route(tower_files), self._range_bytes(tower_files), unfinished)

    def _route(self, tower_files: TowerFiles) -> Route:
        """Choose what to fetch: byte ranges of the tower, its whole shards, or nothing.

        Nothing is fetched if all shards are on this disk.
        """
        sizes = tower_files.published.shards
        missing = sum(sizes[file] for file in sizes if self._path(file) is None)
        if not missing:
            return "nothing"
        if self._ranges_error is not None or self.offline:
            return "shards"
        if self.repo.options.fetch != "auto":
            return self.repo.options.fetch
        return "ranges" if self._range_bytes(tower_files) <= SAVING * missing else "shards"

    def _range_bytes(self, tower_files: TowerFiles) -> int:
        headers = self.headers(dict.fromkeys(tower_files.published.shards, 0))
        requests = plan_requests(in_order(tower_files.tensors), headers, 0)
        return sum(request.end - request.begin for request in requests)

    def _path(self, name: str) -> Path | None:
        """Return the path of the whole file in the cache of the Hub's client, None if not there.

        With ``force_download``, only files that this load itself has fetched count.
        """
        if self.repo.options.force_download and name not in self._downloaded:
            return None
        path = self.repo.clients_file(name) or None
        self.advice = _DAMAGE if path else self.advice
        return path

    def _not_here(self, name: str) -> CheckpointError:
        """Return the error for an offline load that needs the file ``name``, not on this disk."""
        if self.damage is not None:
            return self._cannot_repair("the kept tower", self.damage)
        return CheckpointError(f"{self.label}: {missing_file_text(name, OFFLINE)}")

    def _cannot_repair(self, subject: str, damage: DamagedError) -> CheckpointError:
        return CheckpointError(
            f"{self.label}: {subject} is damaged and cannot be downloaded again offline "
            f"({damage}): load once with a connection, or remove it "
            f"(vitgraph cache remove {self.repo.repo_id})"
        )
