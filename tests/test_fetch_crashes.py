"""Killed, raced, out of disk, damaged: the next load is right, nothing partial passes for whole."""

from __future__ import annotations

import errno
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import same_weights
from fetching import REPO, environment
from hub_server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder
from weights.tower_cache import open_entry

KILLS = 60

FETCH = """
import os, random, signal, sys, time
from weights.hub import HubSnapshot
from weights.hub_options import HubOptions
from weights.contents import read_contents
from weights.snapshot import Piece
from weights.tower_cache import cache_root, open_entry

def fetch():
    snapshot = HubSnapshot(sys.argv[1], HubOptions(fetch="ranges", max_workers=3, progress=False))
    contents = read_contents(snapshot)
    names = [name for name in contents.files if name.startswith("model.visual.")]
    headers = contents.headers({contents.files[name] for name in names})
    snapshot.locate([
        Piece(name, contents.files[name], headers[contents.files[name]].tensors[name])
        for name in names
    ])

def whole():
    return [open_entry(path) for path in cache_root().glob("models--*/*/tower")]

def child():
    number = os.fork()
    if number == 0:
        code = 1
        try:
            fetch()
            code = 0
        finally:
            os._exit(code)
    return number
"""
"""Fetches in forks of a process that has imported everything but torch, so that they start fast."""

KILL = f"""{FETCH}
rng, killed, longest = random.Random(0), 0, 0.4
while killed < {KILLS}:
    for entry in whole():  # one was done before its end came: the next begins anew
        for path in entry.folder.iterdir():
            path.unlink()
        entry.folder.rmdir()
    number = child()
    time.sleep(rng.uniform(0, longest))
    os.kill(number, signal.SIGKILL)
    _, status = os.waitpid(number, 0)
    killed += os.WIFSIGNALED(status)
    if not os.WIFSIGNALED(status):
        assert status == 0, status
        longest = max(0.05, longest * 0.95)
    for entry in whole():
        entry.verify()
fetch()
(entry,) = whole()
entry.verify()
assert "torch" not in sys.modules, "the fetch path imports torch"
print(killed)
"""

RACE = f"""{FETCH}
numbers = [child() for _ in range(3)]
assert [os.waitpid(number, 0)[1] for number in numbers] == [0, 0, 0]
(entry,) = whole()
entry.verify()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_seeded_checkpoint(folder, "qwen3_vl", width=256, depth=2, decoy_shards=1)


def run(code: str, hub: HubServer, home: Path) -> str:
    command = [sys.executable, "-c", code, REPO]
    shell = environment(hub, home)
    done = subprocess.run(command, env=shell, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_killed_at_any_moment_the_next_fetch_finishes(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    hub.push(REPO, folder)
    hub.bytes_per_second = 30e6
    assert int(run(KILL, hub, tmp_path / "home")) == KILLS
    sent = tensor_bytes(hub)
    encoder = load_encoder(REPO, fetch="ranges", progress=False)
    assert same_weights(encoder, load_encoder(folder))
    assert tensor_bytes(hub) == sent


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_several_processes_make_one_fetch(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.push(REPO, folder)
    hub.bytes_per_second = 5e6
    run(RACE, hub, tmp_path / "home")
    assert tensor_bytes(hub) == inspect_checkpoint(folder).bytes
    assert same_weights(load_encoder(REPO, local_files_only=True), load_encoder(folder))


def test_a_fetch_that_was_killed_goes_on_where_it_was(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, folder)
    whole = inspect_checkpoint(folder).bytes

    class Killed(BaseException):
        """Like a signal: nothing that cleans up catches it."""

    kept = []

    def interrupted(*arguments: Any) -> int:
        if len(kept) == 2:
            raise Killed
        kept.append(len(arguments[2]))
        return keep(*arguments)

    from weights.fetch import _keep as keep

    with monkeypatch.context() as patch:
        patch.setattr("weights.fetch._keep", interrupted)
        with pytest.raises(Killed):
            load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    assert list(cache.rglob("partial"))
    assert not list(cache.rglob("manifest.json"))
    hub.requests.clear()
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))
    ranges = [r for r in hub.requests if r.range and not r.range.startswith("bytes=0-")]
    assert sum(r.sent for r in ranges) == whole - sum(kept)
    assert not list(cache.rglob("partial"))


@pytest.mark.parametrize("what", ["tensors", "progress", "plan"])
def test_a_partial_fetch_that_was_damaged_is_not_believed(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As after a power cut: the count was written and the bytes were not, or the other way."""
    hub.push(REPO, folder)
    with monkeypatch.context() as patch:
        patch.setattr("weights.fetch._Fetch._finish", lambda *_: (_ for _ in ()).throw(KeyError))
        with pytest.raises(KeyError):
            load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    (partial,) = cache.rglob("partial")
    target = {"tensors": "tower/tower.safetensors", "progress": "progress", "plan": "plan.json"}
    overwrite(partial / target[what], random.Random(0).randbytes(5000), 12_000)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))


def overwrite(path: Path, content: bytes, offset: int) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(min(offset, size // 2))
        file.write(content[: size - size // 2])


def test_several_threads_make_one_fetch(hub: HubServer, folder: Path, cache: Path) -> None:
    hub.push(REPO, folder)
    hub.bytes_per_second = 20e6
    with ThreadPoolExecutor(4) as pool:
        towers = [
            pool.submit(load_encoder, REPO, cache_dir=cache, progress=False, fetch="ranges")
            for _ in range(4)
        ]
        encoders = [tower.result() for tower in towers]
    whole = load_encoder(folder)
    assert all(same_weights(encoder, whole) for encoder in encoders)
    assert tensor_bytes(hub) == inspect_checkpoint(folder).bytes


def tensor_bytes(hub: HubServer) -> int:
    """Bytes sent of tensors; headers are read from byte 0 on."""
    ranges = [r for r in hub.requests if r.range and not r.range.startswith("bytes=0-")]
    return sum(request.sent for request in ranges)


@pytest.mark.parametrize("writes", [0, 1, 5])
def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    hub.push(REPO, folder)
    from weights.fetch import _keep as keep

    count = []

    def full(*arguments: Any) -> int:
        count.append(1)
        if len(count) > writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return keep(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("weights.fetch._keep", full)
        patch.setattr("weights.remote.CHUNK", 1 << 16)
        with pytest.raises(CheckpointError, match=r"disk is full: the tower needs .* MB in"):
            load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert not list(cache.rglob("*.safetensors"))
    assert not list(cache.rglob("partial"))
    assert load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges") is not None


def test_a_disk_that_is_too_small_is_refused_before_a_tensor_is_sent(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, folder)
    small = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr("weights.fetch.shutil", small)
    with pytest.raises(CheckpointError, match="disk is full"):
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert tensor_bytes(hub) == 0
    assert not list(cache.rglob("partial"))


def damage_tensor(tower: Path) -> None:
    size = (tower / "tower.safetensors").stat().st_size
    overwrite(tower / "tower.safetensors", b"\x55" * 3, size * 3 // 4)


DAMAGES = {
    "a tensor": damage_tensor,
    "the header": lambda tower: overwrite(tower / "tower.safetensors", b"x" * 9, 40),
    "the length": lambda tower: (tower / "tower.safetensors").write_bytes(b"short"),
    "the file": lambda tower: (tower / "tower.safetensors").unlink(),
    "the manifest": lambda tower: overwrite(tower / "manifest.json", b"\xff", 100),
    "no manifest": lambda tower: (tower / "manifest.json").unlink(),
    "another manifest": lambda tower: (tower / "manifest.json").write_text(
        json.dumps({"version": 1})
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_tower_is_fetched_again_or_named_offline(
    hub: HubServer, folder: Path, cache: Path, name: str
) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    (tower,) = cache.rglob("tower")
    DAMAGES[name](tower)
    with pytest.raises(CheckpointError, match=r"damaged and cannot be fetched again offline"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))
    assert same_weights(encoder, load_encoder(REPO, cache_dir=cache, local_files_only=True))
    open_entry(tower).verify()
    assert [path.name for path in tower.parent.iterdir() if "old" in path.name] == []


def test_a_branch_that_moves_is_seen_and_the_old_commit_stays_usable(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    commits = []
    for seed in (1, 2):
        folder = write_seeded_checkpoint(tmp_path / f"{seed}", "qwen3_5", width=64, seed=seed)
        commits.append((hub.push(REPO, folder), folder))
        encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
        assert same_weights(encoder, load_encoder(folder))
    hub.requests.clear()
    for commit, folder in commits:
        encoder = load_encoder(REPO, revision=commit, cache_dir=cache, local_files_only=True)
        assert same_weights(encoder, load_encoder(folder))
    assert same_weights(
        load_encoder(REPO, cache_dir=cache, local_files_only=True), load_encoder(commits[1][1])
    )
    assert hub.requests == []
