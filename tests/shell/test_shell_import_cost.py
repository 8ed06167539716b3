"""The library is cheap to import; ``benchmarks/import_cost.py`` prints the figures."""

from __future__ import annotations

import pytest

from benchmarks.import_cost import measure


@pytest.mark.slow
def test_importing_encoders_adds_little_to_importing_torch() -> None:
    times = measure(["encoders"], 3)["encoders"]
    # The best of three, and three times the promised 100 ms: this runs beside other tests.
    assert min(times) < 300
