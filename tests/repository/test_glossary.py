"""Docstrings use the words of the glossary in ``encoders.contract``, each for one thing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.source_trees import nodes_of, tree_of

ROOT = Path(__file__).parents[2]
FILES = [path for package in ("encoders", "graphwrap") for path in (ROOT / package).rglob("*.py")]
INSTEAD = {"bucket": "budget", "chunk": "segment", "subsequence": "segment"}
"""Words of other libraries -> the word of the glossary for the same thing."""
TOKENS_AND_NEWLINES = {
    *("encoders/contract.py", "encoders/deepseek_ocr.py", "encoders/deepseek_vl2.py"),
    *("encoders/base/raster.py", "encoders/layers/__init__.py", "encoders/layers/assembly.py"),
}
"""The files about what a language model reads, which the glossary calls a sequence."""


def docstrings(path: Path) -> list[str]:
    """The strings of a file that are statements, without the code in them, each in one line."""
    found = [n.value for n in nodes_of(path) if isinstance(n, ast.Expr)]
    texts = [n.value for n in found if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [" ".join(re.sub("``.*?``", "", text, flags=re.S).split()) for text in texts]


def test_the_glossary_defines_each_word_once() -> None:
    words = re.findall(
        r"\*(\w+)\*", ast.get_docstring(tree_of(ROOT / "encoders/contract.py")) or ""
    )
    assert len(words) == len(set(words))
    assert {*INSTEAD.values(), "sequence", "path", "tile"} <= set(words)


@pytest.mark.parametrize("word", INSTEAD)
def test_no_docstring_has_another_word_for_a_defined_thing(word: str) -> None:
    for path in FILES:
        for text in docstrings(path):
            assert not re.search(rf"\b{word}(s|ed)?\b", text, re.I), f"{path}: {text}"


def test_a_sequence_is_what_a_language_model_reads() -> None:
    """Or one of images or frames, as Python has it."""
    for path in FILES:
        if path.relative_to(ROOT).as_posix() not in TOKENS_AND_NEWLINES:
            for text in docstrings(path):
                assert not re.search(r"\bsequences?\b(?! of images)", text, re.I), f"{path}: {text}"
