"""A tower kept in the cache: a folder with ``model.safetensors``, checksums in its header, configs.

The metadata of ``model.safetensors`` hold, beside ``format``, one JSON object under ``vitgraph``:
version, repo, commit, subfolder, facts about the whole published checkpoint, the CRC-32 of each
tensor and of each JSON file beside it ("small files" below); and under ``vitgraph_crc32`` the
CRC-32 of that object and of the header's tensor entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict
from zlib import crc32

from ..errors import CheckpointError, DamagedError
from ..files.checkpoint import (
    Checkpoint,
    PublishedCheckpoint,
    TensorLocation,
    TowerFiles,
    TowerTensor,
)
from ..files.index import SINGLE
from ..files.tensor_file import Header, TensorEntry, file_crc32, header_bytes, read_header
from ..strict_json import JsonDict

VERSION = 3
"""The version of that JSON object; a tower with another version is fetched again."""
_RECORD, _SEAL = "vitgraph", "vitgraph_crc32"


class Checked(TypedDict):
    """The facts about a tower's origin that the header of its file in the cache states."""

    repo: str
    commit: str | None
    subfolder: str | None
    published: JsonDict
    """The fields of :class:`weights.files.checkpoint.PublishedCheckpoint`."""


class Record(Checked):
    """The JSON object under ``vitgraph`` in the header of a tower's file in the cache."""

    version: int
    files: dict[str, str]
    """The CRC-32 of each JSON file by its name, as hex digits."""
    crc32: dict[str, str]
    """The CRC-32 of each tensor by its name, as hex digits."""


def sealed_header(
    tensors: Sequence[TowerTensor],
    record: Checked,
    files: Mapping[str, bytes],
    sums: Mapping[str, int] | None = None,
) -> bytes:
    """Return the first bytes of a kept tower's file: its header with all checksums.

    Its length does not depend on ``sums``: tensors can be written before their sums are known.

    Args:
        tensors: the tensors of the tower, in the order of the file.
        record: the facts about the tower's origin, written beside the checksums.
        files: contents of the small files in the tower's folder, by name, to record their CRC-32.
        sums: CRC-32 of each tensor by its name in the file; None if they are not known yet.
    """
    checksums = sums or dict.fromkeys((tensor.local for tensor in tensors), 0)
    file_checksums = {name: crc32(content) for name, content in files.items()}
    sealed_record: Record = {
        "version": VERSION,
        **record,
        "files": {name: f"{value:08x}" for name, value in file_checksums.items()},
        "crc32": {name: f"{value:08x}" for name, value in checksums.items()},
    }
    text = json.dumps(sealed_record)
    entries = [(tensor.local, tensor.entry) for tensor in tensors]
    seal = _seal(entries, text)
    return header_bytes(entries, {"format": "pt", _RECORD: text, _SEAL: seal})


def _seal(entries: Iterable[tuple[str, TensorEntry]], text: str) -> str:
    """Return the CRC-32, as hex digits, of a header's tensor entries and its record, JSON ``text``.

    Offsets are left out, because they follow from the order of ``entries``.
    """
    table = [[name, entry.dtype, entry.shape] for name, entry in entries]
    return f"{crc32(json.dumps([table, text]).encode()):08x}"


class KeptTower(Checkpoint):
    """A tower in the cache on this disk, which was fetched by byte ranges.

    Opening it checks its header and small files; :meth:`verify` checks the tensors.
    """

    cached = "tower"

    def __init__(
        self, folder: Path, label: str = "", commit: str | None = None, offline: bool = False
    ) -> None:
        """Open a kept tower; raise a :class:`DamagedError` if its checksums do not match.

        Args:
            folder: the folder of the tower's files.
            label: name of the checkpoint in messages; by default the path of the file.
            commit: commit of the repo that the tower was fetched from; None to leave it unset.
            offline: whether no request may be sent to the Hub.
        """
        super().__init__(folder, SINGLE, label)
        self.commit, self.offline, path = commit, offline, folder / SINGLE
        try:
            self._header = header = read_header(path, str(path))
            text = header.metadata[_RECORD]
            self.record: Record = json.loads(text)
            entries = sorted(header.tensors.items(), key=lambda item: item[1].begin)
            if header.metadata[_SEAL] != _seal(entries, text) or self.record["version"] != VERSION:
                raise DamagedError(f"{path}: its header is not what was written")
            self.sums = {name: int(value, 16) for name, value in self.record["crc32"].items()}
            self.published = PublishedCheckpoint(**self.record["published"])
            self._files = {name: (folder / name).read_bytes() for name in self.record["files"]}
        except (CheckpointError, OSError, LookupError, TypeError, ValueError) as error:
            raise DamagedError(
                f"{folder}: a damaged tower ({type(error).__name__}: {error})"
            ) from error
        for name, content in self._files.items():
            if f"{crc32(content):08x}" != self.record["files"][name]:
                raise DamagedError(f"{folder / name}: not what was downloaded")

    def content(self, name: str) -> bytes | None:
        """Return the bytes of the JSON file ``name``, checked on opening, or None if absent."""
        return self._files.get(name)

    def headers(self, guesses: Mapping[str, int]) -> dict[str, Header]:
        """Return the header of the tower's only file; the file names in ``guesses`` are ignored."""
        return {SINGLE: self._header}

    def locate(self, tower_files: TowerFiles) -> dict[str, TensorLocation]:
        """Return place and recorded CRC-32 of each tensor in ``tower_files``, by published name."""
        path, start, tensors = self.folder / SINGLE, self._header.data_start, self._header.tensors
        locations: dict[str, TensorLocation] = {}
        for tensor in tower_files.tensors:
            stored, entry = tensors.get(tensor.local), tensor.entry
            if stored is None or (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
                raise DamagedError(f"{self.folder}: holds other tensors than were downloaded")
            locations[tensor.name] = TensorLocation(
                path, start + stored.begin, self.sums[tensor.local]
            )
        return locations

    def verify(self) -> None:
        """Read every tensor; raise a :class:`DamagedError` if one differs from its recorded
        CRC-32.
        """
        path, start = self.folder / SINGLE, self._header.data_start
        for name, entry in self._header.tensors.items():
            if file_crc32(path, start + entry.begin, entry.nbytes) != self.sums[name]:
                raise DamagedError(f"{path}: {name} is not what was downloaded: damaged")
