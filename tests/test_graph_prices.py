"""Routing follows the measured table also where the table is odd."""

from __future__ import annotations

import pytest

from encoders.contract import EncoderItemSpec
from graphwrap import Budget
from graphwrap.budgets import Load
from graphwrap.costs import CostTable, fit_attention
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


def test_where_host_and_device_take_as_long_an_eager_run_takes_longer_than_either() -> None:
    """On an H200, four tiles took 7.5 ms in a graph and 8.5 eagerly; the host alone needs 7.2."""
    budget = Budget(1024, 4, 4, 1025, 0)
    table = CostTable({budget: 7.52}, 0.0, 0.0, 0.015, eager_floor_ms=7.24, eager_gap_ms=0.0)
    (group,) = Packer([budget], table, 64).pack([tiles(4)])
    assert group.budget == budget
    assert table.eager(Load.of([tiles(4)])) == pytest.approx(8.07, abs=0.05)
    assert table.eager(Load.of([tiles(1)])) == pytest.approx(7.24, abs=0.05)
    assert table.eager(Load.of([tiles(16)])) == pytest.approx(4 * 7.52, abs=0.05)


def load_of(rows: int, area: int) -> Load:
    return Load(1, rows // 4, rows, 1, rows, 0, area)


def test_attention_is_fitted_by_rows_and_by_squared_lengths() -> None:
    """Points that two prices explain give these prices."""
    loads = [load_of(rows, rows * length) for rows, length in [(64, 8), (500, 64), (4000, 64)]]
    points = [(load, 0.002 * load.rows + 3e-6 * load.area) for load in loads]
    assert fit_attention(points) == pytest.approx((0.002, 3e-6))


def test_attention_never_has_a_negative_price() -> None:
    """Where rows would need one, lengths explain it alone; where nothing was measured, nothing."""
    loads = [load_of(64, 64**2), load_of(512, 512**2)]
    falling = [(load, 1e-5 * load.area - 1e-4 * load.rows) for load in loads]
    row_ms, area_ms = fit_attention(falling)
    assert row_ms == 0.0
    assert 0 < area_ms < 1e-5
    alike = [(load, 2e-6 * load.area) for load in (loads[0], loads[0])]
    assert fit_attention(alike) == pytest.approx((0.0, 2e-6))
    for nothing in ([], [(loads[0], 0.0)], [(loads[0], -0.1)]):
        assert fit_attention(nothing) == (0.0, 0.0)


def test_a_curve_that_points_below_nothing_starts_at_nothing() -> None:
    """Two budgets whose line would make the price of few rows negative."""
    budgets = {Budget(16, 64, 8, 64, 0): 1.0, Budget(32, 128, 8, 128, 0): 4.0}
    table = CostTable(budgets, 0.0, 0.0, 0.0, eager_floor_ms=0.0, eager_gap_ms=0.0)
    assert table.device(0) == 0.0
    assert table.device(32) == pytest.approx(0.5)
    assert table.device(96) == pytest.approx(2.5)
    assert table.device(1280) == pytest.approx(40.0, rel=1e-3)  # beyond: in proportion
