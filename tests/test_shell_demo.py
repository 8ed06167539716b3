"""``make demo``: every family, from a checkpoint on disk to a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from encoders.inputs import to_rgb
from vitgraph.demo import FAMILIES, panned_clip, run_demo, sample_photographs


@pytest.mark.slow
def test_demo_encodes_photographs_and_a_clip_with_every_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = run_demo(tmp_path / "demo")
    assert picture == tmp_path / "demo" / "feature_maps.png"
    with Image.open(picture) as image:
        assert image.size[0] > 1000
    lines = capsys.readouterr().out.splitlines()
    for title in FAMILIES:
        rows = [line.split() for line in lines if line.startswith(f"{title} ")]
        assert [row[1] for row in rows] == ["pavilion", "dahlia", "portrait", "pan.mp4"]
        assert all(int(row[-1]) >= 0 for row in rows)


def test_samples_are_photographs_not_noise() -> None:
    for name, path in sample_photographs().items():
        pixels = to_rgb(path).float()
        assert min(pixels.shape[1:]) > 400, name
        # Neighbouring pixels of a photograph are alike; those of noise differ by 85 of 255.
        assert (pixels[:, :, 1:] - pixels[:, :, :-1]).abs().mean() < 20, name


def test_clip_pans_from_the_left_edge_to_the_right() -> None:
    photograph = torch.arange(64, dtype=torch.uint8).expand(3, 40, 64)
    clip = panned_clip(photograph, frames=5, side=32)
    assert clip.shape == (5, 3, 32, 32)
    assert clip[:, 0, 0, 0].tolist() == [0, 8, 16, 24, 32]


def test_missing_sample_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitgraph.demo.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"'vitgraph\[demo\]', or in a clone pip install '\.\[demo\]'"
    ):
        sample_photographs()


def test_demo_without_matplotlib_says_so_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"vitgraph\[plots\]"):
        run_demo(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()
