"""Files of this disk that appear whole or not at all, and the lock that keeps other writers out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

if sys.platform != "win32":
    import fcntl


@contextmanager
def temporary_beside(file: Path) -> Iterator[Path]:
    """Yield an empty temporary file in the folder of ``file``, and remove it afterwards."""
    temporary = _create_beside(file)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing_atomic(file: Path) -> Iterator[Path]:
    """Yield a temporary file that takes the name ``file`` if the block ends without an error.

    Its bytes are on the disk before it gets the name, so that the file is whole even after a loss
    of power.
    """
    temporary = _create_beside(file)
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _create_beside(file: Path) -> Path:
    """Create an empty temporary file in the folder of ``file``, which is made if it is missing."""
    path = f"{file.parent}/.{file.name}.{os.getpid()}.{uuid4().hex[:8]}.tmp"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
    os.close(descriptor)
    return Path(path)


def write_atomic(file: Path, content: bytes) -> None:
    """Write ``content`` to ``file``, which readers find complete or not at all."""
    with writing_atomic(file) as temporary:
        temporary.write_bytes(content)


def flush(path: Path) -> None:
    """Wait until the bytes of a file are on the disk."""
    with open(path, "rb+", buffering=0) as file:
        os.fsync(file.fileno())


def lock(file: int | IO[bytes], *, wait: bool = True) -> bool:
    """Lock an open file or folder until it is closed; return False if the system has no locks.

    Args:
        file: file descriptor or open file.
        wait: wait while another process holds the lock; else raise an error.

    Raises:
        BlockingIOError: another process holds the lock, and ``wait`` is false.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have no locks
        return False
    return True
