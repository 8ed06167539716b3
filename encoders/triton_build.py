"""The hash of Triton's own files, which every process would compute anew.

Triton finds compiled kernels by a key with a hash of its files, of which one has 416 MB: in version
3.6 that takes 0.46 s of every process on an H200's host. The hash is kept in Triton's
cache, beside the kernels that it helps to find, under the sizes and times of these files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Protocol

HASHED = ("compiler", "backends", "language", "_C")
"""The folders of Triton whose files its hash reads."""
FILE = "triton_key"
KEPT = "kept_triton_key"


class CacheManager(Protocol):
    """A place in Triton's cache; a file there is written as a whole."""

    def get_file(self, filename: str) -> str | None: ...

    def put(self, data: str, filename: str) -> str: ...


def keep_build_hash(cache: ModuleType) -> None:
    """Have Triton read the hash of its files from its cache, while they are as they were.

    Triton has no setting for that. The function replaced, ``triton_key``, is private: a version
    without it computes the hash as before. Calling this again does nothing.

    Args:
        cache: the module ``triton.runtime.cache``.
    """
    compute = vars(cache).get("triton_key")
    if compute is None or compute.__name__ == KEPT or cache.__file__ is None:
        return
    folder = Path(cache.__file__).parents[1]

    def kept_triton_key() -> str:
        return read_or_compute(compute, folder, cache.get_cache_manager)

    vars(cache)["triton_key"] = lru_cache(kept_triton_key)


def read_or_compute(
    compute: Callable[[], str], folder: Path, manager_of: Callable[[str], CacheManager]
) -> str:
    """Return the hash of the files in ``folder``: the kept one, or what ``compute`` returns.

    Args:
        compute: computes the hash, once.
        folder: the folder of the package Triton.
        manager_of: returns the place in Triton's cache for a key of hexadecimal digits.
    """
    with suppress(OSError):  # a cache that is read-only may have the kernels
        stamps = "\n".join(_stamps(folder))
        manager = manager_of(hashlib.sha256(stamps.encode()).hexdigest())
        if (file := manager.get_file(FILE)) is not None:
            return Path(file).read_text()
        manager.put(compute(), FILE)
    return compute()


def _stamps(folder: Path) -> Iterator[str]:
    """Yield path, size and times of every file that Triton hashes."""
    yield str(folder)
    names = ("**/*.py", "libtriton*")
    files = {file for part in HASHED for name in names for file in (folder / part).glob(name)}
    for file in sorted({*files, folder / "runtime" / "cache.py"}):
        status = file.stat()
        yield f"{file} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
