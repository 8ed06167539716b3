"""A letter in the shape of a tensor means one thing in all files, as ``encoders.contract`` says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.source_trees import tree_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("encoders", "graphwrap", "weights", "vitgraph")
CONTRACT = ROOT / "encoders" / "contract.py"
# A capital letter by itself, perhaps with its size, and then what it counts.
MEANING = re.compile(r"(?<![\w*/+=`\[.])([A-Z]) (?:= \S+ (?:[-+*/] \w+ )*)?((?:[a-z-]+ ?){1,4})")
LITTLE = {"a", "an", "and", "at", "by", "in", "of", "or", "per", "the"}


def legend(path: Path) -> dict[str, set[str]]:
    """The words after each letter in the legend of a file, which begins with "Shapes"."""
    docstring = " ".join((ast.get_docstring(tree_of(path)) or "").replace("\n\n", "| ").split())
    found = re.search(r"\bShapes(?:,[^:]*)?: ([^|]*)", docstring)
    meanings = MEANING.findall(found[1]) if found else []
    return {letter: {*words.split()} - LITTLE for letter, words in meanings}


MEANINGS = legend(CONTRACT)
FILES = [
    path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if path != CONTRACT and legend(path)
]


def test_the_contract_gives_each_letter_a_meaning() -> None:
    assert {"patches"} <= MEANINGS["P"]
    assert {*"PTNBDHKSFCIMGLWRQ"} == MEANINGS.keys()
    assert len(FILES) > 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_letter_of_a_legend_means_what_it_means_everywhere(path: Path) -> None:
    for letter, words in legend(path).items():
        if letter != "A":  # the article at the beginning of a sentence
            assert words & MEANINGS[letter], f"{letter} {' '.join(words)}"
