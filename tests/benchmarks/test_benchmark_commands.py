"""Every benchmark starts from the root of a clone, as the documents print its command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS_AN_ENGINE = {"benchmarks.dynamo"}  # its first imports are of ai-dynamo, or of a copy of it


def commands() -> list[str]:
    """Dotted names of the modules of ``benchmarks`` that run as ``python -m``."""
    files = [file for file in (ROOT / "benchmarks").rglob("*.py") if "__main__" in file.read_text()]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return sorted(names - NEEDS_AN_ENGINE - {"benchmarks.__main__"})


def test_every_benchmark_imports_from_the_root_of_a_clone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    imports = "\n".join(f"import {name}" for name in [*commands(), "benchmarks.speed"])
    run = subprocess.run(
        [sys.executable, "-c", imports], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
