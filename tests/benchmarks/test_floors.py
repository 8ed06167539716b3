"""The floors that the pages of speed show: counted operations over the rates of a GPU."""

from __future__ import annotations

import pytest

from benchmarks.speed import floors
from benchmarks.towers import TOWERS, Tower


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Products of 6,272 rows with 0.5e9 weights, and attention of 784 rows in eight images;
        # 1.15 GB of parameters at 4.3 TB/s.
        ("Qwen3-VL-8B", {"8x448": 7.97, "1x224": 0.268}),
        ("InternViT-300M", {"4 tiles": 3.67}),
    ],
)
def test_floors_count_products_attention_and_parameters(
    name: str, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = TOWERS[name].workloads
    asked = property(lambda tower: {workload: grids[workload] for workload in expected})
    monkeypatch.setattr(Tower, "workloads", asked)
    found = floors.floors_of(TOWERS[name], products=790e12, copies=4.3e12)
    assert found == pytest.approx(expected, rel=0.005)
