"""Keywords of ``preprocess``: who takes each, and what errors and documents say about that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.families.keywords import VALUES, encoders_of, keyword_rows, refusal
from weights import FAMILIES
from weights.families.family import Family

DOCS = Path(__file__).parents[3] / "docs"
LIMITS = re.compile(r"\b(?:min|max)[_-](?:pixels|tiles)\b|\bpool=\"cls\"")
"""The keywords whose families only the table in ``docs/families.md`` lists."""
TITLES = ("InternViT", "Qwen", "DeepSeek", "GLM", "LFM2", "Llama", "Pixtral", "Kimi", "PaddleOCR")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_refused_keyword_is_answered_with_one_that_the_family_takes(family: Family) -> None:
    for encoder in encoders_of(family):
        errors = {keyword: refusal(encoder, keyword) for keyword in VALUES}
        taken = {keyword for keyword, error in errors.items() if error is None}
        assert ("fps" in taken) == ("num_frames" in taken)
        for keyword, error in errors.items():
            if error is not None:
                assert error.startswith(f"{keyword}={VALUES[keyword]}: ")
                named = set(re.findall(r"(?:min|max)_\w+", error)) - {keyword}
                assert named <= taken
                assert named or "leave it out" in error
                assert ("tile" in error) <= (keyword == "max_tiles" or "max_tiles" in taken)


def test_the_table_of_keywords_names_the_families_that_take_them() -> None:
    text = (DOCS / "families.md").read_text("utf-8")
    rows = list(keyword_rows())
    assert all(f"| {keyword} | {families} |\n" in text for keyword, families in rows)
    tiled = "InternViT; DeepSeek-OCR; DeepSeek-OCR-2; DeepSeek-VL2; LLaVA-NeXT; "
    tiled += "LLaVA-OneVision; Granite for Docling; Molmo2; Llama 4; LFM2-VL; "
    tiled += "Nemotron (some repos); MiniCPM-V 4.6, 4.7, MiniCPM-OCR"
    assert tiled in dict(rows).values()
