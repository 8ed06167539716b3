"""Ctrl-C, errors and full disks: nobody waits for a thread that sleeps or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace

import pytest

from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO, environment
from tests.support.hub.fetch_script import FETCH
from tests.support.hub.server import Fault, HubServer
from weights import CheckpointError, load_encoder
from weights.threads import Stopped, in_parallel

LOAD = f"""{FETCH}
import resource
from weights.errors import CheckpointError
way, limit = sys.argv[1], int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    fetch(way)
except CheckpointError as error:
    sys.exit(str(error))
"""
"""A fetch in a process of its own, without torch."""


def start(hub: HubServer, home: Path, way: str, limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOAD, way, str(limit)]
    return subprocess.Popen(command, env=environment(hub, home), stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("ranges", Fault(429, {"Retry-After": "60"})),
        ("ranges", Fault(stall=60)),
        ("shards", Fault(429, {"Retry-After": "60"})),
        ("shards", Fault(stall=60)),
    ],
    ids=str,
)
def test_an_interrupt_is_obeyed_while_the_server_keeps_us_waiting(
    hub: HubServer, folder: Path, tmp_path: Path, way: str, fault: Fault
) -> None:
    """The process ends within 30 s, however busy the machine is; the server would take 60 s."""
    hub.push(REPO, folder)
    hub.fail("/blob/", Fault(), Fault(), *[fault] * 100, method="GET")
    process = start(hub, tmp_path / "home", way)
    waited = time.monotonic() + 30
    while len(hub.faults[0][2]) > 99 and time.monotonic() < waited:
        time.sleep(0.01)
    time.sleep(0.3)  # for the answer to arrive; before it does, the interrupt is obeyed as well
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said
    hub.faults.clear()
    assert same_weights(load_encoder(REPO, progress=False), load_encoder(folder))


def test_a_failure_does_not_wait_for_a_waiting_part(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    hub.push(REPO, folder)
    hub.fail("/blob/", Fault(), Fault(), Fault(429, {"Retry-After": "60"}), Fault(418))
    with pytest.raises(CheckpointError, match="418"):
        load_encoder(REPO, cache_dir=tmp_path / "cache", progress=False, fetch="ranges")
    [told_to_wait] = [request.range for request in hub.requests if request.status == 429]
    assert [request.range for request in hub.requests].count(told_to_wait) == 1  # not asked again


def test_the_first_failure_is_raised_and_stops_the_others() -> None:
    ended, begun = [], Barrier(3)

    def task(number: int, stop: Event) -> None:
        begun.wait()
        if number == 1:
            raise KeyError(number)
        stop.wait(20)
        ended.append(number)
        raise Stopped

    with pytest.raises(KeyError):
        in_parallel(task, range(10), 3)
    assert sorted(ended) == [0, 2]
    assert in_parallel(lambda number, stop: number**2, range(10), 3) == [n**2 for n in range(10)]
    assert in_parallel(task, [], 3) == []


def left_behind(home: Path) -> list[str]:
    """Files of tensors, whole or not."""
    endings = (".safetensors", ".incomplete", ".tmp", "plan.json")
    found = [path for path in home.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in found if path.name.endswith(endings) or path.stat().st_size > 1e5]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process")
@pytest.mark.parametrize("limit", [20_000, 400_000])
@pytest.mark.parametrize("way", ["ranges", "shards"])
def test_a_write_that_fails_is_a_full_disk_and_leaves_nothing(
    hub: HubServer, folder: Path, tmp_path: Path, way: str, limit: int
) -> None:
    """The kernel itself refuses: no file of the process may grow over the limit."""
    home = tmp_path / "home"
    hub.push(REPO, folder)
    process = start(hub, home, way, limit)
    _, said = process.communicate()
    assert process.returncode == 1, said
    assert "the disk is full" in said
    if way == "ranges":
        assert left_behind(home) == []
    assert same_weights(load_encoder(REPO, fetch=way, progress=False), load_encoder(folder))


def test_a_config_that_cannot_be_written_is_a_full_disk(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    hub.push(REPO, folder)
    process = start(hub, tmp_path / "home", "ranges", 500)
    _, said = process.communicate()
    assert "the disk is full: the tower needs" in said
    assert left_behind(tmp_path / "home") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB; the tower has 1.1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("may not mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.filterwarnings("ignore:Not enough free disk space")  # the client's, before it fails
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("way", ["ranges", "shards"])
def test_a_disk_that_is_too_small_is_said_so_and_left_clean(
    hub: HubServer,
    folder: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    told: bool,
) -> None:
    hub.push(REPO, folder)
    if not told:  # a disk that others fill meanwhile
        free = SimpleNamespace(free=1 << 40)
        monkeypatch.setattr("weights.hub.downloads.shutil.disk_usage", lambda path: free)
    with pytest.raises(CheckpointError, match=r"the disk is full: .*free some space"):
        load_encoder(REPO, cache_dir=small_disk / "cache", progress=False, fetch=way)
    if way == "ranges":
        assert left_behind(small_disk) == []
