"""``vitgraph embed`` as people first try it: its device, a few images, and a summary."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from encoders.streams.progress import Progress
from tests.support.commands.command_line import Cli, refusal
from tests.support.photographs import china
from vitgraph.features import load_embeddings

Command = list[str]


@pytest.mark.parametrize("chosen", [(), ("--device", "auto")])
def test_commands_run_on_the_gpu_where_there_is_one(
    command: Command,
    cli: Cli,
    photo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: tuple[str, ...],
) -> None:
    assert cli(*command).code == 0
    # The meta device stands for a GPU: torch knows it, and nothing can be computed on it.
    monkeypatch.setattr("vitgraph.devices.default_device", lambda: torch.device("meta"))
    encode = ("encode", command[1], photo, "--out", tmp_path / "a.safetensors")
    again = (*command[:4], tmp_path / "other", *command[5:])
    for each in (encode, again, ("search", tmp_path / "out", photo)):
        assert "cannot compute on it here" in refusal(cli(*each, *chosen))
        assert cli(*each, "--device", "cpu").code == 0


def test_commands_say_on_which_device_they_ran(
    command: Command, cli: Cli, photo: Path, tmp_path: Path
) -> None:
    assert "encodes on cpu" in cli(*command, "--device", "cpu").out
    encode = ("encode", command[1], photo, "--out", tmp_path / "a.safetensors")
    assert "encoded on cpu" in cli(*encode, "--device", "cpu").out
    found = cli("search", tmp_path / "out", photo, "--device", "cpu").out
    assert ["device", "cpu"] in [line.split() for line in found.splitlines()]


def test_a_limit_takes_the_first_images_and_is_kept(
    command: Command, cli: Cli, tmp_path: Path
) -> None:
    assert cli(*command, "--limit", 3).code == 0
    assert load_embeddings(tmp_path / "out")[0] == ["00.png", "01.png", "02.png"]
    assert "begun with limit 3, now it is None" in refusal(cli(*command))
    assert "--limit 0: must be at least 1" in refusal(cli(*command, "--limit", 0))


def test_a_summary_for_programs_is_all_of_standard_output(
    command: Command, cli: Cli, tmp_path: Path
) -> None:
    run = cli(*command, "--json")
    counts = {"files": 12, "rows": 12, "errors": 0, "shards": 6, "missing_shards": 0}
    summary = {"folder": str(tmp_path / "out"), **counts, "exit_code": 0}
    assert json.loads(run.out) == summary
    assert "writes 12 vectors" in run.err
    status = json.loads(cli("embed", "--status", tmp_path / "out", "--json").out)
    assert status == {**summary, "done": 12}
    (tmp_path / "out" / "00000.npy").unlink()
    run = cli("embed", "--verify", tmp_path / "out", "--json")
    assert run.code == 1
    assert "00000.npy is missing" in json.loads(run.out)["faults"][0]
    assert "--json" in refusal(cli(*command[:3], "--plan", "--json"))


def test_lines_of_progress_say_how_long_still(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((0.0, 10.0, 30.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    with Progress(total=6, visible=True, per_line=2) as progress:
        for _ in range(4):
            progress.update()
        first, second = capsys.readouterr().err.splitlines()
        progress.visible = False
    assert "00:20 left" in first
    assert "00:15 left" in second


@pytest.mark.filterwarnings("always")
def test_the_listing_warns_of_an_image_of_very_many_tokens(
    command: Command, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitgraph.embedding.large_images.MOST_TOKENS", 20)
    monkeypatch.setattr("vitgraph.embedding.job.MOST_TOKENS", 20)
    (tmp_path / "large").mkdir()
    china().crop((0, 0, 64, 64)).save(tmp_path / "large" / "a.png")
    china().crop((0, 0, 256, 192)).save(tmp_path / "large" / "b.png")
    command[2] = str(tmp_path / "large")
    run = cli(*command, "--min-pixels", 4096, "--limit", 1)
    assert (run.code, run.err) == (0, "")
    command[4] = str(tmp_path / "other")
    run = cli(*command, "--min-pixels", 4096)
    (warning,) = run.err.splitlines()
    assert warning.startswith("vitgraph: warning: b.png: makes 48 tokens, more than 20, ")
    assert "--max-pixels" in warning


@pytest.mark.filterwarnings("always")
def test_large_images_of_tables_are_warned_of_when_decoded(
    command: Command, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr("vitgraph.embedding.large_images.MOST_TOKENS", 20)
    monkeypatch.setattr("vitgraph.embedding.job.MOST_TOKENS", 20)
    photograph = io.BytesIO()
    china().crop((0, 0, 256, 192)).save(photograph, "PNG")
    table = arrow.table({"image": [photograph.getvalue()] * 3})
    parquet.write_table(table, tmp_path / "t.parquet")
    command[2] = str(tmp_path / "t.parquet")
    (warning,) = cli(*command, "--min-pixels", 4096).err.splitlines()
    assert "t.parquet/0: makes 48 tokens" in warning
