"""Reads local and remote files, and checks that they are unchanged since a job listed them.

Local files are opened directly. Addresses (``s3://``, ``gs://``, ``https://``, ``hf://``) go
through fsspec, whose drivers are extras of this distribution.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}
"""The key in :data:`_DRIVERS` for each protocol whose fsspec driver is an optional package."""
_DRIVERS = {"s3": "s3fs>=2025.3", "gs": "gcsfs>=2025.3", "http": "aiohttp>=3.9"}
"""The package with which fsspec reads each kind of remote store."""
_FAILURES = {
    "s3": ("botocore.exceptions.BotoCoreError", "botocore.exceptions.ClientError"),
    "gs": ("gcsfs.retry.HttpError", "google.auth.exceptions.GoogleAuthError"),
    "http": ("aiohttp.ClientError",),
    "hf": ("httpx.HTTPError",),
}
"""The exceptions besides OSError and ValueError that a driver raises, by kind of store or protocol.
"""
_NONBLOCK = 0 if sys.platform == "win32" else os.O_NONBLOCK
_STATES = ("ETag", "etag", "md5Hash", "blob_id", "Content-MD5", "Last-Modified", "LastModified")
"""The fields of fsspec's ``info`` about a remote file that change when the content of the file
does; the first of them that is set identifies the version of the file."""
_TIMES = ("updated", "mtime", "created")
"""The fields for times in fsspec's ``info``, used if none of :data:`_STATES` is set."""
REMOTE_BLOCK = 1 << 20
"""The number of bytes that are read ahead in a remote file."""
FILES = "files "
"""The prefix of a digest of local files. For a checkpoint in a local folder, the settings of a job
hold such a digest instead of a commit."""


def read_file(path: str, version: str = "", start: int = 0, size: int = -1) -> bytes:
    """Return the bytes of a regular file, or ``size`` bytes from the offset ``start`` on.

    Args:
        path: path of a local file, or address of a remote file.
        version: the text that :func:`version_of` returned when the job listed the file; empty if it
            is not known. It is not checked if only a part of a remote file is read, because the
            check would need a second request per part.
        start: offset of the first byte.
        size: number of bytes; -1 reads up to the end of the file.

    Raises:
        OSError: the file cannot be read, is not a regular file, has changed, or has become shorter.
    """
    if is_remote(path):
        content = _read_remote(path, version, start, size)
    else:
        with open_regular(path, version) as file:
            file.seek(start)
            content = file.read(size)
    if len(content) < size:
        raise OSError(f"{path}: ends before byte {start + size:,}")
    return content


def _read_remote(url: str, version: str, start: int, size: int) -> bytes:
    fs, path = open_filesystem(url)
    with explaining(url):
        if size >= 0:
            return fs.cat_file(path, start=start, end=start + size) if size else b""
        content: bytes = fs.cat_file(path)
    require_version(url, version)
    return content


@contextmanager
def open_regular(path: str, version: str = "") -> Iterator[IO[bytes]]:
    """Open a local regular file for reading.

    Args:
        path: path of the file.
        version: the text that :func:`version_of` returned when the job listed the file. It is
            compared with the file when the block ends; empty compares nothing.

    Raises:
        OSError: the file cannot be opened, is a pipe, a device or a folder, or has changed.
    """
    # The file type is also checked before opening, because opening a device can have side effects.
    _require_regular(path, os.stat(path))
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | _NONBLOCK)) as file:
        _require_regular(path, os.fstat(file.fileno()))
        yield file
        if version and version != version_from(os.fstat(file.fileno())):
            raise OSError(_changed(path))


@contextmanager
def open_file(path: str, version: str = "", block: int = REMOTE_BLOCK) -> Iterator[IO[bytes]]:
    """Open a local regular file or a remote file for reading.

    Args:
        path: path of a local file, or address of a remote file.
        version: the text that :func:`version_of` returned when the job listed the file. It is
            compared with the file when the block ends; empty compares nothing.
        block: number of bytes that are read ahead in a remote file.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or has changed.
    """
    if not is_remote(path):
        with open_regular(path, version) as file:
            yield file
        return
    fs, path_in_store = open_filesystem(path)
    with explaining(path):
        handle = fs.open(path_in_store, "rb", block_size=block, cache_type="readahead")
    with handle as file:
        yield file
    require_version(path, version)


def require_version(path: str, version: str) -> None:
    """Check that a file has not changed since the job listed it.

    Args:
        path: path of a local file, or address of a remote file.
        version: the text that :func:`version_of` returned when the job listed the file; empty
            checks nothing.

    Raises:
        OSError: the file has changed, or its size and time cannot be read.
    """
    if version and version != version_of(path):
        raise OSError(_changed(path))


def version_of(path: str) -> str:
    """Return a fingerprint of the content of a file: its size, and its time or ETag.

    Raises:
        OSError: the file's size and time cannot be read, or it is a pipe, a device or a folder.
    """
    if not is_remote(path):
        state = os.stat(path)
        _require_regular(path, state)
        return version_from(state)
    fs, path_in_store = open_filesystem(path)
    with explaining(path):
        return version_in(fs.info(path_in_store))


def version_in(info: Mapping[str, object]) -> str:
    """Return the text of :func:`version_of` for a remote file, from what fsspec's ``info`` gave."""
    states = (str(info[name]) for name in (*_STATES, *_TIMES) if info.get(name))
    return f"{info.get('size')} {next(states, '')}"


def version_from(state: os.stat_result) -> str:
    """Return the text of :func:`version_of` for a local file, from what ``os.stat`` gave."""
    return f"{state.st_size} {state.st_mtime_ns}"


def state_of(files: Iterable[Path], root: Path) -> str:
    """Return a fingerprint of local files: :data:`FILES`, then a digest of their names,
    sizes and times.

    Args:
        files: the files, always in the same order.
        root: the folder to which their names are taken relative.
    """
    states = [
        (path.relative_to(root).as_posix(), path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
    ]
    return FILES + hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def checkpoint_state(checkpoint: str, subfolder: str | None) -> str:
    """Return a fingerprint of the files of a local checkpoint, used instead of a commit.

    Args:
        checkpoint: path of a folder or of a file.
        subfolder: folder inside ``checkpoint`` that holds the files; None if they lie directly in
            ``checkpoint``.
    """
    folder = Path(checkpoint).expanduser() / (subfolder or "")
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    checkpoint_files = [path for path in files if path.suffix in (".json", ".safetensors")]
    return state_of(checkpoint_files, folder.parent if folder.is_file() else folder)


def _require_regular(path: str, state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise OSError(f"{path}: is not a regular file but a folder, a pipe or a device")


def _changed(path: str) -> str:
    return (
        f"{path}: has changed since the job listed it; its vector would not be that of the file "
        "that was listed, so take a new folder for the job"
    )


def entries_below(root: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Yield the files below a folder, each with its path relative to it; hidden files are skipped.

    Symbolic links to folders are followed, but each real folder is listed only once. Links are
    followed last, so a file that lies below ``root`` itself gets the path without a link.
    """
    waiting, linked = [(root, "")], list[tuple[str, str]]()
    listed_folders: set[tuple[int, int]] = set()
    while waiting or linked:
        folder, start = waiting.pop() if waiting else linked.pop(0)
        state = os.stat(folder)
        if (state.st_dev, state.st_ino) in listed_folders:
            continue
        listed_folders.add((state.st_dev, state.st_ino))
        # Entries are read one by one: a list of millions, 1 kB each, might not fit into memory.
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    later = linked if entry.is_symlink() else waiting
                    later.append((entry.path, f"{start}{entry.name}/"))
                else:
                    yield entry, start + entry.name
        linked.sort()  # scandir has no fixed order, and only the first link to a folder is listed


# --- names inside files ---------------------------------------------------------------------------


def path_beside(folder: str, name: str, any_path: bool) -> str:
    """Return the path of a file that a list of files or a table cell names.

    Args:
        folder: the folder of the list or table, local or remote, to which the name is relative;
            empty for the current folder.
        name: the name in the list or the cell.
        any_path: whether the file may lie outside ``folder``; ignored for a remote folder, outside
            of which no file may lie.

    Raises:
        ValueError: the file lies outside ``folder``, which is not allowed.
    """
    if is_remote(folder):
        relative = posixpath.normpath(name)
        if is_remote(name) or relative.startswith(("/", "..")):
            raise ValueError(f"{name}: a file on a remote store names only what lies beside it")
        return f"{folder}/{relative}"
    if any_path and is_remote(name):
        return name
    path = os.path.join(folder, name)
    if not any_path and (is_remote(name) or not _is_inside(path, folder)):
        raise ValueError(
            f"{name}: lies outside the folder {folder or '.'}; give --any-path if it may"
        )
    return path


def _is_inside(path: str, folder: str) -> bool:
    """Return whether a file lies below a folder when all symbolic links are resolved."""
    parent, name = os.path.split(path)
    real = _real_folder(parent)
    if os.path.islink(path) or name in ("", ".", ".."):
        real, name = os.path.split(os.path.realpath(path))
    root = _real_folder(folder)
    return os.path.commonpath((root, real)) == root


@lru_cache(maxsize=1024)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder or ".")


# --- addresses ------------------------------------------------------------------------------------


def is_remote(path: str) -> bool:
    """Return whether a path is the address of a remote file or folder, such as ``s3://...``."""
    return "://" in path and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None


def local_path(path: str) -> str:
    """Return a path without ``file://`` and with ``~`` replaced by the home folder."""
    return os.path.expanduser(path.removeprefix("file://"))


def protocol_of(url: str) -> str:
    """Return the protocol of an address in lower case, such as "s3"."""
    return url.partition("://")[0].lower()


def open_filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system for an address, and the path within that file system.

    Raises:
        ValueError: the protocol is not known, or its driver is not installed.
    """
    from fsspec.core import url_to_fs

    try:
        fs_and_path: tuple[AbstractFileSystem, str] = url_to_fs(url, use_listings_cache=False)
        return fs_and_path
    except ImportError as error:
        store = _STORES.get(protocol_of(url))
        if store is None:
            raise ValueError(f"{url}: {error}") from error
        raise ValueError(
            f"{url}: needs a driver that is not installed ({error}): pip install "
            f"'{_DRIVERS[store]}'"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{url}: {error}; give a local path, file://, s3://, gs://, https:// or hf://"
        ) from error


@contextmanager
def explaining(url: str) -> Iterator[None]:
    """Convert errors that a remote store's driver raises in the block into OSErrors that name
    ``url``.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url}: {error}") from error
    except _failures_of(protocol_of(url)) as error:
        raise OSError(f"{url}: {error}") from error


def _failures_of(protocol: str) -> tuple[type[Exception], ...]:
    """Return the exception classes of a protocol's driver, as far as their modules are imported."""
    names = _FAILURES.get(_STORES.get(protocol, protocol), ())
    parts = (name.rpartition(".") for name in names)
    return tuple(vars(sys.modules[m])[kind] for m, _, kind in parts if m in sys.modules)
