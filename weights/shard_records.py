"""What a whole shard of the client's cache was when it was first seen, one record a shard.

    <cache>/vitgraph/models--owner--name/<commit>/shards/NAME.json

The Hub names a file of weights by its SHA-256, and its client names the blob so. A shard is held
against that name once, when it is first used; the CRC-32 of the tower's tensors are taken on the
way, of the same bytes, and recorded (1.0 s a gigabyte, once). From then on each load needs those
alone: 0.2 s a gigabyte of the tower.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from .errors import CheckpointError, DamagedError
from .tensor_file import Header, parse_json, read_header
from .tower_cache import file_crc32, write_whole

VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ShardRecord:
    """A shard that was sound."""

    file: str
    """Its name in the repo, the checkpoint's subfolder included."""
    subfolder: str | None
    size: int
    sha256: str
    header_crc32: int
    crc32: Mapping[str, int]
    """Of each tensor of the tower, by its name in the shard."""

    def read_header(self, path: Path, label: str) -> Header:
        """The header of ``path``, which must be the one that was seen.

        Raises:
            DamagedError: it is not, or the file has another size.
        """
        try:
            header = read_header(path, label)
        except CheckpointError as error:
            raise DamagedError(str(error)) from error
        if header.file_bytes != self.size or _begin_crc32(path, header) != self.header_crc32:
            raise DamagedError(f"{label}: its header is not what was fetched")
        return header

    def verify(self, path: Path, label: str) -> None:
        """Read the tower's tensors and compare them with their recorded CRC-32.

        Raises:
            DamagedError: one differs.
        """
        header = self.read_header(path, label)
        for name, value in self.crc32.items():
            entry = header.tensors[name]
            if file_crc32(path, header.data_start + entry.begin, entry.nbytes) != value:
                raise DamagedError(f"{label}: {name} is not what was fetched: damaged")


def read_record(place: Path) -> ShardRecord | None:
    """The record at ``place``; None if there is none, or none that can be believed."""
    try:
        plain = parse_json(place.read_bytes(), str(place))
        recorded = plain.pop("checksum")
        if plain.pop("version") != VERSION or recorded != _checksum(plain):
            return None
        return ShardRecord(**plain)
    except (CheckpointError, OSError, LookupError, TypeError):
        return None


def write_record(place: Path, record: ShardRecord) -> None:
    """Keep ``record`` at ``place``, whole or not at all."""
    plain = asdict(record)
    body = {"version": VERSION, **plain, "checksum": _checksum(plain)}
    write_whole(place, json.dumps(body, indent=1).encode())


def _checksum(plain: Mapping[str, object]) -> int:
    return crc32(json.dumps(plain, sort_keys=True).encode())


def measure(
    path: Path, header: Header, names: Collection[str], file: str, subfolder: str | None
) -> ShardRecord:
    """Read a whole shard once: its SHA-256, and the CRC-32 of its header and of ``names``.

    Raises:
        DamagedError: it ends early, as when somebody shortens it meanwhile.
    """
    whole, sums = sha256(), {}
    wanted, position = set(names), 0
    entries = sorted(header.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    spans = [("", header.data_start), *((name, entry.nbytes) for name, entry in entries)]
    with path.open("rb") as raw:
        for number, (name, length) in enumerate(spans):
            value = 0
            for chunk in _chunks(raw, length):
                whole.update(chunk)
                position += len(chunk)
                if number == 0 or name in wanted:
                    value = crc32(chunk, value)
            if number == 0:
                begin = value
            elif name in wanted:
                sums[name] = value
    if position != header.file_bytes:
        raise DamagedError(f"{path}: changed while it was being read")
    return ShardRecord(file, subfolder, position, whole.hexdigest(), begin, sums)


def file_sha256(path: Path) -> str | None:
    """The SHA-256 of a whole file; None if it cannot be read."""
    whole = sha256()
    try:
        with path.open("rb") as file:
            for chunk in _chunks(file, path.stat().st_size):
                whole.update(chunk)
    except OSError:
        return None
    return whole.hexdigest()


def named_sha256(path: Path, etag: str | None) -> str | None:
    """What the Hub calls the content of ``path``, by the blob it links to or else its ``etag``.

    None where that is no SHA-256, as of plain servers, or is not known: where there are no links
    the client's cache does not tell it. One link is followed and no more, since blobs may be links
    to a store that names them otherwise.
    """
    if path.is_symlink():
        blob = Path(os.readlink(path))
        if blob.parent.name == "blobs":
            return plain_sha256(blob.name)
    return plain_sha256(etag)


def plain_sha256(etag: str | None) -> str | None:
    """The SHA-256 that an etag is, if it is one."""
    name = (etag or "").removeprefix("W/").strip('"')
    return name if _SHA256.fullmatch(name) else None


def _begin_crc32(path: Path, header: Header) -> int:
    return file_crc32(path, 0, header.data_start)


def _chunks(file: BinaryIO, length: int, size: int = 1 << 20) -> Iterator[bytes]:
    while length and (read := file.read(min(length, size))):
        yield read
        length -= len(read)
