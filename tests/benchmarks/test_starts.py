"""The benchmark of starts, on a made-up GPU and a small tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import starts
from tests.support.graphs.cases import new_tower
from tests.support.graphs.fake_gpu import FakeGpu

BUDGETS = [16, 96, 200, 400]


def test_every_stage_of_a_tower_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeGpu()
    fake.install(monkeypatch)
    encoder = new_tower("qwen3_vl")

    def stage_of(tower: str, stage: str, folder: Path) -> dict[str, Any]:
        tables = starts.environment(folder, stage)["VITGRAPH_TABLES"]
        monkeypatch.setenv("VITGRAPH_TABLES", tables)
        return starts.measure(encoder, stage, budgets=BUDGETS, max_graphs=4)

    file = tmp_path / "starts.json"
    starts.main(["--towers", "Qwen3-VL-8B", "--json", str(file)], stage_of)
    rows = json.loads(file.read_text())["starts"]
    assert [row["stage"] for row in rows] == list(starts.STAGES)
    assert ["measure" in row["parts"] for row in rows] == [True, True, False, False]
    assert ["check" in row["parts"] for row in rows] == [False, False, True, True]
    assert [row["budgets"] for row in rows] == [4, 4, 4, 3]
    for row in rows:
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"], rel=0.01)
    assert rows[-1]["again_seconds"] > 0


def test_seconds_inside_another_part_count_once() -> None:
    parts = starts.Parts()
    inner = parts._counted(lambda: sum(range(200_000)), "inner")
    parts._counted(lambda: [inner(), inner()], "outer")()
    assert parts.seconds["outer"] < parts.seconds["inner"] / 2


@pytest.mark.parametrize("name", starts.TOWERS)
def test_towers_are_built_at_published_size(name: str) -> None:
    encoder = starts.build(starts.TOWERS[name], "meta")
    assert sum(weight.numel() for weight in encoder.parameters()) > 3e8
