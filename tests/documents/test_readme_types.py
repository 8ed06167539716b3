"""The README's code passes two strict type checkers, and they know what its names are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KNOWN = """
from collections.abc import Iterator
from PIL import Image
from torch import Tensor
from typing_extensions import assert_type

a: vitgraph.Encoder = encoder
assert_type(inputs, vitgraph.VisionInputs)
assert_type(outputs, list[vitgraph.EncoderOutput])
assert_type(maps, list[dict[str, Tensor]])
assert_type(tokens, Tensor)
assert_type(metadata, dict[str, Tensor])
assert_type(output, vitgraph.EncoderOutput)
assert_type(encoder.forward_intermediates(inputs), dict[str, list[Tensor]])
assert_type(encoder.accelerated(), vitgraph.Encoder)

assert_type(output[1], Tensor)
whole = vitgraph.GraphedEncoder(encoder, outputs=["pooler_output"])(inputs)[0]
assert_type(whole, vitgraph.types.PartialOutput)
assert_type(vitgraph.GraphedEncoder(encoder).encoder, vitgraph.Encoder)
bare: vitgraph.GraphedEncoder = vitgraph.GraphedEncoder(encoder).capture()

for images in ("a.jpg", Image.open("a.jpg"), tokens):
    assert_type(encoder.preprocess(images), vitgraph.VisionInputs)
    assert_type(encoder.embed(images, pool="mean"), Tensor)
mixed = encoder.preprocess([Image.open("a.jpg"), "b.jpg", tokens])
assert_type(encoder.embed(["a.jpg"]), Tensor)
for videos in ("a.mp4", vitgraph.read_video("a.mp4"), [["1.jpg", "2.jpg"], "a.mp4"]):
    assert_type(encoder.preprocess(videos=videos), vitgraph.VisionInputs)
generated: vitgraph.types.ImagesLike = (f"{number}.jpg" for number in range(2))
assert_type(encoder.encode(generated), list[vitgraph.EncoderOutput])
pairs = [("a", "a.jpg"), ("b", "b.jpg")]
for key, out in encoder.encode_many(pairs, batch_tokens=512):
    assert_type(key, str)
    assert_type(out, vitgraph.EncoderOutput)
for number, vector in encoder.embed_many(enumerate(["a.jpg"]), pool="mean", on_error="raise"):
    assert_type(number, int)
    assert_type(vector, Tensor)
for out in encoder.encode_many(["a.jpg"]):
    assert_type(out, vitgraph.EncoderOutput)
for vector in encoder.embed_many(["a.jpg"], pool="cls", normalize=True):
    assert_type(vector, Tensor)
for kept in encoder.encode_many(pairs, on_error="keep"):
    assert_type(kept, tuple[str, vitgraph.EncoderOutput] | vitgraph.ItemError)
for kept_vector in encoder.embed_many(["a.jpg"], pool="max", on_error="keep"):
    assert_type(kept_vector, Tensor | vitgraph.ItemError)
for partial in vitgraph.GraphedEncoder(encoder).encode_many(["a.jpg"]):
    assert_type(partial, vitgraph.types.PartialOutput)
"""
"""What a checker has to know of the names in the README's blocks."""
FIELDS = """
assert_type(output["last_hidden_state"], Tensor)
assert_type(output["pooler_output"], Tensor)
assert_type(output["deepstack_features"], tuple[Tensor, ...])
assert_type(whole["pooler_output"], Tensor | None)
"""
"""What pyright knows of a field by its name; to mypy each key of a named tuple is any of them."""
MISTAKES = """
vitgraph.load_model  # type: ignore[attr-defined]
encoder.accelerated(kernels="quick")  # type: ignore[arg-type]
encoder.accelerated(precision="int8")  # type: ignore[arg-type]
encoder.embed(["a.jpg"], pool="average")  # type: ignore[arg-type]
encoder.embed(["a.jpg"], pool="none")  # type: ignore[arg-type]
encoder.encode(["a.jpg"], pool="mean")  # type: ignore[call-arg]
encoder.encode_many(["a.jpg"], pool="mean")  # type: ignore[call-overload]
encoder.encode_many(["a.jpg"], on_error="skip")  # type: ignore[call-overload]
vitgraph.attention_maps(encoder, ["a.jpg"], heads="some")  # type: ignore[arg-type]
vitgraph.GraphedEncoder(encoder, backend="graph")  # type: ignore[arg-type]
vitgraph.GraphedEncoder(encoder, on_overflow="drop")  # type: ignore[arg-type]
vitgraph.GraphedEncoder(encoder, outputs=[6])  # type: ignore[list-item]
vitgraph.load_encoder("a/b", fetch="all")  # type: ignore[arg-type]
vitgraph.load_encoder("a/b", dtype="bf16")  # type: ignore[arg-type]
vitgraph.EmbedBatch("a/b", pool="none")  # type: ignore[arg-type]
"""
"""Names and values that there are not, each an error to mypy: it reports a needless ignore."""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """All Python blocks of the README one after another, as one module."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 5
    path = tmp_path / "readme.py"
    path.write_text("\n".join([*blocks, KNOWN, MISTAKES]))
    return path


@pytest.mark.slow
def test_the_code_of_the_readme_passes_mypy_in_strict_mode(module: Path) -> None:
    config = ["--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *config, str(module)],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_code_of_the_readme_passes_pyright(module: Path) -> None:
    module.write_text(module.read_text() + FIELDS)
    config = {"include": [module.name], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (module.parent / "pyrightconfig.json").write_text(json.dumps(config))
    options = ["--project", str(module.parent), "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", *options], capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    found = [entry["message"] for entry in report["generalDiagnostics"]]
    assert (done.returncode, found) == (0, [])
