"""``vitgraph encode --graph`` on a GPU: real graphs, and the features of a run without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.gpu.gpu_towers import NEEDS_CUDA
from vitgraph import ActivationDataset
from vitgraph.cli import main
from vitgraph.features import load_features
from vitgraph.seeded import write_seeded_checkpoint

pytestmark = NEEDS_CUDA
SEEDED = ["intern_vit_300m", "qwen3_vl", "gemma4", "dinov2", "step3_vl", "deepseek_ocr"]
"""Tiles, patches, padded patches, rows before them, and two encoders of several paths."""


@pytest.mark.parametrize("name", SEEDED)
def test_encode_through_graphs_gives_the_features_of_encode_without(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_seeded_checkpoint(tmp_path / "checkpoint", name)
    pixels = np.random.default_rng(0).integers(0, 256, (320, 260, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    common = ["encode", str(checkpoint), str(tmp_path / "photo.png"), "--dtype", "float32"]
    for out_name, options in (("plain", []), ("graphed", ["--graph", "--max-batch-size", "1"])):
        out = ["--device", "cuda", "--out", str(tmp_path / f"{out_name}.safetensors")]
        assert main([*common, *out, *options]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "there are no CUDA graphs" not in said.err
    assert re.search(r"^cudagraph: \d+ budgets of .* tokens in ", said.out, re.M)
    files = (tmp_path / f"{out_name}.safetensors" for out_name in ("plain", "graphed"))
    plain, graphed = (load_features(file).outputs[0] for file in files)
    for ours, theirs in zip(graphed[:2], plain[:2], strict=True):
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).norm() / theirs.norm()) <= 1e-5


@pytest.mark.parametrize(("name", "rows"), [("dinov3", "prefix"), ("qwen3_vl", "patches")])
def test_a_job_of_activations_writes_what_a_cpu_writes(
    name: str, rows: Any, tmp_path: Path
) -> None:
    checkpoint = write_seeded_checkpoint(tmp_path / "checkpoint", name)
    (tmp_path / "photos").mkdir()
    chance = np.random.default_rng(0)
    for number in range(12):
        pixels = chance.integers(0, 256, (96 + 32 * (number % 3), 160, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    found = {}
    for device in ("cpu", "cuda"):
        command = ["embed", checkpoint, tmp_path / "photos", "--out", tmp_path / device]
        command += ["--pool", "none", "--fields", "blocks.0,blocks.1.mlp", "--sample", "7"]
        command += ["--dtype", "float32", "--batch-tokens", "200", "--shard-items", "5"]
        assert main([*map(str, command), "--device", device]) == 0
        batches = ActivationDataset(tmp_path / device, rows=rows).batches(10**6)
        (found[device],) = batches
    for ours, theirs in zip(found["cuda"].values(), found["cpu"].values(), strict=True):
        assert (ours.double() - theirs.double()).norm() <= 1e-4 * theirs.double().norm()
    assert torch.equal(found["cuda"]["position"], found["cpu"]["position"])
