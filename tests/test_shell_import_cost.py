"""The library is cheap to import; ``benchmarks/import_cost.py`` prints the figures."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_importing_encoders_adds_little_to_importing_torch() -> None:
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "import_cost.py"))
    times = benchmark["measure"](["encoders"], 3)["encoders"]
    # The best of three, and three times the promised 100 ms: this runs beside other tests.
    assert min(times) < 300
