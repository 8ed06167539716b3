"""Mistakes that torch, an encoder or a file written before shows; each is answered in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.commands.command_line import Cli, Run


def assert_one_line(run: Run, *parts: object) -> None:
    assert run.code == 2
    assert run.out == ""
    assert run.err.count("\n") == 1, run.err
    assert run.err.startswith("vitgraph: error: ")
    for part in parts:
        assert str(part) in run.err


def test_a_decompression_bomb_and_half_a_file_are_named(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "half.jpg"
    half.write_bytes(photo.read_bytes()[:-500])
    run = cli("encode", checkpoint, half, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, half, "damaged, truncated")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    run = cli("encode", checkpoint, photo, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, photo, "is larger than PIL opens")


def test_image_of_a_kind_that_has_no_rgb_form_is_named(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    grey = tmp_path / "depth.tiff"
    Image.new("F", (40, 30)).save(grey)
    run = cli("encode", checkpoint, photo, grey, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, f"{grey}: ", "mode F", "0..255")


def test_truncated_image_is_one_line_and_writes_nothing(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.png"
    cut.write_bytes(photo.read_bytes()[:2000])
    out = tmp_path / "f.safetensors"
    assert_one_line(cli("encode", checkpoint, photo, cut, "--out", out), cut)
    assert not out.exists()


def test_absent_cuda_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out = tmp_path / "f.safetensors"
    run = cli("encode", checkpoint, photo, "--out", out, "--device", "cuda")
    assert_one_line(run, "--device cuda", "use --device cpu")


@pytest.mark.parametrize("device", ["hpu", "mps", "xpu", "meta"])
def test_a_device_that_is_not_here_is_one_short_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path, device: str
) -> None:
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    out = tmp_path / "f.safetensors"
    run = cli("encode", checkpoint, photo, "--out", out, "--device", device)
    assert_one_line(run, f"--device {device}: ", "cpu")
    assert len(run.err) < 200, run.err


def test_plot_without_matplotlib_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ("--out", tmp_path / "f.safetensors", "--plot", tmp_path / "maps.png")
    assert_one_line(
        cli("encode", checkpoint, photo, *arguments),
        "plots need matplotlib: pip install 'matplotlib>=3.8'",
    )


def test_item_that_cannot_be_encoded_is_named(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    good, line = tmp_path / "good.png", tmp_path / "line.png"
    Image.new("RGB", (64, 64)).save(good)
    Image.new("RGB", (900, 2)).save(line)
    run = cli("encode", checkpoint, good, line, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, f"{line}: ", "200")
    assert "image 0" not in run.err


def test_option_of_another_family_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.safetensors"
    run = cli("encode", checkpoint, photo, "--out", out, "--max-tiles", 6)
    assert_one_line(run, "max_tiles=6", "max_pixels")


def test_video_without_av_is_one_line(
    cli: Cli, checkpoint: Path, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    run = cli("encode", checkpoint, "--video", clip, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, "reading video files needs PyAV: pip install 'av>=17.1'")


def test_what_is_no_features_file_is_never_written_over(
    cli: Cli, checkpoint: Path, photo: Path, clip: Path
) -> None:
    targets = (photo, clip, *checkpoint.iterdir())
    before = [path.read_bytes() for path in targets]
    for target in targets:
        run = cli("encode", checkpoint, photo, "--video", clip, "--out", target)
        assert_one_line(run, f"--out {target}", "not a features file", "another name")
    assert [path.read_bytes() for path in targets] == before


def test_picture_is_never_drawn_over_a_photograph(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    (tmp_path / "alias.png").symlink_to(photo)
    before = photo.read_bytes()
    for target in (photo, tmp_path / "alias.png"):
        out = tmp_path / "f.safetensors"
        run = cli("encode", checkpoint, photo, "--out", out, "--plot", target)
        assert_one_line(run, f"--plot {target}", photo, "another name")
    assert photo.read_bytes() == before


def test_features_and_picture_in_one_file_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    both, alias = tmp_path / "both.safetensors", tmp_path / "both.png"
    alias.symlink_to(both)
    run = cli("encode", checkpoint, photo, "--out", both, "--plot", alias)
    assert_one_line(run, f"--plot {alias}", "another name")


def test_debug_shows_the_traceback(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.safetensors"
    run = cli("encode", checkpoint, tmp_path / "nope.jpg", "--out", out, "--debug")
    assert run.code == 2
    assert "Traceback" in run.err
    assert run.err.splitlines()[-1].startswith("vitgraph: error: ")
