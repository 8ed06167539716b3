"""What a killed download of the Hub's client left in its cache: gone on with, or removed.

The client writes to ``blobs/<SHA-256>.<8 random digits>.incomplete``, removes that if it fails, and
never looks at it again if it was killed. (Clients of old wrote to ``<SHA-256>.incomplete`` and went
on with it unchecked.) What is there is the beginning of the file: the rest is fetched by byte
range, and the whole becomes the blob if its SHA-256 is the one that it is named by; the client then
finds it. All that under the client's own lock, so that nobody is writing.
"""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not marked public
    WeakFileLock,
)

from .obstacles import is_full
from .remote import RangesUnsupported, RemoteFile
from .repo import Repo
from .shard_records import file_sha256, plain_sha256
from .workers import Stopped


def finish_leftover(repo: Repo, name: str, size: int, stop: Event, bar: type[Any]) -> None:
    """Make a whole blob of what is left of the file ``name`` of ``size`` bytes, if there is any.

    Args:
        repo: the repo at its commit.
        name: the file; nothing is done unless its SHA-256 has been told with its header.
        size: its bytes.
        stop: ends it, what has arrived stays.
        bar: the class of the progress bar.

    Raises:
        GivenUpError: the connection broke too often; what has arrived stays.
        HfHubHTTPError: the Hub refuses.
        OSError: the disk is full (nothing stays), or the cache cannot be written.
    """
    remote = repo.remote(name)
    digest = plain_sha256(remote.etag)
    cache = repo.clients_cache
    blobs = cache / repo.folder_name / "blobs"
    if digest is None or not any(blobs.glob(_pattern(digest))):
        return
    with WeakFileLock(cache / ".locks" / repo.folder_name / f"{digest}.lock"):
        left = _left(blobs, digest)
        if left and not (blobs / digest).exists():
            _finish(left[-1], remote, size, stop, bar)
            if file_sha256(left[-1]) == digest:
                left.pop().replace(blobs / digest)
        for path in left:
            path.unlink(missing_ok=True)


def _left(blobs: Path, digest: str) -> list[Path]:
    """The beginnings of a file, the longest last."""
    return sorted(blobs.glob(_pattern(digest)), key=lambda path: path.stat().st_size)


def _pattern(digest: str) -> str:
    return f"{digest}*.incomplete"


def _finish(path: Path, remote: RemoteFile, size: int, stop: Event, bar: type[Any]) -> None:
    """Fetch what is missing, if the server does byte ranges."""
    done = path.stat().st_size
    about = {"unit": "B", "unit_scale": True, "desc": path.name[:10], "name": "vitgraph.fetch"}
    try:
        with path.open("ab") as out, bar(total=size, initial=done, **about) as shown:
            for chunk in remote.stream(done, size, stop):
                if stop.is_set():
                    raise Stopped
                out.write(chunk)
                shown.update(len(chunk))
    except RangesUnsupported:
        return
    except OSError as error:
        if is_full(error):
            path.unlink(missing_ok=True)
        raise
