"""What all shards of an embedding job have in common, and files that are written whole."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


class Manifest(NamedTuple):
    """What all shards of a job have in common."""

    settings: dict[str, Any]
    """Plain data: checkpoint, preprocessing, pooling, format."""
    items: int
    items_per_shard: int
    keys: str
    """Digest of all keys in order."""

    @property
    def shards(self) -> int:
        """How many shards the job has."""
        return -(-self.items // self.items_per_shard)

    def check(self, folder: Path) -> None:
        """Raise unless the folder is empty or new, or holds this job.

        Raises:
            ValueError: the folder holds another job or something else, or is a file.
        """
        if (folder / "manifest.json").exists():
            self._compare(Manifest.read(folder), folder)
        elif folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {folder}: is a file; give a folder")
        elif folder.is_dir() and any(path.suffix != ".tmp" for path in folder.iterdir()):
            raise ValueError(
                f"--out {folder}: holds files, and no manifest of an embedding job; give another "
                "folder"
            )

    def write(self, folder: Path) -> None:
        """Write the manifest into the folder of the job."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(self.settings, sort_keys=True)
        about = {**self._asdict(), "digest": hashlib.sha256(settings.encode()).hexdigest()}
        with writing(folder / "manifest.json") as temporary:
            temporary.write_text(json.dumps(about, indent=1) + "\n")

    def _compare(self, other: Manifest, folder: Path) -> None:
        mine, theirs = (
            {**each.settings, "items per shard": each.items_per_shard} for each in (self, other)
        )
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                raise ValueError(
                    f"--out {folder}: was begun with {name} {theirs.get(name)}, now it is "
                    f"{mine.get(name)}; give the same arguments to go on, or another folder"
                )
        if (self.items, self.keys) != (other.items, other.keys):
            raise ValueError(
                f"--out {folder}: was begun with {other.items:,} files, now there are "
                f"{self.items:,} or other ones; a job goes on with the same files alone, so give "
                "another folder"
            )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a job.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        try:
            about = json.loads((folder / "manifest.json").read_text())
            return cls(*(about[name] for name in cls._fields))
        except FileNotFoundError:
            raise ValueError(
                f"{folder}: has no manifest.json; `vitgraph embed` writes one into its folder"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder}/manifest.json: is damaged ({error!r})") from error


def digest_keys(keys: Iterable[str]) -> str:
    """A digest of keys and their order."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(key.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


# --- whole files ----------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which is renamed to it if nothing fails inside.

    The bytes are on the disk before the file has its name, so a name stands for a whole file even
    after a loss of power.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.touch()  # an OSError that names the folder, and the usual permissions
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is inside with the same ``path``, a file that is made for this.

    A process that ends gives the lock back. On a file system without locks nothing is waited for.
    """
    with open(path, "wb") as file:
        if fcntl is not None:
            with suppress(OSError):  # of a network file system that has no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    found = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found = zlib.crc32(block, found)
    return found
