"""A kept tower: a folder as ``extract`` writes it, whose checksums stand in the file's header.

The metadata of ``model.safetensors`` hold, beside ``format``, one JSON object under ``vitgraph``:
version, repo, commit, subfolder, what the whole checkpoint is, the CRC-32 of each tensor and of
each file beside it; and under ``vitgraph_header`` the CRC-32 of the header itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

from ..errors import CheckpointError, DamagedError
from ..snapshot import FolderSnapshot, Located, Piece, Published, Traffic, Wanted
from ..tensor_file import Header, header_bytes, header_length, read_header

VERSION = 2
TENSORS = "model.safetensors"
_RECORD, _SEAL = "vitgraph", "vitgraph_header"
_UNSEALED = "0" * 8


def sealed_header(
    pieces: Sequence[Piece], record: Mapping[str, Any], sums: Mapping[str, int] | None = None
) -> bytes:
    """Return the beginning of a kept tower's file, of a length that does not depend on ``sums``.

    Args:
        pieces: the tensors, in the order of the file.
        record: repo, commit, subfolder, the whole checkpoint and the CRC-32 of files.
        sums: CRC-32 of each tensor by its name in the tower; None before they are known.
    """
    known = sums or dict.fromkeys((piece.local for piece in pieces), 0)
    checksums = {name: f"{value:08x}" for name, value in known.items()}
    text = json.dumps({"version": VERSION, **record, "crc32": checksums})
    entries = [(piece.local, piece.entry) for piece in pieces]
    metadata = {"format": "pt", _RECORD: text, _SEAL: _UNSEALED}
    raw = header_bytes(entries, metadata)
    return raw if sums is None else _sealed(raw, _seal_of(raw[8:]))


def _sealed(raw: bytes, seal: str) -> bytes:
    before = f'"{_SEAL}":"{_UNSEALED}"'.encode()
    return raw.replace(before, before.replace(_UNSEALED.encode(), seal.encode()))


def _seal_of(text: bytes) -> str:
    return f"{crc32(text):08x}"


class KeptTower(FolderSnapshot):
    """A tower that was fetched by byte ranges, checked as far as possible without its tensors."""

    def __init__(self, folder: Path) -> None:
        """Open the tower in ``folder``.

        Raises:
            DamagedError: the header or a file beside it is not what was fetched.
        """
        super().__init__(folder, TENSORS)
        try:
            self._header, self.record = _read(folder / TENSORS)
            self._files = {name: (folder / name).read_bytes() for name in self.record["files"]}
            self.sums = {name: int(value, 16) for name, value in self.record["crc32"].items()}
            self.published: Published = Published(**self.record["published"])
            for name, content in self._files.items():
                if f"{crc32(content):08x}" != self.record["files"][name]:
                    raise DamagedError(f"{folder / name}: not what was fetched")
            if set(self.sums) != set(self._header.tensors):
                raise DamagedError(f"{folder / TENSORS}: holds other tensors than were fetched")
        except DamagedError:
            raise
        except (CheckpointError, OSError, LookupError, TypeError, ValueError) as error:
            raise DamagedError(
                f"{folder}: a damaged tower ({type(error).__name__}: {error})"
            ) from error

    def content(self, name: str) -> bytes | None:
        return self._files.get(name)

    def headers(self, names: object, lengths: object = None) -> dict[str, Header]:
        return {TENSORS: self._header}

    def holds(self, pieces: Sequence[Piece]) -> bool:
        """Whether every one of ``pieces`` is here, in its dtype and shape."""
        here = self._header.tensors
        return all(
            piece.local in here
            and (here[piece.local].dtype, here[piece.local].shape)
            == (piece.entry.dtype, piece.entry.shape)
            for piece in pieces
        )

    def locate(self, wanted: Wanted) -> dict[str, Located]:
        if not self.holds(wanted.pieces):
            raise DamagedError(f"{self.folder}: holds other tensors than were fetched")
        path, start, tensors = self.folder / TENSORS, self._header.data_start, self._header.tensors
        return {
            piece.name: Located(path, start + tensors[piece.local].begin, self.sums[piece.local])
            for piece in wanted.pieces
        }

    def traffic(self, wanted: Wanted) -> Traffic:
        return Traffic("tower", "nothing", sum(piece.entry.nbytes for piece in wanted.pieces))

    def verify(self) -> None:
        """Read every tensor and compare it with its recorded CRC-32.

        Raises:
            DamagedError: a tensor differs.
        """
        path, start = self.folder / TENSORS, self._header.data_start
        for name, entry in self._header.tensors.items():
            if file_crc32(path, start + entry.begin, entry.nbytes) != self.sums[name]:
                raise DamagedError(f"{path}: {name} is not what was fetched: damaged")


def _read(path: Path) -> tuple[Header, dict[str, Any]]:
    """Return the header of a kept tower's file, and the record in it."""
    header = read_header(path, str(path))
    with path.open("rb") as file:
        raw = file.read(8)
        raw += file.read(header_length(raw, str(path)))
    seal = header.metadata.get(_SEAL, "")
    plain = raw[8:].replace(f'"{_SEAL}":"{seal}"'.encode(), f'"{_SEAL}":"{_UNSEALED}"'.encode())
    record = json.loads(header.metadata.get(_RECORD, "{}"))
    if len(seal) != 8 or _seal_of(plain) != seal or record.get("version") != VERSION:
        raise DamagedError(f"{path}: its header is not what was written")
    return header, record


def record_of(
    wanted: Wanted, files: Mapping[str, bytes], repo: str, commit: str, subfolder: str | None
) -> dict[str, Any]:
    """Return what a kept tower remembers beside its tensors."""
    return {
        "repo": repo,
        "commit": commit,
        "subfolder": subfolder,
        "published": asdict(wanted.published),
        "files": {name: f"{crc32(content):08x}" for name, content in files.items()},
    }


def file_crc32(path: Path, begin: int, length: int, chunk: int = 1 << 20) -> int:
    """Return the CRC-32 of ``length`` bytes of a file, -1 if the file ends before."""
    value = 0
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while length and (read := file.read(min(length, chunk))):
            value = crc32(read, value)
            length -= len(read)
    return value if not length else -1
