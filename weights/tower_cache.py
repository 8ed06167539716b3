"""Towers kept on this disk, by repo and commit: recorded, checked before use, listed, removed.

They lie beside the Hub client's own cache, which knows whole files only::

    <cache>/vitgraph/models--owner--name/<commit>/
        files/          small files as the repo has them, each with its size and CRC-32 in
                        NAME.crc32; NAME.absent where it has none
        tower/          the tower's tensors as one safetensors file, and the manifest
        shards/         what whole shards in the client's cache were (see shard_records.py)
        partial/        a fetch that has not finished (see fetch.py)
    <cache>/vitgraph/models--owner--name/refs/      the commit of each branch when last seen

``tower`` appears by one rename, whole or not at all. Its manifest records each tensor's CRC-32, the
headers of the shards that the tensors come from, and a CRC-32 of the manifest itself.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from typing import Any
from zlib import crc32

import huggingface_hub
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not marked public
    WeakFileLock,
)

from .errors import CheckpointError, DamagedError
from .snapshot import Located, Piece
from .tensor_file import Header, TensorEntry, header_length, parse_json, read_header

VERSION = 1
OLD = ".old"
"""Ends the name of a folder that is being removed; such names begin with a dot."""
TENSORS, MANIFEST, RECORD = "tower.safetensors", "manifest.json", ".crc32"


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The folder of kept towers: in ``cache_dir`` if given, else beside the client's own cache.

    The client counts strange folders inside its cache as damage, so the default is next to it, in
    HF_HOME; a cache moved by HF_HUB_CACHE takes it along.
    """
    constants = huggingface_hub.constants
    if cache_dir is not None:
        return Path(cache_dir).expanduser() / "vitgraph"
    hub = Path(constants.HF_HUB_CACHE)
    home = Path(constants.HF_HOME)
    return (home if hub == home / "hub" else hub) / "vitgraph"


def clients_cache(cache_dir: str | Path | None = None) -> Path:
    """The folder that the Hub client keeps whole files in."""
    return Path(cache_dir or huggingface_hub.constants.HF_HUB_CACHE).expanduser()


@dataclass(frozen=True)
class Entry:
    """One kept tower, as its manifest tells."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def tensors(self) -> Path:
        """The safetensors file."""
        return self.folder / TENSORS

    @cached_property
    def headers(self) -> dict[str, Header]:
        """Headers of the shards that the tower was taken from."""
        return {file: _header(shard["header"]) for file, shard in self.manifest["shards"].items()}

    @cached_property
    def own(self) -> Header:
        """The header of the safetensors file."""
        return read_header(self.tensors, str(self.tensors))

    def holds(self, pieces: Sequence[Piece]) -> bool:
        """Whether every one of ``pieces`` is here, as it is in the checkpoint."""
        return all(self._same(piece) for piece in pieces)

    def _same(self, piece: Piece) -> bool:
        known = self.headers.get(piece.file)
        return (
            piece.name in self.manifest["crc32"]
            and known is not None
            and known.tensors.get(piece.name) == piece.entry
        )

    def locate(self, pieces: Sequence[Piece]) -> dict[str, Located]:
        """Where each of ``pieces`` lies."""
        start, entries, sums = self.own.data_start, self.own.tensors, self.manifest["crc32"]
        return {
            piece.name: Located(self.tensors, start + entries[piece.name].begin, sums[piece.name])
            for piece in pieces
        }

    def verify(self) -> None:
        """Read every tensor and compare it with its recorded CRC-32.

        Raises:
            DamagedError: one differs.
        """
        for name, entry in self.own.tensors.items():
            begin = self.own.data_start + entry.begin
            if file_crc32(self.tensors, begin, entry.nbytes) != self.manifest["crc32"][name]:
                raise DamagedError(f"{self.tensors}: {name} is not what was fetched: damaged")


class TowerCache:
    """The folder of one repo at one commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder.parent.parent
        self.files = folder / "files"
        self.tower = folder / "tower"
        self.partial = folder / "partial"
        self.shards = folder / "shards"
        self._lock = self.root / ".locks" / folder.parent.name / f"{folder.name}.lock"

    @classmethod
    def of(cls, root: Path, repo_id: str, commit: str, subfolder: str | None) -> TowerCache:
        """The one of a repo (or a folder in it) at a commit, inside the folder of all."""
        inside = f"-{sha256(subfolder.encode()).hexdigest()[:16]}" if subfolder else ""
        return cls(root / ("models--" + repo_id.replace("/", "--")) / f"{commit}{inside}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other threads and processes out."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(self._lock):
            yield

    def record_of(self, shard: str) -> Path:
        """Where it is recorded what a whole shard was."""
        return self.shards / f"{shard}.json"

    def entry(self) -> Entry | None:
        """The kept tower, checked without reading its tensors; None if there is none.

        Raises:
            DamagedError: it is not what was recorded.
        """
        return open_entry(self.tower) if self.tower.is_dir() else None

    def small_file(self, name: str) -> Path | bool | None:
        """A kept small file; False if it is known that the repo has none; None if unknown.

        Raises:
            DamagedError: its size or CRC-32 is not what was recorded.
        """
        path, record = self.files / name, self.files / f"{name}{RECORD}"
        try:
            if record.is_file():
                if record.read_bytes() != _record_of(path.read_bytes()):
                    raise DamagedError(f"{path}: not what was fetched")
                return path
        except OSError as error:
            raise DamagedError(f"{path}: cannot be read ({error.strerror})") from error
        return False if (self.files / f"{name}.absent").is_file() else None

    def keep_small_file(self, name: str, content: bytes | None) -> Path:
        """Keep a small file, or that there is none; the record comes last and makes it count."""
        if content is None:
            return write_whole(self.files / f"{name}.absent", b"")
        path = write_whole(self.files / name, content)
        write_whole(self.files / f"{name}{RECORD}", _record_of(content))
        return path

    def verify_small_files(self) -> None:
        """Raise a :class:`DamagedError` if a small file is not what was fetched."""
        for record in files_in(self.files, RECORD):
            self.small_file(record.relative_to(self.files).as_posix().removesuffix(RECORD))

    def shard_records(self) -> list[Path]:
        """The records of whole shards.

        Raises:
            DamagedError: they cannot be read.
        """
        return files_in(self.shards, ".json")


def files_in(folder: Path, ending: str) -> list[Path]:
    """Files whose names end so, at any depth; none if there is no such folder.

    Raises:
        DamagedError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise DamagedError(f"{error.filename}: cannot be read ({error.strerror})") from error

    found = os.walk(folder, onerror=refuse)
    return sorted(
        Path(top, name) for top, _, names in found for name in names if name.endswith(ending)
    )


def _record_of(content: bytes) -> bytes:
    return f"{len(content)} bytes, CRC-32 {crc32(content):08x}\n".encode()


def open_entry(folder: Path) -> Entry:
    """The kept tower in ``folder``: manifest, size and header must agree.

    Raises:
        DamagedError: they do not.
    """
    try:
        entry = Entry(folder, _read_manifest(folder / MANIFEST))
        with entry.tensors.open("rb") as file:
            length = header_length(file.read(8), str(entry.tensors))
            raw = file.read(length) if length <= entry.manifest["size"] else b""
        if crc32(raw) != entry.manifest["header_crc32"]:
            raise DamagedError(f"{entry.tensors}: its header is not what was fetched")
        if set(entry.own.tensors) != set(entry.manifest["crc32"]):
            raise DamagedError(f"{entry.tensors}: holds other tensors than were fetched")
        assert entry.headers is not None
    except DamagedError:
        raise
    except (CheckpointError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"{folder}: a damaged tower ({type(error).__name__}: {error})"
        ) from error
    return entry


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = parse_json(path.read_bytes(), str(path))
    recorded = manifest.pop("checksum", None)
    if manifest.get("version") != VERSION or recorded != _checksum(manifest):
        raise DamagedError(f"{path}: not what was written")
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a tower that is whole."""
    body = {"version": VERSION, **manifest}
    text = json.dumps({**body, "checksum": _checksum(body)}, indent=1)
    write_whole(folder / MANIFEST, text.encode())


def _checksum(manifest: Mapping[str, Any]) -> int:
    return crc32(json.dumps(manifest, sort_keys=True).encode())


def tower_header(pieces: Sequence[Piece]) -> bytes:
    """The beginning of a safetensors file that holds ``pieces`` one after the other."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for piece in pieces:
        end = position + piece.entry.nbytes
        table[piece.name] = {
            "dtype": piece.entry.dtype,
            "shape": list(piece.entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def plain_header(header: Header) -> dict[str, Any]:
    """A header as plain data, for the manifest."""
    tensors = {
        name: [entry.dtype, list(entry.shape), entry.begin, entry.end]
        for name, entry in header.tensors.items()
    }
    return {"data_start": header.data_start, "tensors": tensors}


def _header(plain: Mapping[str, Any]) -> Header:
    return Header(
        {
            name: TensorEntry(dtype, tuple(shape), begin, end)
            for name, (dtype, shape, begin, end) in plain["tensors"].items()
        },
        plain["data_start"],
    )


def file_crc32(path: Path, begin: int, length: int, chunk: int = 1 << 20) -> int:
    """The CRC-32 of ``length`` bytes of a file."""
    value = 0
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while length and (read := file.read(min(length, chunk))):
            value = crc32(read, value)
            length -= len(read)
    return value if not length else -1


def write_whole(path: Path, content: bytes) -> Path:
    """Write a small file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def drop(folder: Path) -> None:
    """Remove a folder that may be in use: first its name, then what is in it."""
    away = folder.with_name(f".{folder.name}{OLD}")
    shutil.rmtree(away, ignore_errors=True)
    if folder.exists():
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def sweep(folder: Path) -> int:
    """Remove what a :func:`drop` in ``folder`` left when it was killed; returns bytes freed."""
    freed = 0
    for away in folder.glob(f".*{OLD}"):
        freed += disk_bytes(away)
        shutil.rmtree(away, ignore_errors=True)
    return freed


def disk_bytes(folder: Path) -> int:
    """Of files that may have holes: what they take, not how long they are."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            status = path.stat()
            total += min(status.st_size, status.st_blocks * 512) * path.is_file()
    return total
