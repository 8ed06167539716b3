"""``vitgraph embed`` again: jobs go on where they were, with the files they began with."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weights
from encoders.base.vision_encoder import VisionEncoder
from tests.support.photographs import china, hopper
from tests.support.processes.own import start_stopped
from vitgraph.cli import main
from vitgraph.embedding.parquet_files import read_arrays
from vitgraph.embedding.storage import LocalFolder
from vitgraph.features import load_embeddings
from vitgraph.seeded import write_seeded_checkpoint

Command = list[str]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve different photographs."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        china().crop((20 * number, 0, 20 * number + 150, 150)).save(folder / f"{number:02d}.png")
    return folder


@pytest.fixture
def command(repo: Path, photos: Path, tmp_path: Path) -> Command:
    out = str(tmp_path / "out")
    return [
        "embed",
        str(repo),
        str(photos),
        "--out",
        out,
        "--shard-items",
        "3",
        "--no-progress",
    ]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were preprocessed."""
    names: list[str] = []
    plain = VisionEncoder.preprocess

    def noting(self: VisionEncoder, images: Any = (), *rest: Any, **limits: Any) -> Any:
        names.extend(Path(image).name for image in images if isinstance(image, str))
        return plain(self, images, *rest, **limits)

    monkeypatch.setattr(VisionEncoder, "preprocess", noting)
    return names


def shards(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("*_stats.json"))


def test_a_job_goes_on_with_the_shards_that_are_missing(
    command: Command, tmp_path: Path, encoded: list[str]
) -> None:
    assert main(command) == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "00002_stats.json").unlink()
    with pytest.raises(ValueError, match="1 of 4 shards missing, the first is 2"):
        load_embeddings(tmp_path / "out")
    encoded.clear()
    assert main(command) == 0
    assert encoded == ["06.png", "07.png", "08.png"]
    again, other = load_embeddings(tmp_path / "out")
    assert again == keys
    assert np.array_equal(other, matrix)
    for path in (tmp_path / "out").iterdir():
        rewritten = path.stat().st_mtime_ns != times[path.name]
        assert rewritten == path.name.startswith("00002")


def test_a_finished_job_loads_no_encoder(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command) == 0

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the encoder was loaded")

    monkeypatch.setattr(weights, "load_encoder", refuse)
    capsys.readouterr()
    assert main(command) == 0
    assert "12 of 12 files in 4 shards" in capsys.readouterr().out


def test_bad_files_are_reported_again_when_a_job_is_done(
    command: Command, photos: Path, tmp_path: Path
) -> None:
    (photos / "04.png").write_text("no image")
    assert [main(command), main(command)] == [3, 3]
    assert "04.png" in (tmp_path / "out" / "errors.csv").read_text()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--pool", "max"], "begun with pool mean, now it is max"),
        (["--normalize"], "begun with normalize False, now it is True"),
        (["--max-pixels", "90000"], "begun with max_pixels None, now it is 90000"),
        (["--dtype", "float32"], "begun with dtype bfloat16, now it is float32"),
        (["--format", "safetensors"], "begun with format npy, now it is safetensors"),
        (["--out-dtype", "float16"], "begun with out_dtype float32, now it is float16"),
        (["--shard-items", "4"], "begun with items per shard 3, now it is 4"),
    ],
)
def test_other_settings_are_refused(
    command: Command, capsys: pytest.CaptureFixture[str], changed: list[str], message: str
) -> None:
    assert main(command) == 0
    assert main([*command, *changed]) == 2
    assert message in capsys.readouterr().err


def test_the_stored_dtype_may_be_named(command: Command) -> None:
    assert main(command) == 0
    assert main([*command, "--dtype", "bfloat16"]) == 0


def test_a_folder_that_grows_or_shrinks_does_not_change_the_job(
    command: Command, photos: Path, tmp_path: Path
) -> None:
    assert main(command) == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    (tmp_path / "out" / "00000_stats.json").unlink()
    shutil.copy(photos / "00.png", photos / "00a.png")
    (photos / "11.png").unlink()
    assert main(command) == 0
    again, other = load_embeddings(tmp_path / "out")
    assert again == keys
    assert np.array_equal(other, matrix)
    (tmp_path / "out" / "00003_stats.json").unlink()
    assert main(command) == 3
    assert "11.png" in (tmp_path / "out" / "errors.csv").read_text()


def test_a_file_that_changed_since_it_was_listed_is_an_error(
    command: Command, photos: Path, tmp_path: Path
) -> None:
    assert main(command) == 0
    (tmp_path / "out" / "00001_stats.json").unlink()
    shutil.copy(photos / "00.png", photos / "04.png")
    assert main(command) == 3
    table = (tmp_path / "out" / "errors.csv").read_text()
    assert "04.png: has changed since the job listed it" in table
    assert "04.png" not in load_embeddings(tmp_path / "out")[0]


def test_weights_that_changed_on_disk_are_refused(
    command: Command, repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    write_seeded_checkpoint(repo, "qwen3_vl", width=64, seed=1)
    assert main(command) == 2
    assert "was begun with commit files" in capsys.readouterr().err


# --- interruption ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "chosen"),
    [
        (signal.SIGKILL, []),
        (signal.SIGINT, []),
        (signal.SIGKILL, ["--format", "parquet", "--pool", "none"]),
    ],
)
def test_a_job_that_is_stopped_goes_on_and_every_file_is_whole(
    command: Command, photos: Path, tmp_path: Path, sign: signal.Signals, chosen: list[str]
) -> None:
    if chosen:
        pytest.importorskip("pyarrow")
    command = [*command, "--dtype", "float32", *chosen]
    for number in range(12, 90):
        hopper().resize((300 + number, 300)).save(photos / f"{number}.jpg")
    out = tmp_path / "out"
    process = start_stopped(command, 3, sign=sign)  # after the manifest and two shards
    process.join()
    assert process.exitcode == (-9 if sign == signal.SIGKILL else 130)
    assert len(shards(out)) == 2
    for path in out.glob("*.npy"):
        assert np.load(path).shape == (3, 96)
    for path in out.glob("*.parquet"):
        assert read_arrays(path)["pooler_output"].shape[1] == 96
    assert main(command) == 0
    assert main(["embed", "--verify", str(out)]) == 0
    keys, matrix = load_embeddings(out)
    assert keys == sorted(path.name for path in photos.iterdir())
    whole = [*command]
    whole[whole.index(str(out))] = str(tmp_path / "whole")
    assert main(whole) == 0
    for one, other in zip(matrix, load_embeddings(tmp_path / "whole")[1], strict=True):
        assert np.allclose(one, other, atol=1e-5)


def test_a_job_that_is_stopped_right_after_its_manifest_goes_on(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LocalFolder.create

    def stopped(self: LocalFolder, name: str, content: bytes) -> bool:
        plain(self, name, content)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFolder, "create", stopped)
    assert main(command) == 130
    monkeypatch.undo()
    assert main(command) == 0
    assert len(load_embeddings(tmp_path / "out")[0]) == 12


def test_leftovers_of_a_killed_job_are_no_obstacle(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".00000.npy.123.abcd.tmp").write_bytes(b"half")
    assert main(command) == 0
    assert len(load_embeddings(out)[0]) == 12


def test_a_shard_that_another_worker_finished_is_left_alone(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command) == 0
    out = tmp_path / "out"
    kept = {path.name: path.read_bytes() for path in out.glob("00001*")}
    for name in kept:
        (out / name).unlink()
    from vitgraph.embedding.job import Job

    plain: Callable[..., None] = Job._write_shard

    def finished_meanwhile(self: Job, number: int, *rest: Any) -> None:
        for name, content in kept.items():
            (out / name).write_bytes(content)
        times = [(out / name).stat().st_mtime_ns for name in kept]
        plain(self, number, *rest)
        assert [(out / name).stat().st_mtime_ns for name in kept] == times

    monkeypatch.setattr(Job, "_write_shard", finished_meanwhile)
    assert main(command) == 0
    assert len(load_embeddings(out)[0]) == 12
