"""A checkpoint's files wherever they are: the interface, and a folder or file on this disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from .errors import CheckpointError, DamagedError
from .tensor_file import Header, TensorEntry, parse_json, read_header

MAX_JSON_BYTES = 100_000_000
"""Of an index; that of the largest published checkpoint is about 20 MB."""
MAX_CONFIG_BYTES = 16_000_000
"""Of any other JSON file; published ones stay under 1 MB."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Piece:
    """One tensor that is wanted, and where in the checkpoint it lies."""

    name: str
    file: str
    entry: TensorEntry


@dataclass(frozen=True)
class Located:
    """Where on this disk the bytes of a tensor lie, and their recorded CRC-32 if there is one."""

    path: Path
    offset: int
    crc32: int | None = None


@dataclass(frozen=True)
class Traffic:
    """What fetching some tensors transfers, either way, and what is here already."""

    ranges: int
    """Bytes as byte ranges."""
    shards: int
    """Bytes of the whole files that hold them."""
    cached: str
    """``tower``, ``shards``, ``some shards``, ``nothing``, or ``local`` for a folder."""


class Snapshot(ABC):
    """The files of one checkpoint at one revision, fetched as they are asked for."""

    label: str
    """What messages call it: ``repo@revision``, or the folder."""
    commit: str | None = None
    """The commit that every file is read at; None for a folder."""

    @abstractmethod
    def path(self, name: str) -> Path:
        """The file ``name`` on this disk, fetched if need be.

        Raises:
            CheckpointError: there is no such file, or it cannot be had.
        """

    @abstractmethod
    def optional(self, name: str) -> Path | None:
        """The file ``name`` on this disk, or None if the checkpoint has none."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the checkpoint has the file ``name``, without fetching it."""

    @abstractmethod
    def header(self, name: str) -> Header:
        """The header of the safetensors file ``name``, if possible without fetching its tensors."""

    def headers(
        self, names: Iterable[str], lengths: Mapping[str, int] | None = None
    ) -> dict[str, Header]:
        """The headers of several files; ``lengths`` are guesses of how long each is."""
        return {name: self.header(name) for name in names}

    def locate(self, pieces: Sequence[Piece]) -> dict[str, Located]:
        """Bring tensors to this disk if need be, and say where each lies.

        Raises:
            CheckpointError: they cannot be had, or a file is not what its header promised.
        """
        found: dict[str, Located] = {}
        for file in dict.fromkeys(piece.file for piece in pieces):
            header, label = self._header_here(file), f"{self.label}: {file}"
            path = self.path(file)
            for piece in (piece for piece in pieces if piece.file == file):
                if header.tensors.get(piece.name) != piece.entry:
                    raise CheckpointError(f"{label}: changed while it was being loaded; load again")
                found[piece.name] = Located(path, header.data_start + piece.entry.begin)
        return found

    def _header_here(self, name: str) -> Header:
        """The header of a file on this disk, as it is there now."""
        return read_header(self.path(name), f"{self.label}: {name}")

    def mend(self) -> bool:
        """Replace files whose headers make no sense if they are damaged; whether any was.

        Raises:
            CheckpointError: one cannot be replaced.
        """
        return False

    def repair(self, error: DamagedError) -> None:
        """Drop a kept copy that turned out damaged, so that ``locate`` fetches it again.

        Raises:
            CheckpointError: it cannot be fetched.
        """
        raise error

    @abstractmethod
    def traffic(self, pieces: Sequence[Piece]) -> Traffic:
        """What ``locate`` would transfer, without transferring it."""

    @abstractmethod
    def names(self) -> list[str]:
        """Every file the checkpoint has, as far as is known without fetching any."""

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in the file ``name``, or None if there is no such file.

        Raises:
            CheckpointError: not a JSON object, or of unbelievable size.
        """
        path = self.optional(name)
        if path is None:
            return None
        label = f"{self.label}: {name}"
        try:
            size, most = path.stat().st_size, json_limit(name)
            if size > most:
                raise CheckpointError(f"{label}: {size} bytes, at most {most} are read")
            return parse_json(path.read_bytes(), label)
        except OSError as error:
            raise CheckpointError(f"{label}: cannot be read ({error})") from error


class FolderSnapshot(Snapshot):
    """A checkpoint in a folder of this disk."""

    def __init__(self, folder: Path, weights: str | None = None) -> None:
        """``weights`` names the one safetensors file to use, when the user pointed at it."""
        self.folder = folder
        self.weights = weights
        self.inside = _allowed_folders(folder)
        self.label = str(folder if weights is None else folder / weights)

    def path(self, name: str) -> Path:
        path = self.optional(name)
        if path is None:
            raise CheckpointError(f"{self.label}: the folder has no file {name}")
        return path

    def optional(self, name: str) -> Path | None:
        path = self.folder / check_name(name, self.label)
        if not path.is_file():
            return None
        real = path.resolve()
        if name != self.weights and not any(real.is_relative_to(place) for place in self.inside):
            raise CheckpointError(
                f"{self.label}: {name} is a link that leaves the checkpoint (to {real}); nothing "
                "was read: put the file itself there, or pass the folder it is in"
            )
        return path

    def has(self, name: str) -> bool:
        return self.optional(name) is not None

    def header(self, name: str) -> Header:
        return read_header(self.path(name), f"{self.label}: {name}")

    def traffic(self, pieces: Sequence[Piece]) -> Traffic:
        headers = self.headers({piece.file for piece in pieces})
        wanted = sum(piece.entry.nbytes for piece in pieces)
        return Traffic(wanted, sum(header.file_bytes for header in headers.values()), "local")

    def names(self) -> list[str]:
        if self.weights is not None:
            return [self.weights]
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())


def with_located(
    snapshot: Snapshot, pieces: Sequence[Piece], use: Callable[[Mapping[str, Located]], _T]
) -> _T:
    """Let ``use`` read located tensors; again if a kept copy is damaged and can be repaired.

    Twice at most: there are two copies, the kept tower and the shards that it was taken from.
    """
    for _ in range(2):
        try:
            return use(snapshot.locate(pieces))
        except DamagedError as error:
            snapshot.repair(error)
    return use(snapshot.locate(pieces))


def with_headers(snapshot: Snapshot, find: Callable[[], _T]) -> _T:
    """Let ``find`` make sense of headers; once more if one of them was damaged and is mended."""
    try:
        return find()
    except CheckpointError:
        if not snapshot.mend():
            raise
    return find()


def json_limit(name: str) -> int:
    """The most bytes that a JSON file of this name may have."""
    return MAX_JSON_BYTES if name.endswith(".index.json") else MAX_CONFIG_BYTES


def _allowed_folders(folder: Path) -> list[Path]:
    """Where links may lead: inside the folder and, in the hub client's cache, to its blobs."""
    real = folder.resolve()
    caches = [
        parent.parent for parent in (real, *real.parents) if parent.parent.name == "snapshots"
    ]
    return [real, *(cache.parent / "blobs" for cache in caches)]


def open_folder(path: Path, subfolder: str | None) -> FolderSnapshot:
    """The checkpoint at an existing ``path``: a folder, or a safetensors file beside its config.

    Raises:
        CheckpointError: a file that is not safetensors, or no such subfolder.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"{path}: not a .safetensors file; pass the folder of a checkpoint, one "
                ".safetensors file or a repo id (pickle files are never opened)"
            )
        if subfolder is not None:
            raise CheckpointError(f"{path}: subfolder={subfolder!r} needs a folder, this is a file")
        return FolderSnapshot(path.parent, path.name)
    folder = path / check_name(subfolder, str(path)) if subfolder else path
    if not folder.is_dir():
        raise CheckpointError(f"{path}: has no folder {subfolder!r}")
    return FolderSnapshot(folder)


def check_name(name: str, label: str) -> str:
    """A file name of a checkpoint, which must stay inside it.

    Raises:
        CheckpointError: an absolute name, one that climbs, or one no file can have.
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
    return name
