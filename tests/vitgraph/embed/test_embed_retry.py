"""``vitgraph embed --retry-errors``: only the images with errors are encoded again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands.command_line import Cli, refusal
from vitgraph.embedding.sources.reading import ImageReader
from vitgraph.features import load_embeddings

Command = list[str]
BROKEN = ("01.png", "02.png", "07.png")


@pytest.fixture
def damaged(command: Command, photos: Path, tmp_path: Path) -> Path:
    """The folder of ``command``, a copy in which three of twelve photographs are damaged."""
    folder = tmp_path / "damaged"
    shutil.copytree(photos, folder)
    for key in BROKEN:
        (folder / key).write_bytes(b"no image")
    command[2] = str(folder)
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the images that were read."""
    keys: list[str] = []
    plain = ImageReader.read

    def noting(self: ImageReader, file: Any) -> bytes:
        keys.append(file.key)
        return plain(self, file)

    monkeypatch.setattr(ImageReader, "read", noting)
    return keys


def mend(damaged: Path, photos: Path, keys: tuple[str, ...]) -> None:
    for key in keys:
        shutil.copy(photos / key, damaged / key)


@pytest.mark.parametrize("format", ["npy", "safetensors", "parquet"])
@pytest.mark.parametrize("pool", ["mean", "none"])
def test_mended_images_join_the_rows_of_the_others(
    command: Command, damaged: Path, photos: Path, tmp_path: Path, cli: Cli, format: str, pool: str
) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    command += ["--format", format, "--pool", pool]
    assert cli(*command).code == 3
    mend(damaged, photos, BROKEN)
    assert cli(*command).code == 3  # without the option, errors stay
    run = cli(*command, "--retry-errors")
    assert run.code == 0, run.err
    assert "tries 3 files with errors again" in run.out
    assert not (tmp_path / "out" / "errors.csv").exists()
    assert cli("embed", "--verify", tmp_path / "out").code == 0
    whole = [*command[:2], photos, "--out", tmp_path / "whole", *command[5:]]
    assert cli(*whole).code == 0
    keys, rows = load_embeddings(tmp_path / "out")
    wanted_keys, wanted = load_embeddings(tmp_path / "whole")
    assert keys == wanted_keys
    for row, wanted_row in zip(rows, wanted, strict=True):
        assert np.array_equal(row, wanted_row)


def test_only_images_with_errors_are_read_again(
    command: Command, damaged: Path, photos: Path, tmp_path: Path, cli: Cli, read: list[str]
) -> None:
    assert cli(*command).code == 3
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.npy")}
    mend(damaged, photos, ("02.png",))
    read.clear()
    assert cli(*command, "--retry-errors").code == 3
    assert read == list(BROKEN)
    assert load_embeddings(tmp_path / "out")[0] == [
        f"{number:02d}.png" for number in range(12) if number not in (1, 7)
    ]
    changed = [name for name, time in times.items() if time != _time(tmp_path / "out" / name)]
    assert sorted(changed) == ["00000.npy", "00001.npy", "00003.npy"]
    assert cli("embed", "--verify", tmp_path / "out").code == 0


def _time(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_each_worker_tries_its_own_errors_again(
    command: Command, damaged: Path, photos: Path, tmp_path: Path, cli: Cli, read: list[str]
) -> None:
    assert cli(*command).code == 3
    mend(damaged, photos, BROKEN)
    read.clear()
    assert cli(*command, "--retry-errors", "--shard", "1/2").code == 3  # shards 1, 3 and 5
    assert read == ["02.png", "07.png"]
    assert cli(*command, "--retry-errors", "--shard", "0/2").code == 0
    assert len(load_embeddings(tmp_path / "out")[0]) == 12


def test_a_worker_killed_while_it_tries_again_loses_no_row(
    command: Command,
    damaged: Path,
    photos: Path,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cli(*command).code == 3
    mend(damaged, photos, BROKEN)

    def full(*_: object) -> None:
        raise OSError(28, "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("vitgraph.embedding.shard._write_npy", full)
        assert cli(*command, "--retry-errors").code == 2
    assert "shards missing" in refusal(cli("search", tmp_path / "out", photos / "00.png"))
    # The shard was taken for one that nobody has written, and its mended file is another one.
    assert [cli(*command, "--retry-errors").code for _ in range(2)] == [3, 0]
    assert len(load_embeddings(tmp_path / "out")[0]) == 12
    assert cli("embed", "--verify", tmp_path / "out").code == 0


def test_features_for_vllm_are_tried_again(
    command: Command, damaged: Path, photos: Path, tmp_path: Path, cli: Cli
) -> None:
    command += ["--format", "vllm"]
    assert cli(*command).code == 3
    mend(damaged, photos, BROKEN)
    assert cli(*command, "--retry-errors").code == 0
    assert cli("embed", "--verify", tmp_path / "out").code == 0
    assert len(load_embeddings(tmp_path / "out")[0]) == 12
