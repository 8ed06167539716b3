"""The benchmark of activations runs without a GPU on tiny towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import activations


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # no processor file beside the weights
def test_shards_of_activations_are_measured_beside_tower_and_disk(tmp_path: Path) -> None:
    path = tmp_path / "activations.json"
    towers = ["Qwen3-VL-2B"]
    command = ["--tiny", "--items", "5", "--repeats", "1", "--workers", "1", "--sample", "4"]
    activations.main([*command, "--towers", *towers, "--json", str(path)])
    rows = json.loads(path.read_text())["towers"]
    assert [row["tower"] for row in rows] == towers
    for row in rows:
        assert set(row["images per second"]) == {"tower", "with blocks", "stream"}
        assert set(row["jobs"]) == {"sample of 4", "all patches"}
        for job in row["jobs"].values():
            assert min(job["whole over the slower"], job["steady over the slower"]) > 0
        assert row["jobs"]["sample of 4"]["bytes per image"] > 4 * 2 * 64
