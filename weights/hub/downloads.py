"""Fetches a tower to this disk: as byte ranges into a cache of this package, or as whole shards.

Whole shards go to the cache of the Hub's client, ``huggingface_hub``. A fetch by ranges works in
the folder ``partial`` of the repo (see ``cache/store.py``): it has the tower's folder with a file
of the final size, and a file ``done`` with a digest of all requests and a line per finished
request. After a fetch was killed, the next one checks the CRC-32 of the finished requests, because
a machine that lost power may have kept the line and lost the bytes, and sends the others. Torch is
not imported.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from itertools import accumulate
from threading import Event
from zlib import crc32

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import tqdm

from ..cache.kept_tower import Checked, KeptTower, sealed_header
from ..errors import CheckpointError, DamagedError
from ..files.checkpoint import TensorLocation, TowerFiles
from ..files.index import SINGLE
from ..files.tensor_file import Header, file_crc32
from ..files.writing import flush, write_atomic
from ..threads import Stopped, in_parallel
from .http import RangesUnsupported
from .messages import SPACE, is_full
from .ranges import RangeRequest, in_order, plan_requests, within
from .repo import Repo

WRITTEN = 1 << 20
"""The bytes that are written to the disk at once: one ``CHUNK`` of an answer."""


def fetch_tower(
    repo: Repo, tower_files: TowerFiles, headers: Mapping[str, Header], *, check: bool
) -> dict[str, TensorLocation]:
    """Fetch a tower by byte ranges unless it is on this disk; return each tensor's place by name.

    If several threads or processes ask for one tower, one fetches it and the others wait.

    Args:
        repo: the repo at its commit.
        tower_files: the tensors and small files of the tower.
        headers: headers of the files that hold the tower, by name.
        check: compare a tower that is on the disk with its checksums before it is used.

    Raises:
        CheckpointError: the disk is full, or the cache cannot be written to.
        RangesUnsupported: the server cannot send byte ranges.
        HfHubHTTPError: the Hub refused.
    """
    fetch, store = _Fetch(repo, tower_files, headers), repo.store(repo.revision)
    try:
        with store.lock():
            if not repo.options.force_download:
                # Another thread or process may have fetched the tower meanwhile.
                with suppress(DamagedError):
                    tower = KeptTower(store.tower)
                    if check:
                        tower.verify()
                    return tower.locate(tower_files)
            try:
                fetch.complete()
            except (RangesUnsupported, OSError) as error:
                # A fetch cannot be continued if the disk is full or the server has no ranges.
                if isinstance(error, RangesUnsupported) or is_full(error):
                    shutil.rmtree(store.partial, ignore_errors=True)
                raise
            shutil.rmtree(store.tower, ignore_errors=True)
            fetch.tower.rename(store.tower)
            shutil.rmtree(store.partial, ignore_errors=True)
            store.answers.unlink(missing_ok=True)
            return KeptTower(store.tower).locate(tower_files)
    except HfHubHTTPError:  # HfHubHTTPError is an OSError, but not one of this disk
        raise
    except OSError as error:
        text = f"{store.folder}: cannot be written ({error}): pass a cache_dir that can be"
        if is_full(error):
            text = f"the disk is full: the tower needs {fetch.size / 1e6:,.1f} MB in {repo.root}"
            text += f"; {SPACE}; nothing was left behind"
        raise CheckpointError(f"{repo.label}: {text}") from error


class _Fetch:
    """One fetch of a tower by byte ranges, into the folder ``partial`` of its repo in the cache."""

    def __init__(self, repo: Repo, tower_files: TowerFiles, headers: Mapping[str, Header]) -> None:
        self.repo = repo
        self.folder = repo.store(repo.revision).partial
        self.files = tower_files.files()
        self.tensors = in_order(tower_files.tensors)
        self.record: Checked = {
            "repo": repo.repo_id,
            "commit": repo.revision,
            "subfolder": repo.options.subfolder,
            "published": asdict(tower_files.published),
        }
        self.head = sealed_header(self.tensors, self.record, self.files)
        self.requests = plan_requests(self.tensors, headers, len(self.head))
        self.size = len(self.head) + sum(tensor.entry.nbytes for tensor in self.tensors)
        self.shards = sorted(headers)
        self.tower = self.folder / "tower"
        self.file = self.tower / SINGLE
        self.progress_file = self.folder / "done"

    def complete(self) -> None:
        """Fetch the byte ranges that are missing, and write the header with all checksums."""
        checksums = self._begin()
        options = self.repo.options
        with tqdm(  # type: ignore[no-untyped-call]  # the stub types no **kwargs
            total=sum(request.end - request.begin for request in self.requests),
            unit="B",
            unit_scale=True,
            desc=options.part,
            disable=None if options.progress else True,
            name="vitgraph.fetch",
        ) as bar:

            def fetch(number: int, stop: Event) -> None:
                request = self.requests[number]
                span = self.file, request.target, request.kept
                if number in checksums and checksums[number] == file_crc32(*span):
                    bar.update(request.end - request.begin)
                else:
                    self._fetch(number, request, stop, bar)

            in_parallel(fetch, range(len(self.requests)), options.max_workers)
        self._finish()

    def _begin(self) -> dict[int, int]:
        """Return the requests that an earlier fetch has finished: number -> CRC-32 of its bytes.

        Without an earlier fetch of the same tower, the folder is made anew and the dict is empty.
        """
        etags = [self.repo.remote(file).etags for file in self.shards]
        names = [tags.get("x-linked-etag", tags.get("etag")) for tags in etags]
        plan = json.dumps([names, [asdict(request) for request in self.requests], self.head.hex()])
        digest = sha256(plan.encode()).hexdigest()
        with suppress(OSError, ValueError):
            first_line, *lines = self.progress_file.read_text().splitlines()
            is_same_tower = first_line == digest and self.file.stat().st_size == self.size
            if is_same_tower and not self.repo.options.force_download:
                return {int(number): int(value) for number, value in map(str.split, lines)}
        shutil.rmtree(self.folder, ignore_errors=True)
        self.tower.mkdir(parents=True)
        free = shutil.disk_usage(self.folder).free
        if free < self.size:
            raise OSError(errno.ENOSPC, f"{free} bytes free")
        for name, content in self.files.items():
            write_atomic(self.tower / name, content)
        with self.file.open("wb") as file:
            file.truncate(self.size)
        write_atomic(self.progress_file, f"{digest}\n".encode())
        return {}

    def _fetch(self, number: int, request: RangeRequest, stop: Event, bar: tqdm) -> None:
        remote, position, value = self.repo.remote(request.file), request.begin, 0
        with self.file.open("r+b", buffering=WRITTEN) as out:
            out.seek(request.target)
            for chunk in remote.stream(request.begin, request.end, stop):
                if stop.is_set():
                    raise Stopped
                for begin, end in within(request.segments, position, position + len(chunk)):
                    part = chunk[begin - position : end - position]
                    out.write(part)
                    value = crc32(part, value)
                position += len(chunk)
                bar.update(len(chunk))
        if position != request.end:
            raise RangesUnsupported(f"{remote.label}: is shorter than its header says")
        with self.progress_file.open("ab", buffering=0) as lines:
            lines.write(f"{number} {value}\n".encode())

    def _finish(self) -> None:
        """Write the header, with the CRC-32 of each tensor, and wait until all is on the disk."""
        path, workers = self.file, self.repo.options.max_workers
        lengths = [tensor.entry.nbytes for tensor in self.tensors]
        starts = accumulate([len(self.head), *lengths[:-1]])
        spans = list(zip(starts, lengths, strict=True))
        sums = in_parallel(lambda span, _: file_crc32(path, *span), spans, workers)
        checksums = {tensor.local: value for tensor, value in zip(self.tensors, sums, strict=True)}
        with path.open("r+b") as file:
            file.write(sealed_header(self.tensors, self.record, self.files, checksums))
        flush(path)


def download_shards(repo: Repo, names: list[str]) -> None:
    """Have the Hub's client download the files ``names`` of a repo into its own cache."""
    options = repo.options

    def download(name: str, stop: Event) -> None:
        ask = lambda: hf_hub_download(  # noqa: E731
            repo.repo_id,
            repo.inside(name),
            revision=repo.revision,
            cache_dir=options.cache_dir,
            token=options.token,
            force_download=options.force_download,
            library_name="vitgraph",
            tqdm_class=_bar(options.progress, stop),
        )
        repo.ask(ask, name)

    in_parallel(download, names, options.max_workers)


def _bar(enabled: bool, stop: Event) -> type[tqdm]:
    """Return a class of progress bars for the Hub client; it ends a download once ``stop`` is set.

    The bars are not drawn unless ``enabled`` is true.
    """

    class Bar(tqdm):
        def __init__(self, *arguments: object, **keywords: object) -> None:
            if not enabled:
                keywords["disable"] = True
            super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]  # see the stub

        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise Stopped
            return super().update(n)

    return Bar
