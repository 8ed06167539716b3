"""The rules of imports that the contracts of import-linter in ``pyproject.toml`` cannot say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_trees import nodes_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("encoders", "graphwrap", "weights", "vitgraph")
FOR_CHECKERS = {"typing_extensions", "_typeshed"}
MAKERS = sorted(
    path.parent.name
    for path in (ROOT / "encoders").glob("*/__init__.py")
    if path.parent.name not in ("base", "layers", "inputs", "streams", "accelerated")
)


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_contracts_of_import_linter_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_for_type_checkers_is_never_imported_when_code_runs(package: str) -> None:
    for path in modules(package):
        checked = [
            child
            for node in nodes_of(path)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for child in ast.walk(node)
        ]
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module in FOR_CHECKERS:
                assert node in checked, f"{path}: line {node.lineno}"


def test_graphwrap_names_no_model() -> None:
    names = {*MAKERS} - {"clip", "meta", "step"}  # which are words
    for path in modules("graphwrap"):
        text = path.read_text().lower()
        assert not [name for name in names if re.search(rf"\b{name}", text)], path


def test_importing_towers_needs_no_image_library_and_the_library_no_model_zoo() -> None:
    towers = [
        f"encoders.{name}.{path.stem}"
        for name in MAKERS
        for path in modules(f"encoders/{name}")
        if not path.stem.endswith(("_pixels", "__init__"))
    ]
    code = (
        f"import sys, {', '.join(towers)}\n"
        "print('PIL' in sys.modules)\n"
        "import encoders, weights, graphwrap\n"
        "heavy = {'transformers', 'torchvision', 'timm', 'jax', 'matplotlib', 'av', 'vitgraph',\n"
        "  'triton', 'flash_attn', 'encoders.accelerated'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "[]"]
