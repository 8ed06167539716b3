"""What the documents ask a reader to install and to clone, and what the package says of itself."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # of Python 3.11
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
OURS = {"encoders", "graphwrap", "vitgraph", "weights"}
CALLED = {"PIL": "pillow", "faiss": "faiss_cpu"}
"""Names of distributions that differ from those of their modules."""


def imported(text: str) -> set[str]:
    """The modules at the top of what the Python blocks of a page import, of other projects."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names} - OURS - set(sys.stdlib_module_names)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_how_to_install_what_its_examples_need(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    comes = {re.split(r"[\[<>=]", line)[0] for line in PROJECT["dependencies"]}
    asked = " ".join(re.findall(r"pip install ([^`\n#]*)", text)).split()
    asked += re.findall(r"`([\w-]+)(?:>=[\d.]+)?`", text)  # in a table of what to install
    asked = [name.replace("-", "_") for name in asked]
    for module in imported(text):
        assert CALLED.get(module, module) in {*comes, *asked}, f"{page}: {module}"


def test_every_clone_is_of_the_repository_that_the_project_names() -> None:
    (url,) = PROJECT["urls"].values()
    pages = [ROOT / page for page in (*PAGES, "CONTRIBUTING.md")]
    named = [
        match
        for path in [*pages, *(ROOT / "notebooks").glob("*.ipynb")]
        for match in re.findall(r"git clone (\S+)", path.read_text("utf-8"))
    ]
    assert set(named) == {url}


def test_classifiers_are_those_that_exist_and_name_every_python() -> None:
    trove = pytest.importorskip("trove_classifiers")  # hatchling brings it
    assert set(PROJECT["classifiers"]) <= trove.classifiers
    versions = [line for line in PROJECT["classifiers"] if ":: 3." in line]
    assert versions[0].endswith(PROJECT["requires-python"].removeprefix(">="))
