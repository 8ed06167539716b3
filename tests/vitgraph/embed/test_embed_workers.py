"""``vitgraph embed`` by several workers: each its shards, none twice, whatever is killed when."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.photographs import china
from tests.support.processes.own import start
from vitgraph.cli import main
from vitgraph.embedding.job import Job
from vitgraph.embedding.storage import LocalFolder
from vitgraph.embedding.workers import Worker, read_worker
from vitgraph.features import load_embeddings

Command = list[str]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def written(out: Path) -> list[int]:
    return sorted(int(path.name[:5]) for path in out.glob("*_stats.json"))


# --- which worker ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shard", "environment", "rank", "size", "said_by"),
    [
        (None, {}, 0, 1, ""),
        ("2/5", {"RANK": "0", "WORLD_SIZE": "2"}, 2, 5, "--shard"),
        (None, {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "3"}, 1, 2, "torchrun"),
        (None, {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "RANK": "1"}, 3, 8, "SLURM"),
        ("0/1", {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, 0, 1, "--shard"),
    ],
)
def test_the_launcher_says_which_worker_this_is(
    shard: str | None, environment: dict[str, str], rank: int, size: int, said_by: str
) -> None:
    assert read_worker(shard, environment)[:3] == (rank, size, said_by)


@pytest.mark.parametrize("shard", ["4/4", "-1/4", "1", "a/b", "1/0", "1/", "1.0/2"])
def test_a_worker_that_cannot_be_is_refused(shard: str) -> None:
    with pytest.raises(ValueError, match=r"--shard says worker .* workers 0 to N - 1; give"):
        read_worker(shard, {})
    with pytest.raises(ValueError, match="torchrun says worker '2' of '2'"):
        read_worker(None, {"RANK": "2", "WORLD_SIZE": "2"})


def test_each_worker_has_a_gpu_and_a_part_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    worker = read_worker(None, dict(zip(LAUNCHERS, ["9", "16", "5", "8"], strict=True)))
    assert worker.device_for(torch.device("cuda")) == torch.device("cuda", 1)
    assert worker.device_for(torch.device("cuda:3")) == torch.device("cuda", 3)
    assert worker.device_for(torch.device("cpu")) == torch.device("cpu")
    assert worker.threads() == 4
    alone_on_host = read_worker("3/8", {})
    assert alone_on_host.device_for(torch.device("cuda")) == torch.device("cuda")
    assert alone_on_host.threads() == 16


# --- shards of workers ----------------------------------------------------------------------------


def test_workers_write_every_nth_shard_and_the_last_finishes_the_job(
    command: Command,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert main([*command, "--shard", "1/3"]) == 0
    said = capsys.readouterr().out
    assert "worker 1 of 3 (--shard) writes 2 shards" in said
    assert "has written its 2 shards, with 0 errors; 4 of all 6 are left to other work" in said
    assert written(out) == [1, 4]
    with pytest.raises(ValueError, match="4 of 6 shards missing, the first is 0"):
        load_embeddings(out)
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_NTASKS", "3")
    assert main(command) == 0
    assert written(out) == [1, 2, 4, 5]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(command) == 0
    assert "12 of 12 files in 6 shards" in capsys.readouterr().out
    keys, matrix = load_embeddings(out)
    assert keys == sorted(path.name for path in photos.iterdir())
    whole = [*command, "--shard", "0/1"]
    whole[whole.index(str(out))] = str(tmp_path / "whole")
    assert main(whole) == 0
    assert np.allclose(matrix, load_embeddings(tmp_path / "whole")[1], atol=1e-5)
    assert np.allclose(matrix[3], matrix[7], atol=1e-6)


def test_more_workers_than_shards_leave_some_without_work(command: Command, tmp_path: Path) -> None:
    assert main([*command, "--shard", "8/9"]) == 0
    assert written(tmp_path / "out") == []


def test_a_worker_with_bad_files_in_its_shards_exits_with_3(
    command: Command, repo: Path, photos: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    (copy / "02.png").write_text("no image")
    command[2] = str(copy)
    codes = [main([*command, "--shard", f"{rank}/3"]) for rank in range(3)]
    assert codes == [0, 3, 3]  # the last one sees the whole job
    assert "02.png" in (tmp_path / "out" / "errors.csv").read_text()


def test_two_workers_on_one_shard_write_it_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second worker that comes while the first one writes waits, and then leaves it alone."""
    out = tmp_path / "out"
    assert main(command) == 0
    before = {path.name: path.read_bytes() for path in out.glob("00003*")}
    for name in before:
        (out / name).unlink()
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with plain(LocalFolder(out), "00003"):
            entered.set()
            go_on.wait(30)
            for name, content in before.items():
                (out / name).write_bytes(content)

    def arrive(folder: LocalFolder, name: str) -> AbstractContextManager[None]:
        go_on.set()  # the shard is encoded, and the first worker still holds it
        return plain(folder, name)

    plain = LocalFolder.exclusive
    monkeypatch.setattr(LocalFolder, "exclusive", arrive)
    first = threading.Thread(target=hold)
    first.start()
    assert entered.wait(30)
    assert main(command) == 0
    first.join()
    assert {path.name: path.read_bytes() for path in out.glob("00003*")} == before
    assert not list(out.glob(".*"))


def test_a_shard_written_before_its_turn_is_not_encoded_again(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    assert main(command) == 0
    shutil.copytree(out, kept)
    for path in out.glob("0000[1-4]*"):
        path.unlink()
    plain: Callable[..., Any] = Job._shard_files
    planned = {}

    def noting(self: Job, number: int) -> Any:
        if number == 1 and not planned:  # the others are written now, by somebody else
            for path in kept.glob("0000[2-4]*"):
                shutil.copy(path, out)
        files = plain(self, number)
        planned[number] = len(files)
        return files

    monkeypatch.setattr(Job, "_shard_files", noting)
    assert main(command) == 0
    assert planned == {1: 2, 2: 0, 3: 0, 4: 0}
    assert len(load_embeddings(out)[0]) == 12


# --- killed workers -------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_killed_at_25_moments_lose_nothing_and_repeat_nothing(
    repo: Path, tmp_path: Path
) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    for number in range(360):
        x, y = number % 40 * 10, number // 40 * 20
        china().crop((x, y, x + 64, y + 64)).save(photos / f"{number:03d}.png")
    command = ["embed", str(repo), str(photos), "--out", str(out), "--shard-items", "2"]
    command += ["--dtype", "float32", "--workers", "1", "--no-progress"]
    chance = random.Random(0)
    kills = 0
    moments = []
    running: dict[int, Any] = {}
    begun = time.monotonic()
    first = start([*command, "--shard", "0/3"])
    while not written(out):
        time.sleep(0.01)
    first.kill()
    first.join()
    # On a busy machine it takes a worker longer to get to its first shard.
    longest = max(0.5, (time.monotonic() - begun) / 2)
    while kills < 25:
        for rank in range(3):
            if rank not in running or not running[rank].is_alive():
                running[rank] = start([*command, "--shard", f"{rank}/3"])
        time.sleep(chance.uniform(0, longest))
        victim = running.pop(chance.randrange(3))
        if victim.is_alive():
            victim.kill()
            victim.join()
            kills += victim.exitcode == -9
            moments.append(len(written(out)))
        if len(written(out)) > 150:  # nearly done: begin again with all but the first shards
            for stats in list(out.glob("*_stats.json"))[5:]:
                stats.unlink()
    assert len(set(moments)) > 5, "the kills came before there was work"
    for process in running.values():
        process.join()
    for rank in range(3):
        process = start([*command, "--shard", f"{rank}/3"])
        process.join()
        assert process.exitcode == 0
    assert main(["embed", "--verify", str(out)]) == 0
    keys, matrix = load_embeddings(out)
    assert keys == [f"{number:03d}.png" for number in range(360)]
    assert np.isfinite(matrix).all()


def test_every_shard_belongs_to_one_worker() -> None:
    for size in range(1, 9):
        own = [Worker(rank, size).shards_of_worker(range(50)) for rank in range(size)]
        assert sorted(number for shards in own for number in shards) == list(range(50))
