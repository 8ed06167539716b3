"""The command line with encoders of several input paths: encoding, plots and graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitgraph.cli import main
from vitgraph.features import load_features
from vitgraph.seeded import write_seeded_checkpoint
from weights import FAMILIES, load_encoder


def checkpoint(folder: Path, family: str) -> Path:
    small = next(name for name, one in FAMILIES[family].facts.small.items() if one.title)
    return write_seeded_checkpoint(folder / "checkpoint", small, width=64)


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    """One that is cut into tiles, and one that is not."""
    draw = np.random.default_rng(0)
    paths = []
    for name, shape in (("large", (600, 900, 3)), ("small", (200, 220, 3))):
        path = tmp_path / f"{name}.png"
        Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(path)
        paths.append(str(path))
    return paths


def encode(folder: Path, *arguments: str) -> list[torch.Tensor]:
    out = folder / "features.safetensors"
    assert main(["encode", *arguments, "--dtype", "float32", "--out", str(out)]) == 0
    outputs = load_features(out).outputs
    return [output.pooler_output for output in outputs if output.pooler_output is not None]


def test_encode_writes_items_of_both_paths(tmp_path: Path, images: list[str]) -> None:
    folder = checkpoint(tmp_path, "step3_vl")
    written = encode(tmp_path, str(folder), *images)
    expected = load_encoder(folder, dtype=torch.float32, progress=False).encode(images)
    assert [len(tokens) for tokens in written] == [2 * 81 + 169, 169]
    for ours, output in zip(written, expected, strict=True):
        torch.testing.assert_close(ours, output.pooler_output)
    items = load_features(tmp_path / "features.safetensors").items
    assert [item.tiles for item in items] == [(2, 1, True), (1, 1, False)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["step3_vl", "lfm2_vl"])
def test_graphs_of_several_paths_write_what_encode_without_writes(
    tmp_path: Path, images: list[str], family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiles of the larger image fit the budgets of a trial."""
    with Image.open(images[0]) as large:
        size = (370, 370) if family == "molmo2" else (760, 300)  # every image of it has a crop
        large.crop((0, 0, *size)).save(images[0])
    folder = str(checkpoint(tmp_path, family))
    plot = tmp_path / "maps.png"
    plain = encode(tmp_path, folder, *images, "--plot", str(plot))
    assert plot.stat().st_size > 0
    graphed = encode(tmp_path, folder, *images, "--graph")
    for one, other in zip(plain, graphed, strict=True):
        assert float((one - other).norm() / other.norm()) <= 1e-5
    assert ", 0 eagerly\n" in capsys.readouterr().out


def test_budgets_for_several_paths_are_refused_with_the_fix(
    tmp_path: Path, images: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(tmp_path, "step3_vl")
    out = tmp_path / "features.safetensors"
    assert (
        main(["encode", str(folder), *images, "--out", str(out), "--budgets", "512", "--graph"])
        == 2
    )
    said = "Step3VLEncoder has the paths image, tiles, whose items differ in size; leave --budgets"
    assert said in capsys.readouterr().err


def test_a_video_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vitgraph.video import write_video

    folder, clip = checkpoint(tmp_path, "step3_vl"), tmp_path / "clip.mp4"
    write_video(clip, torch.zeros(4, 3, 64, 64, dtype=torch.uint8), 4)
    arguments = [
        "encode",
        str(folder),
        "--video",
        str(clip),
        "--out",
        str(tmp_path / "f.safetensors"),
    ]
    assert main(arguments) == 2
    assert "takes only images: pass the frames of a video as images" in capsys.readouterr().err
