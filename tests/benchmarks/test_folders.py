"""The benchmark of folders runs without a GPU on tiny towers, beside other libraries."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import folders


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # no processor file beside the weights
def test_jobs_over_folders_are_measured_beside_other_libraries(tmp_path: Path) -> None:
    path = tmp_path / "folders.json"
    towers = ["SigLIP2-B/16", "DINOv3-L/16 at 512"]
    command = ["--tiny", "--items", "5", "--repeats", "1", "--workers", "1", "--batch", "4"]
    folders.main([*command, "--towers", *towers, "--json", str(path)])
    rows = json.loads(path.read_text())["towers"]
    assert [row["tower"] for row in rows] == towers
    for row in rows:
        found = {"replays", "decoding", "timm, DataLoader", "vitgraph embed"}
        installed = {"sentence-transformers"} if find_spec("sentence_transformers") else set()
        assert set(row["images per second"]) == found | installed
        assert row["over the slower"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # no processor file beside the weights
def test_one_library_per_tower_is_the_first_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "folders.json"
    command = ["--tiny", "--items", "3", "--repeats", "1", "--workers", "1", "--no-compile"]
    command += ["--peers", "open_clip", "timm", "sentence_transformers", "--most-peers", "1"]
    folders.main([*command, "--towers", "CLIP-L/14-336", "--json", str(path)])
    (row,) = json.loads(path.read_text())["towers"]
    found = {"replays", "decoding", "timm, DataLoader", "vitgraph embed"}
    assert set(row["images per second"]) == found
