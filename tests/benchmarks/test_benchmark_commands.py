"""Every benchmark starts from the root of a clone, as the documents print its command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS_AN_ENGINE = {"benchmarks.dynamo"}  # its first imports are of ai-dynamo, or of a copy of it
HELP = """
import runpy, sys
sys.argv = ["benchmarks", "--help"]
for name in {names}:
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, name
    else:
        raise AssertionError(f"{{name}} --help does not end")
"""


def commands() -> list[str]:
    """Dotted names of the modules and packages of ``benchmarks`` that run as ``python -m``."""
    files = [
        file
        for file in (ROOT / "benchmarks").rglob("*.py")
        if file.stem == "__main__" or 'if __name__ == "__main__"' in file.read_text()
    ]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return sorted({name.removesuffix(".__main__") for name in names} - NEEDS_AN_ENGINE)


@pytest.mark.slow
def test_every_benchmark_answers_help_from_the_root_of_a_clone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONWARNINGS"] = "ignore"  # runpy warns of a module that another one imported
    run = subprocess.run(
        [sys.executable, "-c", HELP.format(names=commands())],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("usage: ") == len(commands())
