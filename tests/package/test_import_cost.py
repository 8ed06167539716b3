"""The library is cheap to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys, torch
before = set(sys.modules)
import encoders
print(*sorted({name.partition(".")[0] for name in sys.modules.keys() - before}))
"""


@pytest.mark.slow
def test_importing_encoders_adds_einops_alone_to_torch() -> None:
    command, root = [sys.executable, "-c", CODE], Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)
    assert run.stdout.split() == ["einops", "encoders"]
