"""What the documents ask a reader to install and to clone, and what the package says of itself."""

from __future__ import annotations

import ast
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import vitgraph

tomllib = pytest.importorskip("tomllib")  # of Python 3.11
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
OURS = {"encoders", "graphwrap", "vitgraph", "weights"}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
BASES = ("vision", "patch", "tile", "paths")
"""Modules of ``encoders.base`` with classes that a family subclasses."""
WRAPPED = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "NOTICE", "docs/**/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
CALLED = {"PIL": "pillow", "faiss": "faiss_cpu", "sklearn": "scikit_learn"}
"""Names of distributions that differ from those of their modules."""


def imported(text: str) -> set[str]:
    """The modules at the top of what the Python blocks of a page import, of other projects."""
    nodes = [node for block in BLOCK.findall(text) for node in ast.walk(ast.parse(block))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names} - OURS - set(sys.stdlib_module_names)


def blocks_of(path: Path) -> list[str]:
    """The Python code of a page, a notebook or an example."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [re.sub(r"^%.*", "", "".join(cell["source"]), flags=re.M) for cell in cells]
    return [text] if path.suffix == ".py" else BLOCK.findall(text)


@pytest.mark.parametrize("name", [*PAGES, "notebooks", "examples"])
def test_readers_are_shown_public_names_of_one_root(name: str) -> None:
    if name == "docs/integrations.md":
        pytest.importorskip("sentence_transformers")
    path = ROOT / name
    nodes = [
        node
        for page in ([path] if path.is_file() else [*path.glob("*.ipynb"), *path.glob("*.py")])
        for block in blocks_of(page)
        for node in ast.walk(ast.parse(block))
    ]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert not {module for module in modules if module.split(".")[0] in OURS} - {"vitgraph"}
    for node in nodes:
        if not isinstance(node, ast.ImportFrom) or str(node.module).split(".")[0] not in OURS:
            continue
        root, *inner = str(node.module).split(".")
        assert root == "vitgraph", node.module
        assert not inner or inner[0] in vitgraph.__all__, node.module
        assert {alias.name for alias in node.names} <= set(import_module(str(node.module)).__all__)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_how_to_install_what_its_examples_need(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    comes = {re.split(r"[\[<>=]", line)[0] for line in PROJECT["dependencies"]}
    asked = " ".join(re.findall(r"pip install ([^`\n#]*)", text)).split()
    asked += re.findall(r"`([\w-]+)(?:>=[\d.]+)?`", text)  # in a table of what to install
    asked = [name.replace("-", "_") for name in asked]
    for module in imported(text):
        assert CALLED.get(module, module) in {*comes, *asked}, f"{page}: {module}"


def test_the_page_of_notebooks_links_to_each() -> None:
    linked = re.findall(
        r"\]\(\.\./notebooks/(.*?)\)", (ROOT / "docs/notebooks.md").read_text("utf-8")
    )
    assert linked == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_nothing_names_an_address_of_the_project_before_it_has_one() -> None:
    assert "urls" not in PROJECT
    names = (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "encoders/base/saving.py")
    for path in [*(ROOT / name for name in names), *(ROOT / "notebooks").glob("*.ipynb")]:
        assert not re.findall(r"https?://\S*vitgraph", path.read_text("utf-8")), path


def test_pages_install_from_a_clone_until_the_package_is_published() -> None:
    for page in PAGES:
        asked = re.findall(r"pip install ([^`\n#]*)", (ROOT / page).read_text("utf-8"))
        assert not [line for line in asked if "vitgraph" in line], page


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"^## \[(\S+)\] - ", text, re.M)
    assert versions == [vitgraph.__version__.removesuffix(".dev0"), "0.1.0"]
    assert ("- Unreleased" in text) == vitgraph.__version__.endswith(".dev0")
    kinds = re.findall(r"^### (\w+)", text, re.M)
    assert kinds == ["Added", "Changed", "Removed", "Fixed", "Security"]


def hooks_of_the_recipe() -> dict[str, set[tuple[str, str]]]:
    """Per table of the recipe, its base classes and hooks."""
    text = (ROOT / "docs/add_an_encoder.md").read_text("utf-8")
    tables = re.findall(r"^### (\w+)\n(.*?)(?=^###|\Z)", text, re.M | re.S)
    found = {name: re.findall(r"^\| `(\w+)` \| `(\w+)` \|", rows, re.M) for name, rows in tables}
    return {name: {*rows} for name, rows in found.items()}


def bases() -> dict[str, Any]:
    modules = [import_module(f"encoders.base.{name}_encoder") for name in BASES]
    return {name: value for module in modules for name, value in vars(module).items()}


def test_the_recipe_names_hooks_that_the_base_classes_have() -> None:
    tables = hooks_of_the_recipe()
    assert [*tables] == ["Must", "May", "Seldom"]
    for base, hook in set().union(*tables.values()):
        assert hasattr(bases()[base], hook), f"{base}.{hook}"


def test_the_recipe_says_must_of_every_abstract_hook() -> None:
    tables = hooks_of_the_recipe()
    must = {hook for _, hook in tables["Must"]}
    for base in ("PatchEncoder", "TileEncoder", "PathsEncoder"):
        assert bases()[base].__abstractmethods__ <= must, base
    for base, hook in tables["May"] | tables["Seldom"]:
        concrete = "PatchEncoder" if base == "VisionEncoder" else base
        assert hook not in bases()[concrete].__abstractmethods__, f"{base}.{hook}"


def test_classifiers_are_those_that_exist_and_name_every_python() -> None:
    trove = pytest.importorskip("trove_classifiers")  # hatchling brings it
    assert set(PROJECT["classifiers"]) <= trove.classifiers
    versions = [line for line in PROJECT["classifiers"] if ":: 3." in line]
    assert versions[0].endswith(PROJECT["requires-python"].removeprefix(">="))
