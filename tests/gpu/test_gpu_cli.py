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
from weights import FAMILIES

pytestmark = NEEDS_CUDA
SEEDED = {
    family.name: next(name for name, small in family.facts.small.items() if small.title)
    for family in FAMILIES.values()
}


@pytest.mark.parametrize("family", FAMILIES)
def test_encode_through_graphs_gives_the_features_of_encode_without(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_seeded_checkpoint(tmp_path / "checkpoint", SEEDED[family])
    pixels = np.random.default_rng(0).integers(0, 256, (320, 260, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    common = ["encode", str(checkpoint), str(tmp_path / "photo.png"), "--dtype", "float32"]
    for name, options in (("plain", []), ("graphed", ["--graph", "--max-batch-size", "1"])):
        out = ["--device", "cuda", "--out", str(tmp_path / f"{name}.safetensors")]
        assert main([*common, *out, *options]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "there are no CUDA graphs" not in said.err
    assert re.search(r"^cudagraph: \d+ budgets of .* tokens in ", said.out, re.M)
    files = (tmp_path / f"{name}.safetensors" for name in ("plain", "graphed"))
    plain, graphed = (load_features(file).outputs[0] for file in files)
    for ours, theirs in zip(graphed[:2], plain[:2], strict=True):
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).norm() / theirs.norm()) <= 1e-5
