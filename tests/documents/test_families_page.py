"""``docs/families.md`` is what its script prints, and which of vLLM's towers are here."""

from __future__ import annotations

import json

import pytest

from tests.support.families.page import ENGINES, PAGE, absence, page, towers_here


@pytest.mark.slow
def test_the_page_of_families_is_what_its_script_prints() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.support.families.page"


def test_every_tower_that_is_not_here_has_one_reason() -> None:
    known = json.loads(ENGINES.read_text())
    missing = {kind for name, kind in known["architectures"].items() if name not in towers_here()}
    assert all(absence(kind) for kind in missing)
    assert known["absent"].keys() <= missing
