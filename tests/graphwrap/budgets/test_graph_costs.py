"""Costs: what is timed at capture, compared with what, and interpolated between what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphwrap import measuring
from graphwrap.budgets import Batch, choose_budgets
from graphwrap.buffers import BudgetGraph
from graphwrap.costs import Costs
from graphwrap.measuring import CLOSE, _in_turn, full_grids, measure, spread_sizes
from tests.support.graphs.cases import executor_of, pixels_for, toy
from tests.support.graphs.outputs import assert_same_bits
from tests.support.graphs.packing import default_budgets_of
from tests.support.towers.toy_encoder import ToyEncoder


class Clock:
    """A clock that moves only when a call says how long it took, and a device that never waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds, self.factor = 0.0, 1.0
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(measuring.time, "perf_counter", lambda: self.seconds)

    def pass_(self, ms: float, factor: float = 1.0) -> None:
        """Let so many milliseconds pass, times the largest factor that was given so far."""
        self.factor = max(self.factor, factor)
        self.seconds += self.factor * ms / 1e3


@pytest.mark.parametrize("warm", [1.0, 1.07], ids=["steady clocks", "slower when warm"])
@pytest.mark.parametrize("host_ms", [0.0, 12.0, 100.0])
def test_an_eager_run_costs_the_time_of_host_and_device(
    monkeypatch: pytest.MonkeyPatch, host_ms: float, warm: float
) -> None:
    """Whatever the clocks were, an eager run is compared with a replay in the same state."""
    runners, encoder = executor_of(toy([4, 16, 64, 256])).graphs.by_budget, ToyEncoder()
    clock = Clock(monkeypatch)

    def replay(encoder: Any, runner: BudgetGraph, grids: Any, pixels: Tensor) -> Any:
        return lambda: clock.pass_(2.0 + 0.1 * runner.budget.rows + 5.0 * len(grids))

    def eager(encoder: Any, grids: Any, pixels: Tensor) -> Any:
        rows = Batch.of(encoder.item_specs(grids)).rows
        ms = max(host_ms, 2.0 + 0.1 * rows) + 5.0 * len(grids) * (len(grids) > 1)
        # The clocks of the GPU stay lower after the first eager run.
        return lambda: clock.pass_(ms, warm)

    monkeypatch.setattr(measuring, "_replay", replay)
    monkeypatch.setattr(measuring, "_eager", eager)
    measured_ = measure(encoder, runners, torch.device("cpu"))
    for budget in runners:
        assert measured_.replays[budget] == pytest.approx(2.0 + 0.1 * budget.rows)
    few, most = min(runners).rows, max(runners).rows
    for rows in (few, most // 4, most // 2, most):
        expected = CLOSE * max(host_ms, 2.0 + 0.1 * rows)
        assert measured_.eager(rows) == pytest.approx(expected, rel=warm - 1 + 1e-6)


def test_eager_runs_that_wait_for_the_gpu_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All larger ones take as much longer than their replays, here 3 ms."""
    runners, encoder = executor_of(toy([4, 16, 64, 256, 1024])).graphs.by_budget, ToyEncoder()
    clock, ran = Clock(monkeypatch), set[int]()

    def replay(encoder: Any, runner: BudgetGraph, grids: Any, pixels: Tensor) -> Any:
        return lambda: clock.pass_(2.0 + 0.1 * runner.budget.rows)

    def eager(encoder: Any, grids: Any, pixels: Tensor) -> Any:
        rows = Batch.of(encoder.item_specs(grids)).rows

        def run() -> None:
            ran.add(rows)
            clock.pass_(max(12.0, 5.0 + 0.1 * rows))

        return run

    monkeypatch.setattr(measuring, "_replay", replay)
    monkeypatch.setattr(measuring, "_eager", eager)
    costs_ = measure(encoder, runners, torch.device("cpu"))
    assert sorted(ran) == [8, 128, 512]
    for rows in (512, 2048):
        assert costs_.eager(rows) == pytest.approx(CLOSE * (5.0 + 0.1 * rows))


@pytest.mark.parametrize(
    ("sizes", "timed"),
    [
        ([1], [1]),
        ([8, 9], [8, 9]),
        ([256, 296, 344], [256, 296, 344]),
        ([64, 61, 58, 55, 53, 51, 49, 47, 45], [45, 53, 61, 64]),
    ],
)
def test_sizes_close_to_one_another_are_not_all_timed(sizes: list[int], timed: list[int]) -> None:
    assert spread_sizes(sizes) == timed


def test_a_run_after_a_pause_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large replay on an H200 took 67.1, 70.9, 72.4 and 72.8 ms in a row."""
    clock, took = Clock(monkeypatch), iter([67.1, 72.8, 72.4])
    (ms,) = _in_turn([lambda: clock.pass_(next(took))], torch.device("cpu"))
    assert ms == pytest.approx(72.4)


@pytest.mark.parametrize(("ms", "calls"), [(0.5, 8), (13.0, 6), (70.0, 3)])
def test_a_pause_of_the_host_spoils_one_round_of_several(
    monkeypatch: pytest.MonkeyPatch, ms: float, calls: int
) -> None:
    """An eager run of 13 ms was once taken to cost 23.5 ms on an H200, after two timed calls."""
    clock, made = Clock(monkeypatch), list[float]()

    def eager() -> None:
        made.append(ms)
        clock.pass_(ms + 10.5 * (len(made) in (1, 2)))

    found = _in_turn([eager, lambda: clock.pass_(ms)], torch.device("cpu"))
    assert found == pytest.approx([ms, ms])
    assert len(made) == calls


def test_an_eager_cost_is_interpolated_between_runs_that_were_timed() -> None:
    timed = Costs({}, [(64, 10.0), (1024, 10.0), (4096, 40.0)])
    costs_ = [timed.eager(rows) for rows in (0, 64, 500, 1024, 2560, 4096, 7168)]
    assert costs_ == pytest.approx([10.0, 10.0, 10.0, 10.0, 25.0, 40.0, 70.0])
    assert Costs({}, [(64, 10.0)]).eager(5000) == 10.0


def test_measuring_times_every_budget_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    graphed = toy([4, 16, 64])
    runners, dice = executor_of(graphed).graphs.by_budget, torch.get_rng_state()
    timed = measure(graphed.encoder, runners, torch.device("cpu"))
    assert set(timed.replays) == set(runners)
    assert min(*timed.replays.values(), timed.eager(8)) > 0
    assert torch.equal(torch.get_rng_state(), dice)
    grids = [[1, 1, 6]]
    pixels = pixels_for(graphed.encoder, grids)
    assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))


def test_full_batches_fit_their_budget() -> None:
    for budget in choose_budgets(ToyEncoder()).budgets:
        batch = Batch.of(ToyEncoder().item_specs(full_grids(ToyEncoder(), budget)))
        assert budget.fits(batch)
        assert batch.tokens > 0.5 * budget.tokens


def test_unmeasured_costs_never_choose_eager() -> None:
    """Not even where the widest budget holds one small item."""
    budgets = default_budgets_of("qwen2_5_vl")
    unmeasured = Costs.unmeasured(budgets)
    assert unmeasured.eager(4) > 10 * max(unmeasured.replays.values())
    assert unmeasured.replays[budgets[0]] < unmeasured.replays[budgets[-1]]
