"""The files that benchmarks write."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.measuring.results import write_results

BODY = {"about": {"gpu": None}, "rows": [{"ms": 1.2345678, "of": [[3], [4.0]], "n": 123456789}] * 9}


def test_results_are_read_back_with_six_digits(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_results(path, BODY)
    row = {"ms": 1.23457, "of": [[3], [4.0]], "n": 123456789}
    assert json.loads(path.read_text()) == {"about": {"gpu": None}, "rows": [row] * 9}
