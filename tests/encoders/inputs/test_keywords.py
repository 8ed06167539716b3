"""Keywords of ``preprocess``: who takes each, and what errors and documents say about that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.families.keywords import VALUES, encoders_of, refusal
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
