"""``docs/graphs.md``: its figures are those that were measured, and its picture is well-formed."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_docs_show_the_padding_that_was_printed() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "budget_waste.json").read_text())
    text = (ROOT / "docs" / "graphs.md").read_text()
    header, _, *rows = text[text.index("| preprocessing of |") :].split("\n\n")[0].splitlines()
    choices = [cell.strip() for cell in header.split("|")[2:-1]]
    for row in rows:
        family, *cells = [cell.strip() for cell in row.split("|")[1:-1]]
        measured = [results[family][choice]["fixed"]["padding"] for choice in choices]
        assert cells == [f"{100 * padding:.1f} %" for padding in measured], family
