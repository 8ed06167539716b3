"""A checkpoint's files wherever they are: the interface, and a folder or file on this disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import CheckpointError
from .tensor_file import Header, parse_json, read_header

MAX_JSON_BYTES = 100_000_000
"""The index of the largest published checkpoint is about 20 MB."""


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
            size = path.stat().st_size
            if size > MAX_JSON_BYTES:
                raise CheckpointError(f"{label}: {size} bytes, at most {MAX_JSON_BYTES} are read")
            return parse_json(path.read_bytes(), label)
        except OSError as error:
            raise CheckpointError(f"{label}: cannot be read ({error})") from error


class FolderSnapshot(Snapshot):
    """A checkpoint in a folder of this disk."""

    def __init__(self, folder: Path, weights: str | None = None) -> None:
        """``weights`` names the one safetensors file to use, when the user pointed at it."""
        self.folder = folder
        self.weights = weights
        self.label = str(folder if weights is None else folder / weights)

    def path(self, name: str) -> Path:
        path = self.optional(name)
        if path is None:
            raise CheckpointError(f"{self.label}: the folder has no file {name}")
        return path

    def optional(self, name: str) -> Path | None:
        path = self.folder / check_name(name, self.label)
        return path if path.is_file() else None

    def has(self, name: str) -> bool:
        return self.optional(name) is not None

    def header(self, name: str) -> Header:
        return read_header(self.path(name), f"{self.label}: {name}")

    def names(self) -> list[str]:
        if self.weights is not None:
            return [self.weights]
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())


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
