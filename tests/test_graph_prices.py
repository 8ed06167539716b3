"""Routing follows the measured table also where the table is odd."""

from __future__ import annotations

from encoders.contract import EncoderItemSpec
from graphwrap import Budget
from graphwrap.costs import CostTable
from graphwrap.packing import Packer


def tiles(count: int) -> EncoderItemSpec:
    return EncoderItemSpec(count, count * 256, count, 1025)


def test_a_larger_budget_is_taken_where_it_was_measured_cheaper() -> None:
    """On an H200, 28 tiles of InternViT once took 56.4 ms and 29 tiles 49.8."""
    times = {26: 45.6, 28: 56.4, 29: 49.8, 30: 51.7}
    budgets = {Budget(n * 256, n, n, 1025, 0): ms for n, ms in times.items()}
    packer = Packer(list(budgets), CostTable(budgets, 0.0, 0.0, 0.0, 60.0, 0.0), 64)
    (group,) = packer.pack([tiles(13), tiles(14)])
    assert group.budget is not None
    assert group.budget.tokens == 29 * 256
    (alone,) = packer.pack([tiles(30)])
    assert alone.budget is not None
    assert alone.budget.tokens == 30 * 256
