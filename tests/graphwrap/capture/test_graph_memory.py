"""How much memory budgets may take, what is done where there is less, and what an error keeps."""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from tqdm.auto import tqdm

from encoders.contract import EncoderOutput, Metadata
from graphwrap import GraphedEncoder, capture, costs
from graphwrap.budgets import BudgetSet, choose_budgets
from graphwrap.buffers import Arena, Memory
from graphwrap.capture import Capturer
from graphwrap.encoder_forms import EncoderForm, FormSettings
from tests.support.graphs.cases import executor_of, pixels_for, static, toy
from tests.support.graphs.failing import ERRORS, FailingEncoder, failing
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits
from tests.support.towers.toy_encoder import ToyEncoder

CPU = torch.device("cpu")


def lowered(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    encoder: ToyEncoder | None = None,
    *,
    a_row: int = 1000,
    cached: int = 0,
    limit: float = 1.0,
) -> tuple[BudgetSet, BudgetSet]:
    """The toy's budgets before and after they are fitted to a device of ``a_row`` bytes per row."""
    encoder = encoder or ToyEncoder()
    rows, forward = [0], encoder.forward

    def counted(pixel_values: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        rows[0] = len(pixel_values)
        return forward(pixel_values, *args, **kwargs)

    for name, value in {
        "mem_get_info": lambda device: (free, 10**9),
        "get_per_process_memory_fraction": lambda device: limit,
        "memory_reserved": lambda device: 500 + cached,
        "memory_allocated": lambda device: 500,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: 500 + a_row * rows[0],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(encoder, "forward", counted)
    chosen = choose_budgets(encoder, max_frames_per_batch=2)
    form = EncoderForm(encoder, None, CPU, torch.float32, EVERY_FIELD, "cudagraph", FormSettings())
    return chosen, Capturer(form, chosen, Memory(CPU, False), memory_divisor=3).budget_set


# --- a third of free memory -----------------------------------------------------------------------


def test_budgets_that_fit_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before, after = lowered(monkeypatch, free=10**9)
    assert before == after


def test_the_largest_budget_is_lowered_to_fit_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UserWarning, match=r"lowered from 64 to \d+ tokens.*give max_budget") as said:
        before, after = lowered(monkeypatch, free=3 * 1100 * 64)
    assert len(said) == 1
    assert after.budgets == before.budgets[: len(after.budgets)]
    assert 56 <= after.budgets[-1].rows <= 70


def test_memory_that_torch_holds_unused_counts_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = lowered(monkeypatch, free=0, cached=10**9)
    assert before == after
    with pytest.warns(UserWarning, match="largest budget lowered from 64 to"):
        before, after = lowered(monkeypatch, free=3 * 20 * 128, a_row=0)
    assert after.budgets[-1].rows <= 64  # a row of pixels, results and metadata is 50 bytes


def test_a_limit_set_for_the_process_counts_as_all_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``torch.cuda.set_per_process_memory_fraction``: beyond it every budget would be dropped."""
    with pytest.warns(UserWarning, match="largest budget lowered from 64 to"):
        _, after = lowered(monkeypatch, free=10**9, limit=3 * 1100 * 64 / 10**9)
    assert 50 <= after.budgets[-1].rows <= 70


def test_where_no_budget_fits_only_the_smallest_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(
        UserWarning, match="no budget fits, and only the smallest is captured: 4 tokens"
    ):
        before, after = lowered(monkeypatch, free=3)
    assert {budget.tokens for budget in after.budgets} == {4} == {before.budgets[0].tokens}


def test_a_trial_that_runs_out_of_memory_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def fails(rows: int) -> bool:
        seen.append(rows)
        return rows > 10

    encoder = FailingEncoder(ERRORS["out of memory"], fails)
    before, after = lowered(monkeypatch, 10**9, encoder)
    assert before == after
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] <= 10 < seen[0]


def test_a_trial_that_never_fits_leaves_the_smallest_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UserWarning, match="only the smallest is captured"):
        _, after = lowered(monkeypatch, 10**9, FailingEncoder(ERRORS["out of memory"], bool))
    assert {budget.tokens for budget in after.budgets} == {4}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        lowered(monkeypatch, 10**9, FailingEncoder(BUG, bool))


@pytest.mark.parametrize(
    ("settings", "bounded"),
    [({}, True), ({"min_budget": 8}, True), ({"max_budget": 32}, False), ({"budgets": [8]}, False)],
)
def test_a_largest_budget_that_the_user_gave_is_taken_as_it_is(
    settings: dict[str, Any], bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    divisors: list[int] = []

    def fit(self: Capturer, chosen: BudgetSet, divisor: int) -> BudgetSet:
        divisors.append(divisor)
        return chosen

    monkeypatch.setattr(Capturer, "_fit_memory", fit)
    graphed = GraphedEncoder(ToyEncoder(), backend="static", **settings)
    form = dataclasses.replace(graphed._forms["image"], backend="cudagraph")
    monkeypatch.setattr(capture, "Memory", lambda device, has_graphs: Memory(device, False))
    capture.capture_encoder(
        graphed.encoder,
        {"image": form},
        graphed._budget_sets,
        {},
        graphed.stats(),
        bounded=graphed._bounded,
        clone=True,
        everything=True,
        progress=False,
    )
    assert divisors == [3] * bounded


# --- budgets that cannot be -----------------------------------------------------------------------

BUG = RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x5 and 3x3)")


class SmallHost(ToyEncoder):
    """As on a host without room for the metadata of a large budget."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def prepare_encoder_metadata(self, grid_thw: Any, **capacities: Any) -> Metadata:
        if (capacities.get("max_input_size") or 0) > 10**6:
            raise self.error
        return super().prepare_encoder_metadata(grid_thw, **capacities)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[enforce fail at alloc_cpu.cpp:127] can't allocate memory"), MemoryError()],
    ids=["allocator", "host"],
)
def test_a_budget_whose_metadata_the_host_cannot_hold_is_dropped(error: Exception) -> None:
    graphed = static(SmallHost(error), [8, 10**9], max_frames_per_batch=1, outputs=EVERY_FIELD)
    with pytest.warns(UserWarning, match=r"budget 1000000000 .* is dropped") as said:
        graphed.capture(progress=False)
    assert len(said) == 1
    pixels = pixels_for(graphed.encoder, [[1, 1, 8]])
    assert_same_bits(graphed(pixels, [[1, 1, 8]]), graphed.encoder(pixels, [[1, 1, 8]]))
    assert [budget.hits for budget in graphed.stats().budgets] == [1]


@pytest.mark.parametrize("where", ["forward", "prepare_encoder_metadata"])
def test_a_budget_too_large_for_the_host_is_dropped(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy and Python say MemoryError where torch says RuntimeError."""
    encoder = ToyEncoder()
    graphed, calls, run = (
        static(encoder, [4, 8], max_frames_per_batch=1),
        [],
        getattr(encoder, where),
    )

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(where)
        if len(calls) == (1 if where == "forward" else 3):  # two budgets were laid out before
            raise MemoryError
        return run(*args, **kwargs)

    monkeypatch.setattr(encoder, where, fails)
    with pytest.warns(UserWarning, match=r"budget 8 .* is dropped \(MemoryError\)") as said:
        graphed.capture(progress=False)
    assert len(said) == 1
    assert [budget.tokens for budget in graphed.stats().budgets] == [4]


def test_a_bug_that_fails_every_budget_is_raised() -> None:
    graphed = failing(BUG, lambda rows: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            graphed.capture(progress=False)
    assert graphed.stats().budgets == []


def test_a_budget_that_fails_alone_is_dropped_whatever_it_says() -> None:
    graphed = failing(BUG, lambda rows: rows == 32)
    with pytest.warns(UserWarning, match="shapes cannot be multiplied"):
        graphed.capture(progress=False)
    assert [budget.tokens for budget in graphed.stats().budgets] == [4, 8]


def test_with_every_budget_lost_an_overflow_error_says_so() -> None:
    graphed = failing(ERRORS["out of memory"], lambda rows: True, on_overflow="raise")
    with pytest.warns(UserWarning, match="is dropped"):
        graphed.capture(progress=False)
    graphed.encoder.fails = lambda rows: False
    with pytest.raises(
        ValueError,
        match=r"\(1, 1, 6\) is over every budget that was captured \(every budget.*warnings",
    ):
        graphed(pixels_for(graphed.encoder, [[1, 1, 6]]), [[1, 1, 6]])


# --- what an error keeps --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [32, 8], ids=["the first", "the last"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TypeError])
def test_an_error_held_keeps_no_buffers(
    error: type[BaseException], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook holds the last error for as long as it runs."""
    refs: list[weakref.ref[Tensor]] = []

    class Seen(Arena):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            refs.extend(map(weakref.ref, (self.pixels, self.metadata_bytes)))

    monkeypatch.setattr(capture, "Arena", Seen)
    graphed = failing(error(), lambda count: count == rows)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(error) as held:
            graphed.capture(progress=False)
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
    assert held.traceback[-1].name == "forward"


# --- no memory to measure in ---------------------------------------------------------------------


@pytest.mark.parametrize("message", ["CUDA out of memory", "a shape is wrong"])
def test_without_memory_to_time_eager_runs_all_is_replayed(
    monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    encoder = ToyEncoder()
    form = EncoderForm(encoder, None, CPU, torch.float32, (), "static", FormSettings())
    capturer = Capturer(form, choose_budgets(encoder, [8, 16]), Memory(CPU, False))
    graphs = executor_of(toy([8, 16])).graphs
    bar: Any = tqdm(disable=True)

    def measure(*_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(capture, "measure", measure)
    if "memory" in message:
        with pytest.warns(
            UserWarning, match="could not be timed.*every item that fits a budget is repl"
        ):
            assert capturer._cost(graphs, bar) == costs.Costs.unmeasured(graphs.by_budget)
    else:
        with pytest.raises(RuntimeError, match="a shape is wrong"):
            capturer._cost(graphs, bar)
