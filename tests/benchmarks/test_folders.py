"""The benchmark of folders runs without a GPU on tiny towers, beside other libraries."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folder_peers, folders

COMMAND = ["--tiny", "--repeats", "1", "--workers", "1", "--batch", "4"]
OURS = {"replays", "decoding", "vitgraph embed"}


def run(towers: list[str], path: Path, *more: str) -> list[dict[str, Any]]:
    """Return the rows that the benchmark writes."""
    folders.main([*COMMAND, *more, "--towers", *towers, "--json", str(path)])
    rows: list[dict[str, Any]] = json.loads(path.read_text())["towers"]
    assert [row["tower"] for row in rows] == towers
    return rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # no processor file beside the weights
def test_jobs_over_folders_are_measured_beside_other_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    towers, path = ["SigLIP2-B/16", "DINOv3-L/16 at 512"], tmp_path / "folders.json"
    for row in run(towers, path, "--items", "5"):
        rates = row["images per second"]
        named = {"timm": folder_peers.TIMM, "open_clip": folder_peers.OPEN_CLIP}
        expected = {
            label
            for peer, label in folder_peers.LABELS.items()
            if find_spec(peer) and row["tower"] in named.get(peer, towers)
        }
        assert set(rates) == OURS | expected
        assert set(row["seconds"]) >= {"tower", "capture", *expected}
        assert row["over the slower"] > 0
    capsys.readouterr()
    folders.main(["--table", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[-2:]] == [f"| {tower}" for tower in towers]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # no processor file beside the weights
def test_one_library_per_tower_is_the_first_that_has_it(tmp_path: Path) -> None:
    more = ["--items", "3", "--peers", "open_clip", "timm", "--most-peers", "1"]
    (row,) = run(["DINOv3-L/16 at 512"], tmp_path / "folders.json", *more)
    assert set(row["images per second"]) == OURS | {"timm, DataLoader"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # no processor file beside the weights
def test_a_library_that_fails_is_left_out_with_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(folder_peers.TIMM, "CLIP-L/14-336", "no_such_tower")
    more = ["--items", "3", "--peers", "timm"]
    (row,) = run(["CLIP-L/14-336"], tmp_path / "folders.json", *more)
    assert set(row["images per second"]) == OURS
    assert "CLIP-L/14-336, timm, DataLoader: left out" in capsys.readouterr().out
