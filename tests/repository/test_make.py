"""What CI runs is what a contributor runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from tests.conftest import pytest_collection_modifyitems
from tests.support.families.one_family import family_of
from weights import FAMILIES

ROOT = Path(__file__).parents[2]
RAISED = {"huggingface-hub", "safetensors", "pillow"}
"""Packages of which transformers or pillow-heif need newer versions than the library does."""
BOUNDS_NOT_TESTED = {
    *("onnx", "onnxscript", "flash-attn-4", "gcsfs", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg"),
    *("peft", "ipykernel", "ipywidgets", "jupyterlab", "sentencepiece", "protobuf"),
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
def test_make_oldest_installs_the_lower_bounds_of_the_library() -> None:
    lines = plan("oldest", "OLDEST=.oldest-not-there").splitlines()
    (install,) = [line for line in lines if "--no-deps" in line]
    command = install.partition("--no-deps")[2]
    echoed = subprocess.run(
        ["sh", "-c", f"echo {command}"], cwd=ROOT, capture_output=True, text=True
    )
    asked = dict(word.split("==") for word in echoed.stdout.split())
    assert asked == lower_bounds("dependencies = [", "]")
    assert set(asked) > RAISED


def lower_bounds(begin: str, end: str) -> dict[str, str]:
    """The lower bounds of pyproject.toml between two lines: name -> version."""
    _, _, rest = (ROOT / "pyproject.toml").read_text().partition(f"\n{begin}")
    return dict(re.findall(r'"([\w-]+)>=([\w.]+)', rest.partition(f"\n{end}")[0]))


def test_make_oldest_takes_the_lower_bounds() -> None:
    bounds = lower_bounds("dependencies = [", "[project.scripts]")
    lines = (ROOT / "constraints-oldest.txt").read_text().lower().replace("_", "-").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = {name: bound for name, bound in bounds.items() if name not in BOUNDS_NOT_TESTED}
    for name, bound in wanted.items():
        assert (Version(pins[name]) > Version(bound)) == (name in RAISED), name
        assert (Version(pins[name]) == Version(bound)) == (name not in RAISED), name


def test_linters_of_ci_are_those_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    lint, test = pins_of("lint = [", "]"), pins_of("test = [", "]\n")
    assert {pin.split("==")[0] for pin in lint} == {"ruff", "mypy", "types-tqdm", "import-linter"}
    assert {pin.split("==")[0] for pin in test} == {"basedpyright"}  # only a test runs it
    assert {*lint, *test} <= set(constraints)


def pins_of(begin: str, end: str) -> list[str]:
    """The exact versions that a group of pyproject.toml asks for, as name==version."""
    _, _, rest = (ROOT / "pyproject.toml").read_text().partition(f"\n{begin}")
    return re.findall(r'"([\w-]+==[\w.]+)"', rest.partition(end)[0])


@pytest.mark.parametrize(
    ("part", "family"),
    [
        ("deepseek_vl-False", "deepseek_vl"),
        ("False-deepseek_vl_hybrid_hf", "deepseek_vl_hybrid"),
        ("deepseek_vl2-x", "deepseek_vl2"),
        ("intern_vit_timm", "intern_vit"),
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl"),
        ("image-4", None),
    ],
)
def test_a_test_is_of_the_family_that_its_id_names(part: str, family: str | None) -> None:
    assert family_of(part) == family


def test_a_family_that_is_none_is_answered_with_the_names(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytestconfig.option, "family", "qwen9")
    told = f"--family qwen9: must be one of {', '.join(sorted(FAMILIES))}"
    with pytest.raises(pytest.UsageError, match=re.escape(told)):
        pytest_collection_modifyitems(pytestconfig, [])


def test_contributing_names_each_target() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"^make (\w+)", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert set(named) == targets - {"help"}
