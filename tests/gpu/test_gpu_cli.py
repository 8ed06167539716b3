"""``vitgraph encode --graph`` on a GPU: real graphs, and the features of a run without."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.gpu.gpu_towers import NEEDS_CUDA
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
