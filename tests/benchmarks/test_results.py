"""The files that benchmarks write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.measuring.results import as_written, write_results
from vitgraph.embedding.planning.sample import RATES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROW = {"ms": {"eager": 1.2345678, "graph": 2}, "of": ["a", "b"], "n": 123456789, "x" * 200: 1}


def test_results_have_four_digits_and_a_record_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_results(path, {"about": {"gpu": None}, "towers": [{"name": "a", "rows": [ROW] * 9}]})
    row = {**ROW, "ms": {"eager": 1.235, "graph": 2}}
    assert json.loads(path.read_text())["towers"] == [{"name": "a", "rows": [row] * 9}]
    assert sum(line.strip(" ,") == json.dumps(row) for line in path.read_text().splitlines()) == 9


@pytest.mark.parametrize(
    "path", [*sorted(RESULTS.glob("*.json")), *RATES], ids=lambda path: path.stem
)
def test_committed_results_are_in_the_form_that_is_written(path: Path) -> None:
    assert path.read_text() == as_written(json.loads(path.read_text()))
