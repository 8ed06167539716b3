"""The benchmark of CLIP, DINO, C-RADIO and SAM 3 runs without a GPU on tiny towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import image_towers

TOWERS = ["CLIP-B/16", "DINOv2-B/14", "DINOv3-B/16", "C-RADIOv4-H", "SAM 3"]


@pytest.mark.slow
def test_image_towers_are_measured_beside_transformers_and_timm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    command = ["--tiny", "--towers", *TOWERS, "--batches", "1", "2", "--runs", "1", "--no-compile"]
    image_towers.main([*command, "--json", str(path)])
    towers = json.loads(path.read_text())["towers"]
    assert [tower["tower"] for tower in towers] == TOWERS
    for tower in towers:
        assert [row["images"] for row in tower["workloads"]] == [1, 2]
        for row in tower["workloads"]:
            timm = set() if tower["tower"] == "SAM 3" else {"timm"}
            assert set(row["ms"]) == {"graphs", "transformers", *timm}
    capsys.readouterr()
    image_towers.main(["--table", str(path)])
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * len(TOWERS)
