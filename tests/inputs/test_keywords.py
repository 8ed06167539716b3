"""Every family takes a keyword of ``preprocess``, or says which it takes in place of that."""

from __future__ import annotations

import re

import pytest

from support.families.keywords import VALUES, encoders_of, refusal
from weights import FAMILIES
from weights.families.family import Family


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_refused_keyword_is_answered_with_one_that_the_family_takes(family: Family) -> None:
    for encoder in encoders_of(family):
        errors = {keyword: refusal(encoder, keyword) for keyword in VALUES}
        taken = {keyword for keyword, error in errors.items() if error is None}
        for keyword, error in errors.items():
            if error is not None:
                assert error.startswith(f"{keyword}={VALUES[keyword]}: ")
                named = set(re.findall(r"(?:min|max)_\w+", error)) - {keyword}
                assert named <= taken
                assert named or "leave it out" in error
                assert ("tile" in error) <= (keyword == "max_tiles" or "max_tiles" in taken)
