"""How far an embedding job is, whether its files are whole, and what a full disk does."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from vitgraph.cli import main
from vitgraph.embedding import shard
from vitgraph.embedding.records import ShardStats
from vitgraph.embedding.shard import Row, Shard
from vitgraph.embedding.storage import LocalFolder

Command = list[str]


def written(out: Path) -> list[int]:
    return sorted(int(path.name[:5]) for path in out.glob("*_stats.json"))


# --- status and verify ----------------------------------------------------------------------------


def test_status_says_how_far_a_job_is(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    main([*command, "--shard", "0/2"])
    capsys.readouterr()
    assert main(["embed", "--status", out]) == 1
    said = capsys.readouterr().out
    assert f"{out}: 3 of 6 shards written, 6 of 12 files\n6 rows; 0 files with errors\n" in said
    assert "files per second per worker\nworker 0/2: 3 shards, the last one 0 s ago" in said
    main([*command, "--shard", "1/2"])
    assert main(["embed", "--status", out]) == 0
    assert main(["embed", "--status", str(tmp_path)]) == 2
    assert "has no manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("chosen", ["npy mean", "safetensors mean", "parquet mean", "parquet none"])
def test_verify_reads_every_file_and_names_what_is_wrong(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], chosen: str
) -> None:
    format, pool = chosen.split()
    command += ["--format", format, "--pool", pool]
    if format == "parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / "out"
    assert main(command) == 0
    capsys.readouterr()
    assert main(["embed", "--verify", str(out)]) == 0
    assert "complete, 6 shards with 12 files" in capsys.readouterr().out
    array = out / f"00001.{format}"
    array.write_bytes(array.read_bytes()[:-1] + b"?")
    (out / "00002.csv").unlink()
    (out / "00004_stats.json").unlink()
    assert main(["embed", "--verify", str(out)]) == 1
    said = capsys.readouterr().out
    again = "delete 00001_stats.json and run the command of the job again"
    assert f"00001.{format} is not what was written; {again}" in said
    assert "shard 00002: 00002.csv is missing; delete" in said
    assert "shard 00004: is not written; run the command of the job again" in said
    for name in ("00001_stats.json", "00002_stats.json"):
        (out / name).unlink()
    assert main(command) == 0
    assert [main(["embed", check, str(out)]) for check in ("--verify", "--status")] == [0, 0]


@pytest.mark.parametrize("large", [1, 1 << 40], ids=["beside the copies", "after them"])
def test_checksums_of_arrays_are_those_of_their_files(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr("vitgraph.embedding.shard._LARGE", large)
    out = tmp_path / "out"
    assert main([*command, "--pool", "none"]) == 0
    assert all(len(np.load(path)) > 0 for path in out.glob("*.npy"))
    assert main(["embed", "--verify", str(out)]) == 0


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"items": 2'])
def test_damaged_statistics_are_named_by_every_command(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    out = tmp_path / "out"
    assert main(command) == 0
    (out / "00003_stats.json").write_text(content)
    capsys.readouterr()
    for again in (["embed", "--status", str(out)], command):
        assert main(again) == 2
        error = capsys.readouterr().err
        assert f"{out}/00003_stats.json: is damaged; delete it and run the command" in error
    assert main(["embed", "--verify", str(out)]) == 1
    said = capsys.readouterr().out
    assert "shard 00003: 00003_stats.json is damaged; delete 00003_stats.json and run" in said
    (out / "00003_stats.json").unlink()
    assert main(command) == 0
    assert main(["embed", "--verify", str(out)]) == 0


def test_a_last_shard_of_fewer_items_verifies(
    embed: Callable[..., int], photos: Path, tmp_path: Path
) -> None:
    assert embed(photos, "--shard-items", 5) == 0  # the last one has two
    assert main(["embed", "--verify", str(tmp_path / "out")]) == 0


def test_verify_counts_items_with_errors_and_whole_outputs(
    command: Command, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    for name in ("00.png", "05.png"):
        (copy / name).write_text(f"no image {name}")
    command[2] = str(copy)
    fields = ["--pool", "none", "--fields", "pooler_output,last_hidden_state"]
    assert main([*command, *fields]) == 3
    out = tmp_path / "out"
    assert main(["embed", "--verify", str(out)]) == 0
    stats = out / "00002_stats.json"
    stats.write_text(stats.read_text().replace('"05.png"', '"06.png"'))
    assert main(["embed", "--verify", str(out)]) == 1
    assert "the keys of its shards are not those of the job" in capsys.readouterr().out


def test_values_that_are_not_finite_are_a_fault(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(command) == 0
    matrix = np.load(out / "00003.npy")
    matrix[1, 5] = np.nan
    np.save(out / "00003.npy", matrix)
    stats = json.loads((out / "00003_stats.json").read_text())
    (out / "00003_stats.json").write_text(json.dumps({**stats, "files": {}}))
    assert main(["embed", "--verify", str(out)]) == 1
    said = capsys.readouterr().out
    assert "embeddings of 07.png has values that are not finite" in said
    assert "run the command of the job again" not in said  # which would write the same again


def test_a_job_is_looked_at_without_a_checkpoint_and_run_with_one(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--status", str(tmp_path)]) == 2
    assert "--status and --verify take only the folder of a job" in capsys.readouterr().err
    assert main(["embed", command[1]]) == 2
    error = capsys.readouterr().err
    assert "the following arguments are required: FOLDER, --out (see `vitgraph embed" in error


# --- space ----------------------------------------------------------------------------------------


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_a_job_over_the_disks_space_writes_nothing(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**6, 10**6 - 4000, 4000))
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "about 4.6 kB are still to be written, and 4.0 kB are free" in error
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_stops_the_job_and_breaks_nothing(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    free = chain([10**9] * 3, repeat(10**5))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: Disk(10**9, 0, next(free)))
        assert main(command) == 2
    assert (
        "no space for a shard of 768 bytes and 1,048,576 beside it, 100,000 are free"
        in capsys.readouterr().err
    )
    done = written(out)
    assert len(done) == 2  # two are written at once: 0 and 1, or one of them and 2

    def fill_up(parts: Any, path: Path) -> None:
        path.write_bytes(b"a part of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("vitgraph.embedding.shard._write_npy", fill_up)
        assert main(command) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(int(path.name[:5]) for path in out.glob("*.npy")) == done
    assert [path.name for path in out.glob(".*") if "lock" not in path.name] == []
    assert main(command) == 0
    assert main(["embed", "--verify", str(out)]) == 0


def test_no_file_of_a_shard_that_failed_appears_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, write = threading.Event(), shard._write_npy

    def fill_up(parts: Any, path: Path) -> int:
        if ".first." in path.name:
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        assert failed.wait(10)
        time.sleep(0.05)  # the other file has failed, and its error is on its way
        return write(parts, path)

    rows = np.ones((3, 2), np.float32)
    row = Row("a.png", (1, 1, 3), {"first": rows, "second": rows})
    stats = ShardStats(shard=0, items=1, rows=1, seconds=0, worker="0/1", written=0, errors=[])
    monkeypatch.setattr(shard, "_write_npy", fill_up)
    with ThreadPoolExecutor(4) as pool:
        one, empty = (
            Shard(LocalFolder(tmp_path), 0, "npy", "none"),
            dict.fromkeys(row.arrays, rows[:0]),
        )
        with pytest.raises(OSError, match="No space left"):
            one.write([row], empty, stats, pool=pool)
        found = sorted(tmp_path.iterdir())
    assert sorted(tmp_path.iterdir()) == found
