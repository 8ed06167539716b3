"""The benchmark of CLIP, DINO, C-RADIO and SAM 3 runs without a GPU on tiny towers."""

from __future__ import annotations

import argparse
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import image_towers

TOWERS = ["CLIP-B/16", "DINOv2-B/14", "DINOv3-B/16", "C-RADIOv4-H", "SAM 3"]


@pytest.mark.slow
def test_image_towers_are_measured_beside_transformers_and_timm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    command = ["--tiny", "--towers", *TOWERS, "--batches", "1", "2", "--runs", "1", "--compiled"]
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


@pytest.mark.slow
def test_compiled_towers_have_their_mode_and_end_with_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []

    def compile_nothing(module: Any, *, mode: str, dynamic: bool) -> Any:
        modes.append(mode)
        monkeypatch.setattr(image_towers, "is_late", lambda options, what: len(modes) > 1)
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    path = tmp_path / "rows.json"
    command = ["--tiny", "--batches", "1", "2", "3", "--runs", "1", "--others", "timm"]
    image_towers.main([*command, "--towers", "DINOv2-B/14", "SAM 3", "--json", str(path)])
    assert modes == ["reduce-overhead", "default"]
    (tower,) = json.loads(path.read_text())["towers"]
    assert [row["mode"] for row in tower["workloads"]] == modes
    assert all("timm, compiled" in row["ms"] for row in tower["workloads"])
    capsys.readouterr()
    image_towers.main(["--table", str(path)])
    assert "(timm, `default`)" in capsys.readouterr().out
    monkeypatch.undo()
    image_towers.main([*command, "--towers", "SAM 3", "--seconds", "-1"])
    assert "SAM 3: left out, -1 s are over" in capsys.readouterr().out


def test_a_workload_takes_the_place_of_the_same_one_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    old, new = {"gpu": "NVIDIA H100", "commit": "a"}, {"gpu": "NVIDIA H100", "commit": "b"}
    for images in (256, 1):
        image_towers.add_row(path, old, "CLIP-L/14", {"images": images, "ms": {"graphs": 2.0}})
    image_towers.add_row(path, old, "DINOv2-B/14", {"images": 1, "ms": {"graphs": 3.0}})
    image_towers.add_row(path, new, "CLIP-L/14", {"images": 1, "ms": {"graphs": 1.0}})
    body = json.loads(path.read_text())
    assert body["about"] == old
    assert [tower["tower"] for tower in body["towers"]] == ["CLIP-L/14", "DINOv2-B/14"]
    assert body["towers"][0]["workloads"] == [
        {"images": 1, "ms": {"graphs": 1.0}, "commit": "b"},
        {"images": 256, "ms": {"graphs": 2.0}},
    ]
    with pytest.raises(ValueError, match=r"has rows of NVIDIA H100, and this is NVIDIA H200"):
        image_towers.add_row(path, {**new, "gpu": "NVIDIA H200"}, "CLIP-L/14", {"images": 1})


def test_a_process_that_times_is_alone_and_those_that_compile_are_not(tmp_path: Path) -> None:
    options = argparse.Namespace(turns=tmp_path / "turns")

    def others_wait() -> bool:
        with options.turns.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    with image_towers.turn(options, alone=True):
        assert others_wait()
    with image_towers.turn(options, alone=False):
        assert not others_wait()
    assert not others_wait()
