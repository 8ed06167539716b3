"""``vitgraph bench features`` and ``probe_blocks``: what can be read off each block of towers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import vitgraph
from tests.support.commands.command_line import Cli, refusal
from vitgraph.analysis.probes import interval
from vitgraph.seeded import write_seeded_checkpoint

SIZES = {"min_pixels": 4096, "max_pixels": 4096}
CLASSES = {"bright": 200, "dark": 40, "grey": 120}


def picture(level: int, seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(-30, 30, (64, 64, 3))
    return Image.fromarray((level + noise).astype(np.uint8))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three classes, which any tower tells apart by their brightness."""
    folder = tmp_path_factory.mktemp("data")
    for label, level in CLASSES.items():
        (folder / label).mkdir()
        for number in range(6):
            picture(level, number).save(folder / label / f"{number}.png")
    (folder / "bright" / "notes.md").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("repos")
    return [
        write_seeded_checkpoint(folder / name, "qwen3_vl", depth=depth, width=32, seed=depth)
        for name, depth in (("small", 2), ("large", 3))
    ]


def test_two_towers_are_compared_as_table_csv_json_and_plot(
    data: Path, repos: list[Path], cli: Cli, tmp_path: Path
) -> None:
    table, plot = tmp_path / "scores.csv", tmp_path / "scores.png"
    command = ("bench", "features", *repos, "--data", data, "--device", "cpu", "--folds", 3)
    command += ("--dtype", "float32", "--no-progress")
    run = cli(*command, "--csv", table, "--plot", plot, "--json")
    assert run.code == 0, run.err
    assert "skipped" in run.err or "left out" in run.err
    found = json.loads(run.out)
    assert {name: found["about"][name] for name in ("images", "classes", "folds", "seed")} == {
        "images": 18,
        "classes": 3,
        "folds": 3,
        "seed": 0,
    }
    assert [len(blocks) for blocks in found["scores"].values()] == [2, 3]
    for blocks in found["scores"].values():
        assert all(one["linear"]["value"] == 1 for one in blocks)
        assert all(one["linear"]["low"] < 0.9 for one in blocks)  # of only 18 images
    towers = [vitgraph.load_encoder(repo, dtype="float32", progress=False) for repo in repos]
    images = [str(path) for path in sorted(data.glob("*/*.png"))]
    cka = vitgraph.similarity_of_blocks(*towers, images, progress=False)
    assert torch.allclose(torch.tensor(found["cka"], dtype=torch.float64), cka, atol=1e-6)
    rows = [*csv.DictReader(table.read_text().splitlines())]
    assert len(rows) == 2 * 5 + 2 * 3
    assert float(rows[-1]["value"]) == pytest.approx(float(cka[-1, -1]), abs=1e-6)
    assert (rows[-1]["repo"], rows[-1]["other_block"]) == (str(repos[0]), "2")
    assert plot.stat().st_size > 10_000
    text = cli(*command, "--blocks", "-1", "--per-class", 4).out
    assert "12 images of 3 classes, 3 folds, 5 neighbours, seed 0; chance 0.333" in text
    assert text.count("1.000") >= 2


def test_a_probe_is_logistic_regression_on_means_of_patches() -> None:
    folder_seed = 3
    labels = [number % 2 for number in range(20)]
    images = [picture(110 + 6 * label, number) for number, label in enumerate(labels)]
    encoder = _tower()
    (scores,) = vitgraph.probe_blocks(
        encoder, images, labels, blocks=[-1], seed=folder_seed, progress=False, **SIZES
    )
    inputs = encoder.preprocess(images, **SIZES)
    (maps,) = encoder.forward_intermediates(inputs, indices=[-1], output_fmt="NCHW")["image"]
    rows = torch.stack([one.double().mean((0, 2, 3)) for one in maps]).detach().numpy()
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
    parts = StratifiedKFold(5, shuffle=True, random_state=folder_seed)
    names = [str(label) for label in labels]
    assert scores.probe.value == pytest.approx(cross_val_score(model, rows, names, cv=parts).mean())
    assert scores.block == len(encoder.paths["image"].blocks) - 1


def _tower() -> vitgraph.Encoder:
    from tests.support.towers.streams import tower

    return tower("qwen3_vl")


def test_intervals_are_those_of_wilson() -> None:
    assert interval(8, 10) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert interval(10, 10) == pytest.approx((1.0, 0.7225, 1.0), abs=1e-4)
    assert interval(0, 10)[:2] == (0, 0)


def test_labels_of_too_few_images_are_refused() -> None:
    images = [picture(100, number) for number in range(4)]
    for labels, message in (
        ("aabb", "class a: has 2 images, fewer than 5 folds"),
        ("aaaa", "there is 1 class"),
        ("aab", "3 labels for 4 images"),
    ):
        with pytest.raises(ValueError, match=message):
            vitgraph.probe_blocks(_tower(), images, [*labels], progress=False)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--folds", 7), "has 6 images, fewer than 7 folds"),
        (("--per-class", 0), "--per-class 0: must be positive"),
        (("--blocks", "x"), "--blocks x: must be numbers"),
        (("--csv", "no/such/file.csv"), "must be a file in a folder that exists"),
        (("--device", "x"), "--device x: must be"),
    ],
)
def test_mistakes_are_found_before_a_tower_is_loaded(
    extra: tuple[str, object], message: str, data: Path, repos: list[Path], cli: Cli
) -> None:
    assert message in refusal(cli("bench", "features", repos[0], "--data", data, *extra))


def test_images_outside_of_classes_and_repeated_repos_are_refused(
    data: Path, repos: list[Path], cli: Cli
) -> None:
    run = cli("bench", "features", repos[0], "--data", data / "bright")
    assert "lies in no subfolder" in refusal(run)
    run = cli("bench", "features", repos[0], repos[0], "--data", data)
    assert "is named twice" in refusal(run)
