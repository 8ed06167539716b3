"""The folders that hold what was fetched, by repo and commit.

They lie beside the Hub client's own cache, which knows whole files only::

    <root>/towers/models--owner--name/<commit>/
        tower/      config.json, the processor files and model.safetensors (see kept.py)
        partial/    a fetch of the tower that has not finished
        files/      small files of a repo whose tower is not kept, each behind its CRC-32
    <root>/towers/models--owner--name/refs/     the commit of each branch when it was last seen

``tower`` appears by one rename, whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from zlib import crc32

import huggingface_hub
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not marked public
    WeakFileLock,
)

from ..errors import DamagedError
from ..hub.parallel import said_if_slow

TOWERS = "towers"
OLD = ".old"
"""Ends the name of a folder that is being removed; such names begin with a dot."""
_ABSENT = b"absent\n"


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of all that we keep: in ``cache_dir`` if given, else beside the client's.

    The client counts strange folders inside its cache as damage, so the default is next to its
    cache, in HF_HOME; a cache moved by HF_HUB_CACHE takes ours along.
    """
    constants = huggingface_hub.constants
    if cache_dir is not None:
        return Path(cache_dir).expanduser() / "vitgraph"
    hub = Path(constants.HF_HUB_CACHE)
    home = Path(constants.HF_HOME)
    return (home if hub == home / "hub" else hub) / "vitgraph"


def repo_folder(root: Path, repo_id: str) -> Path:
    """Return the folder of a repo inside ``root``, which :func:`cache_root` tells."""
    return root / TOWERS / ("models--" + repo_id.replace("/", "--"))


def branch_file(root: Path, repo_id: str, revision: str) -> Path:
    """Return the file that remembers the commit of a branch.

    Branches have names that files cannot have, so the name is a hash.
    """
    return repo_folder(root, repo_id) / "refs" / sha256(revision.encode()).hexdigest()[:32]


class Store:
    """The folder of one repo at one commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tower = folder / "tower"
        self.partial = folder / "partial"
        self.files = folder / "files"

    @classmethod
    def of(cls, root: Path, repo_id: str, commit: str, subfolder: str | None) -> Store:
        """Return the store of a repo, or of a folder in it, at a commit."""
        inside = f"-{sha256(subfolder.encode()).hexdigest()[:16]}" if subfolder else ""
        return cls(repo_folder(root, repo_id) / f"{commit}{inside}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other threads and processes out."""
        repo = self.folder.parent
        place = repo.parent.parent / ".locks" / repo.name / f"{self.folder.name}.lock"
        place.parent.mkdir(parents=True, exist_ok=True)
        with said_if_slow(f"waiting for another load of {repo.name}") as done, WeakFileLock(place):
            done()
            yield

    def knows(self, name: str) -> bool:
        """Whether the small file ``name`` is kept, or that the repo has none."""
        return (self.files / name).is_file()

    def small_file(self, name: str) -> bytes | None:
        """Return a kept small file; None if it is known that the repo has none.

        Raises:
            DamagedError: the content is not what its CRC-32 says, or cannot be read.
        """
        path = self.files / name
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DamagedError(f"{path}: cannot be read ({error.strerror})") from error
        if raw == _ABSENT:
            return None
        record, _, content = raw.partition(b"\n")
        if record != _record_of(content):
            raise DamagedError(f"{path}: not what was fetched")
        return content

    def keep_small_file(self, name: str, content: bytes | None) -> None:
        """Keep a small file, or None for the knowledge that the repo has none."""
        raw = _ABSENT if content is None else _record_of(content) + b"\n" + content
        path = self.files / name
        if not (path.is_file() and path.read_bytes() == raw):
            write_whole(path, raw)

    def verify_small_files(self) -> None:
        """Raise a :class:`DamagedError` if a kept small file is not what was fetched."""
        try:
            names = os.listdir(self.files)
        except FileNotFoundError:
            return
        except OSError as error:
            raise DamagedError(f"{self.files}: cannot be read ({error.strerror})") from error
        for name in names:
            self.small_file(name)


def _record_of(content: bytes) -> bytes:
    return f"crc32 {crc32(content):08x}".encode()


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
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
    """Return the bytes that the files of a folder take on the disk; holes take none."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            status = path.stat()
            total += min(status.st_size, status.st_blocks * 512) * path.is_file()
    return total
