"""What CI runs is what a contributor runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
BOUNDS_NOT_TESTED = {
    *("onnx", "onnxscript", "flash-attn-4", "gcsfs"),
    *("peft", "ipykernel", "ipywidgets", "jupyterlab"),
}
"""Packages of extras that no fast test imports, or that are tools of whoever runs notebooks."""
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def plan(*arguments: str) -> str:
    """The commands that make would run in a folder without an environment."""
    result = subprocess.run(
        ["make", "-n", "VENV=.venv-that-is-not-there", "ENGINES=.engines-not-there", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


@needs_make
def test_make_test_sets_up_lints_checks_types_and_runs_both_tiers() -> None:
    commands = plan("test")
    steps = [
        "-m venv",
        "--group test --group integrations --group lint --group docs",
        "ruff check .",
        "ruff format --check .",
        "-m mypy",
        'pytest -m "not gpu and not engines"',
        "pip install --quiet --no-deps --no-compile --requirement tests/engines/requirements.txt",
        'pytest -m "engines and not slow" --noconftest tests/engines',
    ]
    places = [commands.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


@needs_make
@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_installs_the_versions_of_the_constraints(target: str) -> None:
    project = [line for line in plan(target).splitlines() if '".[demo]"' in line]
    assert project
    assert all("--constraint constraints.txt" in line for line in project)


@needs_make
def test_make_oldest_tests_with_versions_of_its_own() -> None:
    commands = plan("oldest", "OLDEST=.oldest-not-there")
    (install,) = [line for line in commands.splitlines() if "--editable" in line]
    assert "--constraint constraints-oldest.txt" in install
    assert ".oldest-not-there/bin/python -m pytest" in commands


def test_make_oldest_takes_the_lower_bounds() -> None:
    project, _, _ = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")
    _, _, dependencies = project.partition("\ndependencies = [")
    bounds = dict(re.findall(r'"([\w-]+)>=([\w.]+)', dependencies))
    lines = (ROOT / "constraints-oldest.txt").read_text().lower().replace("_", "-").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = {name: bound for name, bound in bounds.items() if name not in BOUNDS_NOT_TESTED}
    assert {name: Version(pins[name]) for name in wanted} == {
        name: Version(bound) for name, bound in wanted.items()
    }


def test_linters_of_ci_are_those_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    (group,) = re.findall(r"^lint = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    pins = re.findall(r'"([^"]+)"', group)
    assert {pin.split("==")[0] for pin in pins} == {"ruff", "mypy", "basedpyright", "types-tqdm"}
    assert set(pins) <= set(constraints)


@needs_make
def test_make_demo_installs_no_test_tools() -> None:
    commands = plan("demo")
    assert '".[demo]"' in commands
    assert "--group" not in commands
    assert "vitgraph demo" in commands


@needs_make
def test_a_python_that_is_too_old_is_named() -> None:
    old = "import sys; sys.exit(sys.version_info < (3, 10))"
    assert old in plan("demo")


@needs_make
def test_make_family_runs_the_tests_that_name_the_family() -> None:
    assert 'pytest -m "not gpu and not engines" --family qwen3_vl ' in plan(
        "family", "NAME=qwen3_vl"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "others"),
    [("deepseek_vl", ["deepseek_vl_hybrid", "deepseek_vl2"]), ("intern_vit", ["qwen2_vl"])],
)
def test_the_tests_of_a_family_are_those_whose_ids_name_it(family: str, others: list[str]) -> None:
    files = ["tests/loading/test_layouts.py", "tests/loading/test_load_values.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--family", family, *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ids = re.findall(r"\[(.+)\]", run.stdout)
    assert any(family in one for one in ids)
    assert not [one for one in ids for other in others if other in one.split("-")]


@pytest.mark.slow
def test_a_family_that_is_none_is_answered_with_the_names() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--family", "qwen9"]
    run = subprocess.run([*command, __file__], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "--family qwen9: must be one of deepseek_ocr, deepseek_vl" in run.stderr


def test_ci_calls_make_test_and_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert script.read_text().splitlines()[-1] == "make test"


def test_contributing_names_each_target() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"^make (\w+)", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert set(named) == targets - {"help"}
