"""The folder of an embedding job, on a local disk or on a remote store.

A job needs a few operations on its folder: list the file names, read a file, write a whole file,
and create a file unless another process has created it. :class:`LocalFolder` uses the functions of
the file system, :class:`RemoteFolder` fsspec (``s3://``, ``gs://``).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from weights.files import flush, lock, temporary_beside, writing_atomic

from .sources.files import explaining, is_remote, local_path, open_filesystem, protocol_of

JOB = "job"
"""The name of the lock that protects files of the whole job, such as its manifest."""
STORE, STORED, TENSOR = "store.json", "encoder_cache.safetensors", "ec_cache"
"""Names in a feature store for vLLM: the file of its settings, the file of an image, and the tensor
in that file."""
_TEMPORARY = re.compile(
    r"\.(?:(\d{5,})(?:[._].+)?|job|manifest\.json|files\.[0-9a-f]+\.jsonl|errors\.csv|store\.json)"
    r"\.(?:lock|\d+\.[0-9a-f]+)\.tmp"
)
"""The names of a job's own temporary files: the locks, and files that ``weights.files`` will rename
(with the number of the process and random digits). The group is the number of the shard."""
SPARE = 1 << 20
"""The bytes that must be free for a shard's table and statistics, besides room for its arrays."""
ATTEMPTS = 100
"""The most times that a lock file is created anew because others have removed its folder."""


class Storage(ABC):
    """The folder of an embedding job.

    A subclass for a file system with locks overrides :meth:`exclusive`; a subclass for a disk of
    limited size overrides :meth:`free`.
    """

    name: str
    """The path or the address of the folder, for messages."""
    tag: str
    """A random text that this process puts into its file names, so that processes do not write the
    same file; empty if locks prevent that."""
    is_local: bool
    """Whether the files lie on a disk of this machine or a mounted one."""

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Return the sorted names of files that begin with ``prefix``; [] if there is no folder."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether the folder has a file ``name``."""

    @abstractmethod
    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of a file from offset ``start`` up to but not including ``end``.

        If ``end`` is None, the file is read up to its end.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def reading(self, name: str) -> AbstractContextManager[Path]:
        """Return a context manager that yields a local path at which the file can be read."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Return a context manager that yields a temporary local path for the caller to write to.

        The file appears under ``name`` when the block ends without an error, so nobody ever sees it
        half written.
        """

    @abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Create a file and return True; if it exists already, return False and change nothing."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete files by name; names that do not exist are ignored."""

    @contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        """Lock: one process at a time runs a block with the same ``name``.

        A storage without locks lets all processes run their blocks at once.
        """
        yield

    def tidy(self) -> None:  # noqa: B027  # a storage without temporary files has nothing to do
        """Remove temporary files of workers that were killed."""

    def free(self) -> int | None:
        """Return the number of free bytes, None if the storage has no limit."""
        return None

    def require_space(self, count: int) -> None:
        """Check that ``count`` bytes for the arrays of a shard and :data:`SPARE` more are free.

        Raises:
            OSError: fewer bytes are free.
        """
        free = self.free()
        if free is not None and count + SPARE > free:
            raise OSError(
                errno.ENOSPC,
                f"no space for a shard of {count:,} bytes and {SPARE:,} beside it, {free:,} are "
                "free; what is written stays: free some space and run the same command again",
                self.name,
            )


def is_temporary(name: str) -> bool:
    """Return whether a file in the folder of a job has the name of a temporary file of the job."""
    return _TEMPORARY.fullmatch(name) is not None


def open_storage(folder: str | os.PathLike[str]) -> Storage:
    """Return the storage of a job's folder.

    Args:
        folder: a path, or an address that begins with ``file://``, ``s3://`` or ``gs://``.

    Raises:
        ValueError: the protocol of the address does not allow writing, or its driver for fsspec is
            not installed.
    """
    text = local_path(os.fspath(folder))
    if not is_remote(text):
        return LocalFolder(Path(text))
    if protocol_of(text) not in ("s3", "s3a", "gs", "gcs"):
        raise ValueError(f"{text}: cannot be written to; give a folder, s3://... or gs://...")
    return RemoteFolder(text)


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a folder that vLLM reads features from.

    Raises:
        ValueError: ``folder`` is the address of a remote store.
    """
    text = local_path(os.fspath(folder))
    if is_remote(text):
        raise ValueError(f"{text}: vLLM reads features from a folder; give a local or mounted one")
    return Path(text)


class LocalFolder(Storage):
    """The folder of a job on a disk, possibly a network file system that several hosts see."""

    tag = ""
    is_local = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)

    def names(self, prefix: str = "") -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.folder) if name.startswith(prefix))
        except FileNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        with open(self.folder / name, "rb") as file:
            file.seek(start)
            return file.read() if end is None else file.read(end - start)

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """Yield the path of the file itself."""
        yield self.folder / name

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a temporary path in the same folder; the file there is renamed at the end."""
        with writing_atomic(self.folder / name) as temporary:
            yield temporary

    def create(self, name: str, content: bytes) -> bool:
        """Write a temporary file and hard-link it to ``name``, so that nobody sees a part of it."""
        with temporary_beside(self.folder / name) as temporary:
            temporary.write_bytes(content)
            flush(temporary)
            try:
                os.link(temporary, self.folder / name)
            except FileExistsError:
                return False
            except OSError as error:  # some file systems have no hard links
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                    raise
                return self._create_in_place(name, content)
        return True

    def _create_in_place(self, name: str, content: bytes) -> bool:
        try:
            with open(self.folder / name, "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        """Hold the lock ``name`` during the block; if the process dies, the system releases it."""
        path = self.folder / f".{name}.lock.tmp"
        with _locked(path):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # rmdir removes the folder only if it is empty
                    self.folder.rmdir()

    def tidy(self) -> None:
        """Remove temporary files of killed processes: files under a lock that nobody holds."""
        leftovers: dict[str, list[str]] = {}
        for name in self.names("."):
            if temporary := _TEMPORARY.fullmatch(name):
                leftovers.setdefault(temporary[1] or JOB, []).append(name)
        for group, names in leftovers.items():
            path = self.folder / f".{group}.lock.tmp"
            with suppress(BlockingIOError), _locked(path, wait=False) as is_locked:
                if is_locked:
                    self.delete([*names, path.name])

    def free(self) -> int:
        """Return the free bytes of the disk on which the folder lies or will be made."""
        folder = self.folder.absolute()
        return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


@contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Create a lock file, and hold its lock while the block runs."""
    while True:
        with _open_lock(path) as file:
            is_locked = lock(file, wait=wait)
            if not is_locked or _is_open_at(file, path):
                yield is_locked
                return
        time.sleep(0.01)  # the last holder of the lock has removed the file: create a new one


def _open_lock(path: Path) -> IO[bytes]:
    """Create a lock file and its folder, which a worker that gives up removes while it is empty."""
    for _ in range(ATTEMPTS):
        with suppress(FileNotFoundError):
            return open(path, "wb")
        with suppress(FileNotFoundError, FileExistsError):  # removed between the two calls
            path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "wb")


def _is_open_at(file: IO[bytes], path: Path) -> bool:
    """Return whether an open file still lies at this path and was neither removed nor replaced."""
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


class RemoteFolder(Storage):
    """The folder of a job on a remote store, which has no locks.

    The names of a shard's files contain a random tag per process, so that two processes never write
    the same object. Only one process can create the shard's statistics, which name the files that
    are valid.
    """

    is_local = False

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")
        self.tag = f"{uuid.uuid4().hex[:8]}."
        self._fs, self._root = open_filesystem(self.name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def names(self, prefix: str = "") -> list[str]:
        with explaining(self.name):
            paths = self._fs.find(self._root, maxdepth=1, prefix=prefix)
        names = (path.rpartition("/")[2] for path in paths)
        return sorted(name for name in names if name.startswith(prefix))

    def exists(self, name: str) -> bool:
        with explaining(self.name):
            is_there: bool = self._fs.exists(self._path(name))
        return is_there

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        with explaining(self.name):
            content: bytes = self._fs.cat_file(self._path(name), start=start or None, end=end)
        return content

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """Download the file into a temporary folder, and yield its path there."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            with explaining(self.name):
                self._fs.get_file(self._path(name), str(path))
            yield path

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a path in a temporary folder, and upload the file that is written there."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            yield path
            with explaining(self.name):
                self._fs.put_file(str(path), self._path(name))

    def create(self, name: str, content: bytes) -> bool:
        """Ask the remote store to write the file unless it exists.

        No two processes create files of the same content: those of a job have random parts.
        """
        try:
            with explaining(self.name):
                self._fs.pipe_file(self._path(name), content, mode="create")
        except FileExistsError:
            # A driver that repeats a request whose answer was lost finds the file of the first one.
            return self.read(name) == content
        return True

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with explaining(self.name), suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))
