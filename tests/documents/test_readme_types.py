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
"""
"""What a checker has to know of the names in the README's blocks."""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """All Python blocks of the README one after another, as one module."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 6
    path = tmp_path / "readme.py"
    path.write_text("\n".join([*blocks, KNOWN]))
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
    pytest.importorskip("basedpyright")
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
