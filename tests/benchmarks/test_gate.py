"""The gate from bytes to features runs without a GPU on tiny towers, part by part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gate

SMALL = ["--tiny", "--items", "9", "--runs", "1", "--repeats", "1", "--workers", "2"]
SMALL += ["--seconds", "0.01"]
TOWERS = ["Qwen3.5-0.8B", "SigLIP2-B/16"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # no processor file beside the weights
def test_every_part_adds_its_rows_to_the_result_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gate.json"
    command = [*SMALL, "--json", str(path), "--batch-tokens", "200"]
    for part in gate.PARTS:
        gate.main([*command, "--parts", part, "--towers", *TOWERS])
    result = json.loads(path.read_text())
    labels = ["1x448", "1x1024x768", "1x1920x1080", "8x448", "1x4032x3024"]
    rows = result["bytes"]["Qwen3.5-0.8B"]
    assert list(rows) == labels
    assert all(row["cpu_ms"] > 0 and row["tower_ms"] > 0 for row in rows.values())
    assert set(result["stream"]) == set(result["job"]) == set(TOWERS)
    for tower in TOWERS:
        assert result["stream"][tower]["memory over replays"] > 0
        assert result["stream"][tower]["files over the slower, cpu"] > 0
        job = result["job"][tower]
        assert min(job["ratio"], job["steady ratio"]) > 0
        assert set(job["steady images per second"]) == {"embed_many", "vitgraph embed"}
        assert min(job[f"seconds, {part}"]["vitgraph embed"] for part in ("start", "end")) > 0
    peers = result["peers"]["Qwen3.5-0.8B"]["images per second"]
    assert {"embed_many, cpu", "transformers, processor on cpu"} <= set(peers)
    assert result["memory"]["Qwen3.5-0.8B"]
    assert len(capsys.readouterr().out) < 12_000
