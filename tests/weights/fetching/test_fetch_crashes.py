"""Killed, raced, out of disk, damaged: the next load is right, nothing partial passes for whole."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO, environment
from tests.support.hub.fetch_script import FETCH
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder
from weights.cache.kept_tower import KeptTower
from weights.hub.downloads import _Fetch
from weights.hub.ranges import RangeRequest

KILLS = 20

KILL = f"""{FETCH}
rng, killed, longest = random.Random(0), 0, 0.4
while killed < {KILLS}:
    for kept in whole():  # one was done before its end came: the next begins anew
        for path in kept.folder.iterdir():
            path.unlink()
        kept.folder.rmdir()
    number = child()
    time.sleep(rng.uniform(0, longest))
    os.kill(number, signal.SIGKILL)
    _, status = os.waitpid(number, 0)
    killed += os.WIFSIGNALED(status)
    if not os.WIFSIGNALED(status):
        assert status == 0, status
        longest = max(0.05, longest * 0.95)
    for kept in whole():
        kept.verify()
fetch()
(kept,) = whole()
kept.verify()
assert "torch" not in sys.modules, "the fetch path imports torch"
print(killed)
"""

RACE = f"""{FETCH}
numbers = [child() for _ in range(3)]
assert [os.waitpid(number, 0)[1] for number in numbers] == [0, 0, 0]
(kept,) = whole()
kept.verify()
"""


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


class Killed(BaseException):
    """Like a signal: nothing that cleans up catches it."""


def test_parts_of_a_fetch_that_was_killed_are_not_fetched_again(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.hub.ranges.MOST_BYTES", 100_000)
    hub.push(REPO, folder)
    whole, kept = inspect_checkpoint(folder).bytes, []
    fetch = _Fetch._fetch

    def interrupted(self: _Fetch, number: int, request: RangeRequest, *rest: Any) -> None:
        if len(kept) == 2:
            raise Killed
        fetch(self, number, request, *rest)
        kept.append(request.kept)

    with monkeypatch.context() as patch:
        patch.setattr(_Fetch, "_fetch", interrupted)
        with pytest.raises(Killed):
            load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    assert list(cache.rglob("partial"))
    assert not list(cache.glob("vitgraph/towers/*/*/tower"))
    assert inspect_checkpoint(REPO, cache_dir=cache, fetch="ranges").unfinished
    hub.requests.clear()
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))
    assert tensor_bytes(hub) == whole - sum(kept)
    assert not list(cache.rglob("partial"))


@pytest.mark.parametrize(
    ("what", "offset"),
    [("tower/model.safetensors", 12_000), ("done", 12_000), ("done", 0)],  # requests, plan
)
def test_a_partial_fetch_that_was_damaged_is_not_believed(
    hub: HubServer,
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    offset: int,
) -> None:
    """As after a power cut: the line was written and the bytes were not, or the other way."""
    hub.push(REPO, folder)
    with monkeypatch.context() as patch:
        patch.setattr(_Fetch, "_finish", lambda _: (_ for _ in ()).throw(KeyError))
        with pytest.raises(KeyError):
            load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    (partial,) = cache.rglob("partial")
    overwrite(partial / what, random.Random(0).randbytes(5000), offset)
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
    count = []

    def full(content: bytes, value: int) -> int:
        count.append(1)
        if len(count) > writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return crc32(content, value)

    with monkeypatch.context() as patch:
        patch.setattr("weights.hub.downloads.crc32", full)
        with pytest.raises(CheckpointError, match=r"disk is full: the tower needs .* MB in"):
            load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert not list(cache.rglob("*.safetensors"))
    assert not list(cache.rglob("partial"))
    assert load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges") is not None


def test_a_small_disk_is_refused_before_a_tensor_is_sent(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, folder)
    small = SimpleNamespace(free=1000)
    monkeypatch.setattr("weights.hub.downloads.shutil.disk_usage", lambda path: small)
    with pytest.raises(CheckpointError, match="disk is full"):
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert tensor_bytes(hub) == 0
    assert not list(cache.rglob("partial"))


TENSORS = "model.safetensors"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a tensor": lambda tower: overwrite(
        tower / TENSORS, b"\x55" * 3, (tower / TENSORS).stat().st_size * 3 // 4
    ),
    "the header": lambda tower: overwrite(tower / TENSORS, b"x" * 9, 40),
    "a name": lambda tower: swap(tower / TENSORS, b'"blocks.0.', b'"blocks.9.'),
    "a checksum": lambda tower: swap(tower / TENSORS, b'crc32\\": {', b'crc33\\": {'),
    "the length": lambda tower: (tower / TENSORS).write_bytes(b"short"),
    "the file": lambda tower: (tower / TENSORS).unlink(),
    "the config": lambda tower: swap(tower / "config.json", b"6", b"7"),
    "no config": lambda tower: (tower / "config.json").unlink(),
    "a processor file": lambda tower: (tower / "preprocessor_config.json").write_text("{}"),
}


def swap(path: Path, before: bytes, after: bytes) -> None:
    raw = path.read_bytes()
    assert before in raw
    path.write_bytes(raw.replace(before, after, 1))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_tower_is_fetched_again_or_named_offline(
    hub: HubServer, folder: Path, cache: Path, name: str
) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    (tower,) = cache.rglob("tower")
    DAMAGES[name](tower)
    with pytest.raises(CheckpointError, match=r"damaged and cannot be downloaded again offline"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))
    assert same_weights(encoder, load_encoder(REPO, cache_dir=cache, local_files_only=True))
    KeptTower(tower).verify()
    assert [path.name for path in tower.parent.iterdir()] == ["tower"]


def test_several_that_find_the_same_damage_make_one_fetch(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    commit = hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    (tower,) = cache.rglob("tower")
    DAMAGES["a tensor"](tower)
    hub.requests.clear()
    hub.bytes_per_second = 10e6
    with ThreadPoolExecutor(4) as pool:
        load = lambda _: load_encoder(  # noqa: E731
            REPO, revision=commit, cache_dir=cache, progress=False, fetch="ranges"
        )
        encoders = list(pool.map(load, range(4)))
    assert all(same_weights(encoder, load_encoder(folder)) for encoder in encoders)
    assert tensor_bytes(hub) == inspect_checkpoint(folder).bytes


def test_a_kept_tower_has_the_tensors_that_extract_writes(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    """Its folder loads as any other; its config is as published."""
    folder = write_seeded_checkpoint(tmp_path / "repo", "qwen3_omni", width=64)
    hub.push(REPO, folder)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    (tower,) = cache.rglob("tower")
    out = extract_encoder(folder, tmp_path / "out")
    assert sorted(path.name for path in tower.iterdir()) == sorted(p.name for p in out.iterdir())
    assert (tower / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    ours, theirs = load_file(tower / TENSORS), load_file(out / TENSORS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert same_weights(encoder, load_encoder(tower))
    again = extract_encoder(REPO, tmp_path / "again", cache_dir=cache, local_files_only=True)
    assert same_weights(encoder, load_encoder(again))


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
