"""Whole shards whose download was killed: the client's beginning of the file is gone on with."""

from __future__ import annotations

import errno
import hashlib
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from checkpoints import same_weights
from fetching import REPO, insert_hole
from hub_server import Fault, HubServer, Request
from test_fetch_interrupts import start
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, load_encoder

NAMES = ["{}.incomplete", "{}.0a1b2c3d.incomplete"]
"""Of the client before and since it ceased to go on with them."""


@pytest.fixture
def lone(folder: Path, tmp_path: Path) -> Path:
    return extract_encoder(folder, tmp_path / "lone")


def leave(cache: Path, whole: Path, content: bytes, name: str = NAMES[1]) -> Path:
    """What a killed client leaves of the file ``whole``."""
    digest = hashlib.sha256(whole.read_bytes()).hexdigest()
    path = cache / "models--owner--tower" / "blobs" / name.format(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def bodies(hub: HubServer) -> list[Request]:
    """Of weights, headers left out."""
    sent = [r for r in hub.requests if r.path.startswith("/blob/") and r.status in (200, 206)]
    return [r for r in sent if not (r.range or "").startswith("bytes=0-")]


@pytest.mark.parametrize("name", NAMES)
def test_only_the_rest_is_fetched(hub: HubServer, lone: Path, cache: Path, name: str) -> None:
    hub.push(REPO, lone)
    whole = lone / "model.safetensors"
    size = whole.stat().st_size
    leave(cache, whole, whole.read_bytes()[: size // 4], "{}.ffffffff.incomplete")
    leave(cache, whole, whole.read_bytes()[: size // 2], name)
    hub.fail("/blob/", Fault(), Fault(cut_after=1000), method="GET")
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(lone))
    assert sum(request.sent for request in bodies(hub)) == size - size // 2
    assert not list(cache.rglob("*.incomplete"))
    hub.requests.clear()
    assert same_weights(encoder, load_encoder(REPO, cache_dir=cache, local_files_only=True))
    assert hub.requests == []


LEFT = {
    "nothing": lambda raw: b"",
    "another file": lambda raw: bytes(len(raw) // 2),
    "holes": lambda raw: raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2),
    "more than the file": lambda raw: raw + b"x",
    "all of it": lambda raw: raw,
}


@pytest.mark.parametrize("what", LEFT)
@pytest.mark.parametrize("ranges", [True, False])
def test_whatever_was_left_the_tower_is_right_and_the_cache_clean(
    hub: HubServer, lone: Path, cache: Path, what: str, ranges: bool
) -> None:
    hub.push(REPO, lone)
    hub.ranges = ranges
    whole = lone / "model.safetensors"
    leave(cache, whole, LEFT[what](whole.read_bytes()))
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(lone))
    assert not list(cache.rglob("*.incomplete"))
    (shard,) = cache.glob("models--*/snapshots/*/*.safetensors")
    assert shard.read_bytes() == whole.read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_client_that_was_killed_has_not_worked_in_vain(hub: HubServer, tmp_path: Path) -> None:
    """The client writes ten megabytes at a time."""
    folder = write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64, shards=1)
    insert_hole(folder / "model.safetensors", "model.language_model.norm.weight", 30 << 20)
    hub.push(REPO, folder)
    hub.bytes_per_second = 30e6
    home = tmp_path / "home"
    process = start(hub, home, "shards")
    waited = time.monotonic() + 30
    while left_in(home) < 10_000_000 and time.monotonic() < waited:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    left = left_in(home)
    hub.requests.clear()
    hub.bytes_per_second = None
    assert same_weights(load_encoder(REPO, fetch="shards", progress=False), load_encoder(folder))
    size = (folder / "model.safetensors").stat().st_size
    assert sum(request.sent for request in bodies(hub)) == size - left <= size - 10_000_000
    assert left_in(home) == 0


def left_in(home: Path) -> int:
    return sum(path.stat().st_size for path in home.rglob("*.incomplete"))


def test_a_connection_that_breaks_for_good_leaves_what_has_arrived(
    hub: HubServer, lone: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.remote.FIRST_WAIT", 0.001)
    hub.push(REPO, lone)
    whole = lone / "model.safetensors"
    left = leave(cache, whole, whole.read_bytes()[:1000])
    hub.fail("/blob/", Fault(), Fault(cut_after=50_000), *[Fault(503)] * 40, method="GET")
    with pytest.raises(CheckpointError, match="what has arrived is kept: load again to go on"):
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert left.stat().st_size == 51_000
    hub.faults.clear()
    hub.requests.clear()
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(lone))
    assert sum(request.sent for request in bodies(hub)) == whole.stat().st_size - 51_000


def test_a_download_that_somebody_else_is_making_is_waited_for(
    hub: HubServer, lone: Path, cache: Path
) -> None:
    hub.push(REPO, lone)
    whole = lone / "model.safetensors"
    left = leave(cache, whole, whole.read_bytes()[:1000])
    digest = left.name.partition(".")[0]
    lock = cache / ".locks" / "models--owner--tower" / f"{digest}.lock"
    lock.parent.mkdir(parents=True)
    loaded: list[Any] = []
    load = lambda: loaded.append(load_encoder(REPO, cache_dir=cache, progress=False))  # noqa: E731
    with WeakFileLock(lock):
        thread = Thread(target=load)
        thread.start()
        thread.join(1)
        assert left.read_bytes() == whole.read_bytes()[:1000]
        left.write_bytes(whole.read_bytes())
        left.rename(left.with_name(digest))
    thread.join(30)
    assert same_weights(loaded[0], load_encoder(lone))
    assert bodies(hub) == []


def test_a_disk_that_is_full_is_said_so_and_left_clean(
    hub: HubServer, lone: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, lone)
    whole = lone / "model.safetensors"
    left = leave(cache, whole, whole.read_bytes()[:1000])

    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("weights.remote.RemoteFile.stream", full_after_the_header(full))
    with pytest.raises(CheckpointError, match=r"the disk is full: fetching whole shards needs"):
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert not left.exists()


def full_after_the_header(full: Any) -> Any:
    from weights.remote import RemoteFile

    stream = RemoteFile.stream
    return lambda file, begin, *rest: (full if begin else stream)(file, begin, *rest)
