"""``vitgraph bench accuracy``, and the benchmark of products in fp8, on tiny towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import fp8
from encoders.base.tile_encoder import TileEncoder
from tests.support.accelerated.cases import fresh, grids_for
from tests.support.commands.command_line import Cli, refusal
from vitgraph.commands.bench_accuracy import errors


def tile_tower() -> TileEncoder:
    """A small tower in bfloat16, for the tiles of ``grids_for``."""
    encoder = fresh("intern_vit_300m", torch.bfloat16)
    assert isinstance(encoder, TileEncoder)
    return encoder.at(2 * encoder.config.patch_size)


def test_errors_are_those_of_tokens() -> None:
    truth = torch.eye(4)
    ours = truth.clone()
    ours[0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    found = errors(ours, truth)
    assert found["relative_l2"] == pytest.approx((2 / 4) ** 0.5)
    assert (found["lowest_cosine"], found["near"]) == (0.0, 0.75)


def test_accuracy_compares_a_checkpoint_with_float32(
    cli: Cli, checkpoint: Path, photo: Path
) -> None:
    run = cli("bench", "accuracy", checkpoint, photo, "--device", "cpu", "--json")
    rows = json.loads(run.out)
    assert {row["form"] for row in rows} == {"reference, bfloat16"}
    assert {row["field"] for row in rows} == {"last_hidden_state", "pooler_output"}
    assert all(1e-4 < row["relative_l2"] < 0.05 and row["near"] == 1.0 for row in rows)
    text = cli("bench", "accuracy", checkpoint, photo, "--device", "cpu").out
    assert "relative L2" in text
    assert "reference, bfloat16" in text


def test_accuracy_refuses_a_missing_photo(cli: Cli, checkpoint: Path) -> None:
    assert "nowhere.jpg" in refusal(cli("bench", "accuracy", checkpoint, "nowhere.jpg"))


@pytest.mark.slow
def test_rounded_products_show_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tile_tower()
    grids = grids_for("intern_vit_300m")
    torch.manual_seed(0)
    noise = (fp8.random_pixels(encoder, grids), grids)
    monkeypatch.setattr(fp8, "photographs", lambda encoder: noise)
    with torch.no_grad():
        fp8.fill_scales(encoder)
        rows = fp8.measure_errors(encoder, grids)
    forms = ["bf16", *(f"rounded, {remedy}" for remedy in fp8.REMEDIES)]
    assert len(rows) == 2 * len(forms) * 2 * 2
    plain, rounded, *_, kept = (
        max(
            row["relative_l2"]
            for row in rows
            if (row["precision"], row["weights"]) == (form, "outliers")
        )
        for form in forms
    )
    assert 2 * plain < rounded < 0.5
    assert kept < rounded / 2


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
def test_the_speed_of_fp8_is_measured_beside_bfloat16() -> None:
    encoder = tile_tower()
    with torch.no_grad():
        row = fp8.measure_speed("tiny", encoder, grids_for("intern_vit_300m"), 1)
    assert row["ms"].keys() == {"bf16", "fp8"}
    assert {one["step"] for one in row["products"]} == {"qkv", "proj", "mlp"}
