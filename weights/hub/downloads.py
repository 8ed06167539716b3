"""Bringing a tower to this disk: by byte ranges into our cache, or whole shards into the client's.

A fetch by ranges works in ``partial/`` of the store: the plan, the tower's folder with its file at
the final size, and a line for each request that is done. A fetch that is killed is continued with
the requests that are not done, once the others prove to be on the disk (a machine that lost power
may have kept the line and lost the bytes). Nothing here needs torch.
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any
from zlib import crc32

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # not marked public

from ..cache.kept import TENSORS, KeptTower, file_crc32, record_of, sealed_header
from ..cache.store import Store, drop, write_whole
from ..errors import CheckpointError, DamagedError
from ..snapshot import Wanted
from ..tensor_file import Header
from .http import RangesUnsupported
from .messages import disk_full, is_full
from .parallel import Stopped, in_parallel
from .ranges import Part, in_order, plan_parts
from .repo import Repo

WRITTEN = 1 << 20
"""Bytes that are written to the disk at once."""


def fetch_tower(
    repo: Repo, store: Store, wanted: Wanted, headers: Mapping[str, Header], *, check: bool
) -> KeptTower:
    """Fetch a tower by byte ranges unless it is kept; one fetch however many ask at once.

    Args:
        repo: the repo, at its commit.
        store: where the tower is kept.
        wanted: the tower.
        headers: of the files that hold it, read from the Hub.
        check: whether to read a tower that is there before it is believed.

    Raises:
        RangesUnsupported: the server does not do byte ranges.
        HfHubHTTPError, Unreachable: the Hub refuses, or the connection broke too often.
        CheckpointError: a file changed meanwhile, the disk is full or cannot be written.
    """
    files = wanted.files()
    try:
        with store.lock():
            if not repo.options.force_download and (kept := _kept(store, wanted, check=check)):
                return kept
            try:
                _Fetch(repo, store, wanted, files, headers).run()
            except RangesUnsupported:
                drop(store.partial)
                raise
            except OSError as error:
                if is_full(error):
                    drop(store.partial)
                raise
            drop(store.tower)
            (store.partial / "tower").rename(store.tower)
            drop(store.partial)
            drop(store.files)
            return KeptTower(store.tower)
    except HfHubHTTPError:  # an OSError too, and not one of this disk
        raise
    except OSError as error:
        if is_full(error):
            needed = sum(piece.entry.nbytes for piece in wanted.pieces)
            left = "nothing was left behind"
            raise disk_full(repo.label, "the tower", needed, repo.root, left) from error
        raise CheckpointError(
            f"{repo.label}: {store.folder}: cannot be written ({error}): pass a cache_dir that can "
            "be"
        ) from error


def _kept(store: Store, wanted: Wanted, *, check: bool) -> KeptTower | None:
    """Return what another thread or process fetched while this one waited."""
    try:
        kept = KeptTower(store.tower)
        if check:
            kept.verify()
    except (DamagedError, OSError):
        return None
    return kept if kept.holds(wanted.pieces) else None


class _Fetch:
    """One fetch into the ``partial`` folder of a store."""

    def __init__(
        self,
        repo: Repo,
        store: Store,
        wanted: Wanted,
        files: Mapping[str, bytes],
        headers: Mapping[str, Header],
    ) -> None:
        self.repo = repo
        self.folder = store.partial
        self.files = files
        self.pieces = in_order(wanted.pieces)
        options, commit = repo.options, repo.revision
        self.record = record_of(wanted, files, repo.repo_id, commit, options.subfolder)
        self.head = sealed_header(self.pieces, self.record)
        self.parts = plan_parts(self.pieces, headers, len(self.head))
        self.size = len(self.head) + sum(piece.entry.nbytes for piece in self.pieces)
        self.remotes = {file: repo.remote(file) for file in headers}
        self.tower = self.folder / "tower"
        self.done = self.folder / "done"

    def run(self) -> None:
        """Fetch what is missing, and complete the folder of the tower."""
        done = self._begin()
        options, total = self.repo.options, sum(part.end - part.begin for part in self.parts)
        with tqdm(  # type: ignore[no-untyped-call]
            total=total,
            unit="B",
            unit_scale=True,
            desc="vision tower",
            disable=None if options.progress else True,
            name="vitgraph.fetch",
        ) as bar:

            def fetch(number: int, stop: Event) -> None:
                part = self.parts[number]
                if number in done and done[number] == self._crc32(part):
                    bar.update(part.end - part.begin)
                else:
                    self._fetch(number, part, stop, bar)

            in_parallel(fetch, range(len(self.parts)), options.max_workers)
        self._finish()

    def _begin(self) -> dict[int, int]:
        """Return the CRC-32 of each request that is done, of an earlier fetch of the same plan."""
        etags = {file: remote.etag for file, remote in sorted(self.remotes.items())}
        plan = json.dumps([etags, [asdict(part) for part in self.parts], self.head.hex()])
        digest, place = sha256(plan.encode()).hexdigest(), self.folder / "plan"
        with suppress(OSError, ValueError):
            if place.read_text() == digest and not self.repo.options.force_download:
                lines = self.done.read_text().splitlines()
                return {int(number): int(value) for number, value in map(str.split, lines)}
        drop(self.folder)
        self.tower.mkdir(parents=True)
        free = shutil.disk_usage(self.folder).free
        if free < self.size:
            raise OSError(errno.ENOSPC, f"{free} bytes free")
        for name, content in self.files.items():
            write_whole(self.tower / name, content)
        with (self.tower / TENSORS).open("wb") as file:
            file.truncate(self.size)
        self.done.touch()
        write_whole(place, digest.encode())
        return {}

    def _crc32(self, part: Part) -> int:
        return file_crc32(self.tower / TENSORS, part.target, part.kept)

    def _fetch(self, number: int, part: Part, stop: Event, bar: Any) -> None:
        remote, position, value = self.repo.remote(part.file), part.begin, 0
        with (self.tower / TENSORS).open("r+b", buffering=WRITTEN) as out:
            out.seek(part.target)
            for chunk in remote.stream(part.begin, part.end, stop):
                if stop.is_set():
                    raise Stopped
                for begin, end in part.clip(position, position + len(chunk)):
                    kept = chunk[begin - position : end - position]
                    out.write(kept)
                    value = crc32(kept, value)
                position += len(chunk)
                bar.update(len(chunk))
        if position != part.end:
            raise RangesUnsupported(f"{remote.label}: is shorter than its header says")
        with self.done.open("ab", buffering=0) as lines:
            lines.write(f"{number} {value}\n".encode())

    def _finish(self) -> None:
        """Take the checksums of the tensors, write the header, and have all of it on the disk."""
        path, places, position = self.tower / TENSORS, [], len(self.head)
        for piece in self.pieces:
            places.append((piece.local, position, piece.entry.nbytes))
            position += piece.entry.nbytes
        workers = self.repo.options.max_workers
        sums = in_parallel(lambda place, _: file_crc32(path, *place[1:]), places, workers)
        known = {name: value for (name, _, _), value in zip(places, sums, strict=True)}
        with path.open("r+b") as file:
            file.write(sealed_header(self.pieces, self.record, known))
            file.flush()
            os.fsync(file.fileno())


def download_shards(repo: Repo, names: Iterable[str]) -> dict[str, Path]:
    """Download whole files into the client's cache, by the client.

    Raises:
        CheckpointError: a file cannot be had, or the disk is full.
    """
    found = list(names)

    def download(name: str, stop: Event) -> Path:
        return Path(repo.ask(lambda: _download(repo, name, stop), name))

    paths = in_parallel(download, found, repo.options.max_workers)
    return dict(zip(found, paths, strict=True))


def _download(repo: Repo, name: str, stop: Event) -> str:
    options = repo.options
    extra: dict[str, Any] = {}
    if "tqdm_class" in inspect.signature(hf_hub_download).parameters:  # clients from 1.2 on
        extra["tqdm_class"] = _bar(options.progress, stop)
    return hf_hub_download(
        repo.repo_id,
        repo.inside(name),
        revision=repo.revision,
        cache_dir=options.cache_dir,
        token=options.token,
        local_files_only=repo.offline,
        force_download=options.force_download,
        library_name="vitgraph",
        **extra,
    )


def _bar(shown: bool, stop: Event) -> type[Any]:
    """Return the class of the client's bar, which ends the download once ``stop`` is set."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            if not shown:
                keywords["disable"] = True
            super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise Stopped
            return super().update(n)

    return Bar
