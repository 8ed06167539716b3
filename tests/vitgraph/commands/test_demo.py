"""``make demo``: every family, from a checkpoint on disk to a picture."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoders.inputs import Video
from encoders.inputs.intake import to_rgb
from tests.oracles.versions import needs
from vitgraph.cli import main
from vitgraph.commands import demo_pictures
from vitgraph.commands.demo import check_demo
from vitgraph.commands.demo_pictures import (
    README_TOWERS,
    SEEDED_NAMES,
    draw_nearest,
    panned_clip,
    run_demo,
    sample_media,
    sample_photographs,
)
from vitgraph.commands.encode_items import Media
from vitgraph.seeded import write_seeded_checkpoint

ROOT = Path(__file__).parents[3]
README_PICTURE = ROOT / "docs" / "feature_maps.jpg"


@pytest.mark.slow
def test_demo_encodes_a_still_and_a_clip_with_every_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small picture: towers take most of the time, and those of photographs 1,000 rows."""
    monkeypatch.setattr("vitgraph.commands.demo_pictures.sample_media", small_photographs)
    picture = run_demo(tmp_path / "demo", every_family=True)
    assert picture == tmp_path / "demo" / "feature_maps.png"
    with Image.open(picture) as image:
        assert max(image.size) < 2000  # a screen
    lines = capsys.readouterr().out.splitlines()
    table = [re.split(" {2,}", line) for line in lines]
    for title in SEEDED_NAMES:
        rows = [cells for cells in table if cells[0] == title]
        assert [row[1] for row in rows] == ["pavilion", "pan.mp4"]
        assert all(int(row[-1]) >= 0 for row in rows)


def small_photographs(folder: Path) -> list[Media]:
    """A wide cut of a photograph, and a smaller clip: most take few tiles."""
    still, *_, clip = sample_media(folder)
    small = Media(still.name, still.still[:, :96, :144].contiguous())
    assert isinstance(clip.item, Video)
    frames = [frame[:, ::4, ::4].contiguous() for frame in clip.item.frames]
    return [small, Media(clip.name, replace(clip.item, frames=frames))]


@pytest.mark.slow
def test_picture_of_the_readme_is_drawn_again_as_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = {title: SEEDED_NAMES[title] for title in README_TOWERS}
    monkeypatch.setattr("vitgraph.commands.demo_pictures.SEEDED_NAMES", four)
    run_demo(tmp_path, every_family=True)
    drawn, committed = Image.open(tmp_path / "readme.jpg"), Image.open(README_PICTURE)
    assert drawn.size == committed.size
    photographs = (0, 0, drawn.width // 5, drawn.height)  # the maps may differ by signs
    difference = np.asarray(drawn.crop(photographs), float) - committed.crop(photographs)
    assert np.abs(difference).mean() < 4  # of 255


@needs("matplotlib", "3.11", "its text is larger, which moves the photographs by pixels")
def test_picture_of_nearest_patches_is_drawn_again_as_committed(tmp_path: Path) -> None:
    draw_nearest(tmp_path / "nearest_patches.jpg")
    drawn = Image.open(tmp_path / "nearest_patches.jpg")
    with Image.open(README_PICTURE.with_name("nearest_patches.jpg")) as committed:
        assert drawn.size == committed.size
        difference = np.asarray(drawn, float) - np.asarray(committed, float)
    assert np.abs(difference).mean() < 4  # of 255


def test_demo_draws_checkpoints_in_place_of_the_seeded_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitgraph.commands.demo_pictures.sample_media", small_media)
    tower = write_seeded_checkpoint(tmp_path / "my-tower", "qwen3_vl")
    assert main(["demo", str(tower), "--out", str(tmp_path / "demo")]) == 0
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["feature_maps.png"]
    assert "my-tower    dot " in capsys.readouterr().out


def test_demo_shows_each_of_four_towers_as_it_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitgraph.commands.demo_pictures.sample_media", small_media)
    shown, encode = [], demo_pictures.encode_items

    def encode_items(*arguments: Any) -> Any:
        shown.append(capsys.readouterr().out)
        return encode(*arguments)

    monkeypatch.setattr(demo_pictures, "encode_items", encode_items)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    assert shown[0] == ""
    for title, text in zip(README_TOWERS, [*shown[1:], capsys.readouterr().out], strict=True):
        assert title in text
    assert [path.name for path in tmp_path.iterdir()] == ["feature_maps.png"]


def test_demo_refuses_all_families_beside_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave out one of them"):
        check_demo(tmp_path, ["one/tower"], every_family=True)


def test_demo_refuses_two_checkpoints_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="whose last parts differ"):
        check_demo(tmp_path / "demo", ["one/tower", "other/tower"])


def test_demo_refuses_a_file_in_place_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    with pytest.raises(ValueError, match="demo: is a file; give a folder for the pictures"):
        check_demo(tmp_path / "demo", [])


def small_media(folder: Path) -> list[Media]:
    return [Media("dot", torch.full((3, 64, 64), 9, dtype=torch.uint8))]


def test_samples_are_photographs_not_noise() -> None:
    for name, path in sample_photographs().items():
        pixels = to_rgb(path).float()
        assert min(pixels.shape[1:]) > 400, name
        # Neighbouring pixels of a photograph are alike; those of noise differ by 85 of 255.
        assert (pixels[:, :, 1:] - pixels[:, :, :-1]).abs().mean() < 20, name


def test_clip_pans_from_the_left_edge_to_the_right() -> None:
    photograph = torch.arange(256 + 70).expand(3, 300, -1)
    clip = panned_clip(photograph)
    assert clip.shape == (8, 3, 256, 256)
    assert clip[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]


def test_missing_sample_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitgraph.commands.demo_pictures.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'matplotlib>=3\.8' 'scikit-learn>=1\.4'"):
        sample_photographs()


def test_demo_without_matplotlib_says_so_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'matplotlib>=3\.8'"):
        check_demo(tmp_path / "demo", [])
    assert not (tmp_path / "demo").exists()
