"""Fetching a tower by byte ranges into its cache: several at once, resumable, whole or not at all.

``partial/`` of the cache holds a fetch in progress: the plan, the tower's file at its final size,
and for each request how many bytes have arrived and their CRC-32. A fetch that is killed goes on
where it was, once those bytes prove to be on the disk (a machine that lost power may have kept the
count and lost the bytes). Nothing here needs torch.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from io import FileIO
from itertools import accumulate
from pathlib import Path
from threading import Event, Lock
from typing import Any
from zlib import crc32

from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # not marked public

from .errors import CheckpointError, DamagedError
from .obstacles import disk_full, is_full
from .ranges import Part, in_order, plan_parts
from .remote import RangesUnsupported, RemoteFile
from .snapshot import Piece
from .tensor_file import Header
from .tower_cache import (
    TENSORS,
    Entry,
    TowerCache,
    drop,
    file_crc32,
    open_entry,
    plain_header,
    tower_header,
    write_manifest,
    write_whole,
)
from .workers import Stopped, in_parallel

_RECORD = struct.Struct("<QII")
"""Bytes that have arrived, the CRC-32 of those kept, and a CRC-32 of these two numbers."""


@dataclass(frozen=True)
class Order:
    """What is to be fetched, and from where."""

    label: str
    pieces: Sequence[Piece]
    headers: Mapping[str, Header]
    remotes: Mapping[str, RemoteFile]
    about: Mapping[str, Any]
    """Recorded in the manifest as it stands."""
    max_workers: int = 8
    progress: bool = True


def fetch_tower(cache: TowerCache, order: Order, *, force: bool = False) -> Entry:
    """The tower of ``order``, fetched unless ``cache`` has it; one fetch however many ask at once.

    Args:
        cache: where it is kept.
        order: what is wanted.
        force: fetch it even if it is there.

    Raises:
        RangesUnsupported: the server does not do byte ranges.
        HfHubHTTPError: the Hub refuses.
        CheckpointError: the connection broke too often, or the disk is full.
    """
    try:
        with cache.lock():
            if not force and (entry := _kept(cache, order)) is not None:
                return entry
            return _fetched(cache, order)
    except HfHubHTTPError:  # an OSError too, and not one of this disk
        raise
    except OSError as error:
        if is_full(error):
            needed = sum(piece.entry.nbytes for piece in order.pieces)
            left = "nothing was left behind"
            raise disk_full(order.label, "the tower", needed, cache.root, left) from error
        raise CheckpointError(
            f"{order.label}: {cache.folder}: cannot be written ({error})"
        ) from error


def _fetched(cache: TowerCache, order: Order) -> Entry:
    """Fetch it, under the lock; what cannot be gone on with is removed before others get it."""
    try:
        _Fetch(cache.partial, order).run()
        drop(cache.tower)
        (cache.partial / "tower").rename(cache.tower)
    except RangesUnsupported:
        drop(cache.partial)
        raise
    except OSError as error:
        if is_full(error):
            drop(cache.partial)
        raise
    drop(cache.partial)
    return open_entry(cache.tower)


def _kept(cache: TowerCache, order: Order) -> Entry | None:
    """What another thread or process fetched while this one waited."""
    try:
        entry = cache.entry()
    except DamagedError:
        return None
    return entry if entry is not None and entry.holds(order.pieces) else None


class _Fetch:
    """One fetch into a ``partial`` folder."""

    def __init__(self, folder: Path, order: Order) -> None:
        self.folder = folder
        self.order = order
        self.pieces = in_order(order.pieces)
        self.head = tower_header(self.pieces)
        self.offsets = [*accumulate((p.entry.nbytes for p in self.pieces), initial=len(self.head))]
        self.size = self.offsets[-1]
        self.parts = plan_parts(self.pieces, order.headers, len(self.head))
        self.tensors = folder / "tower" / TENSORS
        self.records = folder / "progress"
        self.writing = [Lock() for _ in self.parts]
        """Held where a part is written; once stopped, taking each waits for the last write."""

    def run(self) -> None:
        """Fetch what is missing, check it, and write the manifest."""
        self._prepare()
        total = sum(part.end - part.begin for part in self.parts)
        workers = self.order.max_workers
        with tqdm(  # type: ignore[no-untyped-call]
            total=total, unit="B", unit_scale=True, desc="vision tower",
            disable=True if not self.order.progress else None, name="vitgraph.fetch",
        ) as bar:  # fmt: skip
            try:
                numbers = range(len(self.parts))
                in_parallel(lambda n, stop: self._fetch_part(n, stop, bar.update), numbers, workers)
            finally:
                for lock in self.writing:
                    with lock:
                        pass
        sums = in_parallel(lambda n, _: self._checksum(n), range(len(self.pieces)), workers)
        self._finish({piece.name: s for piece, s in zip(self.pieces, sums, strict=True)})

    def _prepare(self) -> None:
        """Take up a fetch of the same plan, or begin anew."""
        plan = self.folder / "plan.json"
        digest = json.dumps({"plan": self._digest()}).encode()
        if not (plan.is_file() and plan.read_bytes() == digest):
            drop(self.folder)
            self._begin()
            write_whole(plan, digest)

    def _digest(self) -> str:
        """Changes with anything that decides which byte goes where."""
        etags = {file: remote.etag for file, remote in sorted(self.order.remotes.items())}
        plan = [etags, [asdict(part) for part in self.parts], self.head.hex()]
        return sha256(json.dumps(plan).encode()).hexdigest()

    def _begin(self) -> None:
        self.tensors.parent.mkdir(parents=True)
        free = shutil.disk_usage(self.folder).free
        if free < self.size:
            raise OSError(errno.ENOSPC, f"{free} bytes free")
        with self.tensors.open("wb") as file:
            file.write(self.head)
            file.truncate(self.size)
        self.records.write_bytes(bytes(_RECORD.size * len(self.parts)))

    def _fetch_part(self, number: int, stop: Event, update: Callable[[int], object]) -> None:
        part = self.parts[number]
        with (
            self.tensors.open("r+b", buffering=0) as out,
            self.records.open("r+b", buffering=0) as records,
        ):
            done, value = self._resume(number, part, records)
            update(done)
            position = part.begin + done
            remote = self.order.remotes[part.file]
            for chunk in remote.stream(position, part.end, stop):
                with self.writing[number]:
                    if stop.is_set():
                        raise Stopped
                    value = _keep(part, position, chunk, out, value)
                    position += len(chunk)
                    self._record(records, number, position - part.begin, value)
                update(len(chunk))
        if position != part.end:
            raise RangesUnsupported(f"{remote.label}: is shorter than its header says")

    def _resume(self, number: int, part: Part, records: FileIO) -> tuple[int, int]:
        """How much of a part is on the disk, and its CRC-32; nothing if they do not agree."""
        records.seek(number * _RECORD.size)
        raw = records.read(_RECORD.size) or b""
        if len(raw) != _RECORD.size:
            return 0, 0
        done, value, check = _RECORD.unpack(raw)
        if check != crc32(raw[:12]) or not 0 < done <= part.end - part.begin:
            return 0, 0
        found = 0
        with self.tensors.open("rb", buffering=0) as file:
            for target, length in _kept_places(part, part.begin, part.begin + done):
                for read in _chunks(file, target, length):
                    found = crc32(read, found)
        return (done, value) if found == value else (0, 0)

    def _record(self, records: FileIO, number: int, done: int, value: int) -> None:
        raw = struct.pack("<QI", done, value)
        records.seek(number * _RECORD.size)
        records.write(raw + struct.pack("<I", crc32(raw)))

    def _checksum(self, number: int) -> int:
        return file_crc32(self.tensors, self.offsets[number], self.pieces[number].entry.nbytes)

    def _finish(self, sums: Mapping[str, int]) -> None:
        with self.tensors.open("rb") as file:
            os.fsync(file.fileno())
        shards = {
            file: {
                "etag": self.order.remotes[file].etag,
                "size": header.file_bytes,
                "header": plain_header(header),
            }
            for file, header in self.order.headers.items()
        }
        record = {"size": self.size, "header_crc32": crc32(self.head[8:]), "crc32": sums}
        write_manifest(self.tensors.parent, {**self.order.about, **record, "shards": shards})


def _keep(part: Part, position: int, chunk: bytes, out: FileIO, value: int) -> int:
    """Write what is wanted of a chunk; returns the CRC-32 that goes on from ``value``."""
    view, begin = memoryview(chunk), position
    for target, length in _kept_places(part, position, position + len(chunk)):
        start = _source(part, target) - begin
        kept = view[start : start + length]
        out.seek(target)
        while kept:
            written = out.write(kept)
            value = crc32(kept[:written], value)
            kept = kept[written:]
    return value


def _kept_places(part: Part, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the kept bytes among ``begin`` to ``end`` of the remote file go, and how many."""
    for segment in part.segments:
        first = max(segment.begin, begin)
        last = min(segment.begin + segment.length, end)
        if first < last:
            yield segment.target + first - segment.begin, last - first


def _source(part: Part, target: int) -> int:
    for segment in part.segments:
        if segment.target <= target < segment.target + segment.length:
            return segment.begin + target - segment.target
    raise AssertionError(f"byte {target} belongs to no segment")


def _chunks(file: FileIO, offset: int, length: int, size: int = 1 << 20) -> Iterator[bytes]:
    file.seek(offset)
    while length and (read := file.read(min(length, size))):
        yield read
        length -= len(read)
