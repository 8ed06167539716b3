"""Files as the test's loopback hub serves them: their hash, their entry in a listing, their
bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

CHUNK = 1 << 18


def row_of(path: Path, name: str) -> dict[str, Any]:
    """Return the entry of a file or a folder in the listing of a repo."""
    if path.is_dir():
        return {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
    size, digest = path.stat().st_size, digest_of(path)
    row: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": digest[:40]}
    if path.suffix == ".safetensors":
        row["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
    return row


def chunks(body: bytes | Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes from ``start`` to ``end`` of a file or a byte string, in pieces."""
    if isinstance(body, bytes):
        yield body[start:end]
        return
    with body.open("rb") as file:
        file.seek(start)
        for begin in range(start, end, CHUNK):
            yield file.read(min(CHUNK, end - begin))


def digest_of(path: Path) -> str:
    """Return the hash of a file, computed again once the file has changed."""
    status = path.stat()
    return _hash_of(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _hash_of(path: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file; for a large file with holes, a shorter hash of its
    beginning.
    """
    with path.open("rb") as file:
        if size > 64 << 20 and path.stat().st_blocks * 512 < size // 2:
            beginning = file.read(64 << 20) + str((size, changed)).encode()
            return hashlib.sha256(beginning).hexdigest()[:40]
        whole = hashlib.sha256()
        while chunk := file.read(CHUNK):
            whole.update(chunk)
        return whole.hexdigest()
