"""What errors and model cards tell users to install."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.source_trees import nodes_of

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
OTHERS = {"ai-dynamo[vllm]>=1.6,<1.7"}  # needs an environment of its own
IN_A_CLONE = "."


def requirements() -> set[str]:
    """The requirements of the extras and of the integrations, without their markers."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    groups = [PROJECT["dependency-groups"]["integrations"], *extras]
    return {line.partition(";")[0].strip() for group in groups for line in group}


def told() -> set[str]:
    """All that the texts of the packages tell users to install."""
    texts = [
        node.value
        for package in ("encoders", "graphwrap", "weights", "vitgraph")
        for path in (ROOT / package).rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    requirements = {text for text in texts if re.fullmatch(r"[\w-]+>=[\d.]+", text)}
    lists = re.findall(r"pip install ((?:'[^'\n]+' ?)+|[^\s'`]+)", "\n".join(texts))
    told = {name for names in lists for name in re.findall("'([^']+)'", names) or [names]}
    return told | requirements


def test_texts_ask_for_the_versions_of_the_extras() -> None:
    asked = told()
    assert {
        "av>=17.1",
        "matplotlib>=3.8",
        "pyarrow>=15",
        "pillow-heif>=1.0",
        "s3fs>=2025.3",
    } <= asked
    assert asked - {IN_A_CLONE} - OTHERS <= requirements()


def test_no_text_installs_the_library_from_an_index() -> None:
    assert not [name for name in told() if name.startswith("vitgraph")]
