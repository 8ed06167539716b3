"""The figures of the pages are what the scripts of ``benchmarks`` print from committed results."""

from __future__ import annotations

import pytest

from benchmarks.pages import BLOCKS, MARKED, PAGES, ROOT, filled


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_a_page_is_what_its_script_prints(name: str) -> None:
    page = (ROOT / name).read_text("utf-8")
    assert filled(page) == page, "run python -m benchmarks.pages"


def test_each_block_stands_in_one_page() -> None:
    shown = [
        found[1] for name in PAGES for found in MARKED.findall((ROOT / name).read_text("utf-8"))
    ]
    assert sorted(shown) == sorted(BLOCKS)
