"""The floors that the pages of speed show: counted operations over the rates of a GPU."""

from __future__ import annotations

import pytest

from benchmarks.speed import floors
from benchmarks.towers import TOWERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workload", "expected"),
    [
        # Products of 6,272 rows with 0.5e9 weights, and attention of 784 rows in eight images.
        ("Qwen3-VL-8B", "8x448", 7.97),
        ("Qwen3-VL-8B", "1x224", 0.268),  # 1.15 GB of parameters at 4.3 TB/s
        ("Qwen2.5-VL-7B", "1x448", 1.70),  # 28 of 32 blocks attend within windows of 64 rows
        ("InternViT-300M", "4 tiles", 3.67),
    ],
)
def test_floors_count_products_attention_and_parameters(
    name: str, workload: str, expected: float
) -> None:
    found = floors.floors_of(TOWERS[name], products=790e12, copies=4.3e12)
    assert found[workload] == pytest.approx(expected, rel=0.005)
