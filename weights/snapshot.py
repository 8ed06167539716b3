"""A checkpoint's files, wherever they are: the interface, and a folder or file on this disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import CheckpointError, shown
from .tensor_file import Header, TensorEntry, parse_json, read_header

MAX_JSON_BYTES = 100_000_000
"""Limit for an index; the index of the largest published checkpoint has about 20 MB."""
MAX_CONFIG_BYTES = 16_000_000
"""Limit for any other JSON file; published ones stay under 1 MB."""
LONGEST_PART = 255
"""Bytes of the name of one file or folder."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the tower, and where the checkpoint holds it."""

    name: str
    local: str
    """The name without the tower's prefix."""
    file: str
    entry: TensorEntry


@dataclass(frozen=True)
class Published:
    """What the whole checkpoint is, as published; a kept tower remembers it."""

    prefix: str
    """What stands before the tower's names."""
    tensors: int
    """Tensors in all files."""
    shards: Mapping[str, int]
    """Bytes of each file that holds a part of the tower."""


@dataclass(frozen=True)
class Wanted:
    """The tower that is to be brought to this disk."""

    pieces: Sequence[Piece]
    published: Published
    files: Callable[[], Mapping[str, bytes]]
    """Reads the config and processor files, as :func:`~weights.extract_encoder` writes them."""


@dataclass(frozen=True)
class Located:
    """Where on this disk the bytes of a tensor lie, and their recorded CRC-32 if there is one."""

    path: Path
    offset: int
    crc32: int | None = None


@dataclass(frozen=True)
class Traffic:
    """What bringing a tower to this disk would transfer, and what is here already."""

    cached: str
    """``local`` for a folder; else ``tower``, ``shards``, ``some shards`` or ``nothing``."""
    fetch: str
    """What would be fetched: ``nothing``, ``ranges`` or ``shards``."""
    ranges: int
    """Bytes of the tower as byte ranges."""
    unfinished: bool = False
    """Whether an earlier fetch of ranges was cut off, and would be continued."""


class Snapshot(ABC):
    """The files of one checkpoint at one revision, fetched as they are asked for."""

    label: str
    """What messages call the checkpoint: ``repo@revision``, or the folder."""
    commit: str | None = None
    """The commit that every file is read at; None for a folder."""
    offline: bool = False
    """Whether files that are not on this disk count as absent, since no request may be sent."""
    folder: Path | None = None
    """The folder on this disk that holds all files, if there is one."""
    weights: str | None = None
    """The one safetensors file to use, where it is known beforehand."""
    published: Published | None = None
    """What the whole checkpoint is, where the files here no longer tell."""
    advice: str = ""
    """Appended to errors about tensors that do not fit: what to try if the files are damaged."""

    @abstractmethod
    def content(self, name: str) -> bytes | None:
        """The bytes of the small file ``name``, or None if the checkpoint has no such file.

        Raises:
            CheckpointError: the file cannot be had or read, or is too large.
        """

    def contents(self, names: Iterable[str]) -> dict[str, bytes]:
        """The bytes of those of the small files ``names`` that the checkpoint has."""
        found = {name: self.content(name) for name in names}
        return {name: content for name, content in found.items() if content is not None}

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the checkpoint has the file ``name``, without fetching the file."""

    @abstractmethod
    def names(self) -> list[str]:
        """Every file of the checkpoint, as far as is known without fetching any."""

    @abstractmethod
    def headers(
        self, names: Iterable[str], lengths: Mapping[str, int] | None = None
    ) -> dict[str, Header]:
        """The headers of safetensors files, if possible without fetching their tensors.

        Args:
            names: the files.
            lengths: guesses of the headers' lengths in bytes.
        """

    @abstractmethod
    def locate(self, wanted: Wanted) -> dict[str, Located]:
        """Bring the tower to this disk if need be, and say where each tensor lies, by its name.

        Raises:
            CheckpointError: tensors cannot be had, or a file is not what its header promised.
            DamagedError: a kept copy is damaged; open the checkpoint again.
        """

    def traffic(self, wanted: Wanted) -> Traffic:
        """What :meth:`locate` would transfer, without transferring it."""
        return Traffic("local", "nothing", sum(piece.entry.nbytes for piece in wanted.pieces))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in the file ``name``, or None if there is no such file.

        Raises:
            CheckpointError: the file is not a JSON object, or too large.
        """
        content = self.content(name)
        try:
            return None if content is None else parse_json(content, f"{self.label}: {name}")
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self.advice}") from error


class FolderSnapshot(Snapshot):
    """A checkpoint in a folder of this disk."""

    def __init__(self, folder: Path, weights: str | None = None) -> None:
        """``weights`` names the one safetensors file to use, when the user pointed at it."""
        self.folder: Path = folder
        self.weights = weights
        self.label = str(folder if weights is None else folder / weights)
        self._inside = _allowed_folders(folder)

    def content(self, name: str) -> bytes | None:
        path = self._path(name)
        if path is None:
            return None
        label = f"{self.label}: {name}"
        try:
            check_size_of_json(name, path.stat().st_size, label)
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{label}: cannot be read ({error})") from error

    def has(self, name: str) -> bool:
        return self._path(name) is not None

    def names(self) -> list[str]:
        if self.weights is not None:
            return [self.weights]
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def headers(
        self, names: Iterable[str], lengths: Mapping[str, int] | None = None
    ) -> dict[str, Header]:
        paths = {name: self._path(name) for name in names}
        if missing := [name for name, path in paths.items() if path is None]:
            listed = ", ".join(missing[:6]) + (" and more" if len(missing) > 6 else "")
            raise CheckpointError(
                f"{self.label}: the folder has no file {listed}, which its index names: download "
                "it again, whole"
            )
        return {
            name: read_header(path, f"{self.label}: {name}") for name, path in paths.items() if path
        }

    def locate(self, wanted: Wanted) -> dict[str, Located]:
        found: dict[str, Located] = {}
        for file in dict.fromkeys(piece.file for piece in wanted.pieces):
            pieces = [piece for piece in wanted.pieces if piece.file == file]
            found |= locate_in(self.folder / file, pieces, f"{self.label}: {file}")
        return found

    def _path(self, name: str) -> Path | None:
        path = self.folder / check_name(name, self.label)
        if not path.is_file():
            return None
        real = path.resolve()
        if name != self.weights and not any(real.is_relative_to(place) for place in self._inside):
            raise CheckpointError(
                f"{self.label}: {name} is a link that leaves the checkpoint (to {real}); nothing "
                "was read: put the file itself there, or pass the folder it is in"
            )
        return path


def locate_in(path: Path, pieces: Iterable[Piece], label: str) -> dict[str, Located]:
    """Where the tensors ``pieces`` lie in the safetensors file ``path``, which ``label`` names.

    Raises:
        CheckpointError: the file's header is not the one that the tower was planned with.
    """
    header = read_header(path, label)
    found: dict[str, Located] = {}
    for piece in pieces:
        if header.tensors.get(piece.name) != piece.entry:
            raise CheckpointError(f"{label}: changed while it was being loaded; load again")
        found[piece.name] = Located(path, header.data_start + piece.entry.begin)
    return found


def check_size_of_json(name: str, size: int, label: str) -> None:
    """Raise a :class:`CheckpointError` if a JSON file of this name and size is not to be read."""
    if size > json_limit(name):
        raise CheckpointError(f"{label}: {size} bytes, at most {json_limit(name)} are read")


def json_limit(name: str) -> int:
    """The most bytes that a JSON file of this name may have."""
    return MAX_JSON_BYTES if name.endswith(".index.json") else MAX_CONFIG_BYTES


def _allowed_folders(folder: Path) -> list[Path]:
    """Where links may lead: inside the folder and, in the Hub client's cache, to its blobs."""
    real = folder.resolve()
    caches = [
        parent.parent for parent in (real, *real.parents) if parent.parent.name == "snapshots"
    ]
    return [real, *(cache.parent / "blobs" for cache in caches)]


def check_name(name: str, label: str) -> str:
    """Return ``name``, the relative name of a file that must stay inside the checkpoint.

    Raises:
        CheckpointError: the name is absolute, climbs, or is one that no file can have.
    """
    parts = PurePosixPath(name).parts
    if (
        not parts
        or name.startswith("/")
        or ".." in parts
        or "\\" in name
        or ":" in name
        or not name.isprintable()
        or len(name) > 255
    ):
        raise CheckpointError(
            f"{label}: the file name {name[:200]!r} leaves the checkpoint or is not a plain "
            "relative name; nothing was read"
        )
    if any(len(part.encode()) > LONGEST_PART for part in parts):
        raise CheckpointError(
            f"{label}: names the file {shown(name)!r}; no disk takes a name of over "
            f"{LONGEST_PART} bytes"
        )
    return name
