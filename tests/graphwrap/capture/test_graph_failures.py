"""What may go wrong at capture, several callers at once, and giving everything back."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders.contract import EncoderOutput
from graphwrap import GraphedEncoder
from tests.oracles import Grids
from tests.support.graphs.cases import executor_of, mixes, pixels_for, static, tower, toy
from tests.support.graphs.failing import ERRORS, FailingEncoder, failing
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, copy_of, worst_distance
from tests.support.towers.toy_encoder import ToyEncoder

SMALL: Grids = [[1, 1, 6]]
MANY: Grids = [[1, 1, 6], [1, 2, 8], [2, 1, 4], [1, 1, 2]]


# --- capture fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS)
def test_a_budget_that_cannot_be_captured_is_dropped_with_one_warning(error: str) -> None:
    graphed = failing(ERRORS[error], lambda rows: rows == 32)
    with pytest.warns(UserWarning, match="budget") as caught:
        graphed.capture(progress=False)
    (warning,) = [str(entry.message) for entry in caught]
    assert warning.startswith("budget 16 (4x32) could not be captured and is dropped (")
    assert str(ERRORS[error]).splitlines()[0] in warning
    assert "second line" not in warning
    stats = graphed.stats()
    assert [budget.tokens for budget in stats.budgets] == [4, 8]
    assert stats.dropped == ["16 (4x32)"]


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_during_a_capture(fails: bool) -> None:
    """Collecting could free tensors of the device."""
    found = list[bool]()

    def observe(rows: int) -> bool:
        found.append(gc.isenabled())
        return fails

    graphed = failing(KeyboardInterrupt(), observe)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        graphed.capture(progress=False)
    assert set(found) == {False}
    assert gc.isenabled()


@pytest.mark.parametrize("start", ["capture", "call", "comprehension"])
def test_a_dropped_budget_is_warned_of_at_the_line_of_the_caller(start: str) -> None:
    graphed = failing(ERRORS["out of memory"], lambda rows: rows == 32)
    pixels = torch.randn(4, *graphed.encoder.row_shape)
    starts: dict[str, Callable[[], object]] = {
        "capture": lambda: graphed.capture(progress=False),
        "call": lambda: graphed(pixels, [[1, 2, 2]]),
        "comprehension": lambda: [one.capture(progress=False) for one in [graphed]],
    }
    with pytest.warns(UserWarning, match="is dropped") as caught:
        starts[start]()
    assert [entry.filename for entry in caught] == [__file__]


@pytest.mark.parametrize("lost", [8, 16, 32])
def test_the_budgets_that_are_left_serve(lost: int) -> None:
    """``lost`` rows is each of the three budgets; items beyond the rest are eager, and counted."""
    graphed = failing(ERRORS["out of memory"], lambda rows: rows == lost)
    with pytest.warns(UserWarning, match="is dropped"):
        graphed.capture(progress=False)
    graphed.encoder.fails = lambda rows: False
    left = [budget.tokens for budget in graphed.stats().budgets]
    assert left == [tokens for tokens in (4, 8, 16) if 2 * tokens != lost]
    for tokens in range(1, 20):
        grids = [[1, 1, 2 * tokens]]
        pixels = pixels_for(graphed.encoder, grids)
        assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))
    assert graphed.stats().eager_items == 19 - left[-1]


def test_with_every_budget_lost_everything_is_eager() -> None:
    graphed = failing(ERRORS["out of memory"], lambda rows: True)
    with pytest.warns(UserWarning, match="is dropped") as caught:
        graphed.capture(progress=False)
    assert len(caught) == 3
    graphed.encoder.fails = lambda rows: False
    pixels = pixels_for(graphed.encoder, MANY)
    assert_same_bits(graphed(pixels, MANY), graphed.encoder(pixels, MANY))
    assert (graphed.stats().eager_items, graphed.stats().eager_calls) == (len(MANY), 1)
    assert graphed.stats().budgets == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TypeError("a bug"), SystemExit()], ids=repr)
def test_an_interrupted_capture_leaves_a_usable_object(error: BaseException) -> None:
    graphed = failing(error, lambda rows: rows == 16)
    with pytest.raises(type(error)):
        graphed.capture(progress=False)
    assert graphed.stats().budgets == []
    graphed.encoder.fails = lambda rows: False
    pixels = pixels_for(graphed.encoder, MANY)
    assert_same_bits(graphed(pixels, MANY), graphed.encoder(pixels, MANY))
    assert [budget.tokens for budget in graphed.stats().budgets] == [4, 8, 16]
    assert graphed.stats().eager_items == 0


def test_a_failing_call_does_not_spoil_the_next() -> None:
    graphed = failing(RuntimeError("once"), lambda rows: False)
    pixels = pixels_for(graphed.encoder, MANY)
    expected = copy_of(graphed(pixels, MANY))
    graphed.encoder.fails = lambda rows: True
    with pytest.raises(RuntimeError, match="once"):
        graphed(pixels, MANY)
    graphed.encoder.fails = lambda rows: False
    assert_same_bits(graphed(pixels, MANY), expected)


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("grids", [[[1, 1, 6]], [[1, 10, 10]]], ids=["fits", "over every budget"])
def test_a_call_that_fails_is_not_counted(grids: Grids, backend: str) -> None:
    encoder = FailingEncoder(RuntimeError("once"), lambda rows: False)
    graphed = GraphedEncoder(encoder, [4], backend=backend).capture(progress=False)
    before = graphed.stats()
    encoder.fails = lambda rows: True
    with pytest.raises(RuntimeError, match="once"):
        graphed(pixels_for(encoder, grids), grids)
    after = graphed.stats()
    after.cache_bytes = before.cache_bytes  # of metadata, which are right
    assert after == before


@pytest.mark.parametrize("where", ["prepare_encoder_metadata", "forward"])
def test_a_call_that_fails_half_way_leaves_no_stale_metadata(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call after it has another grid of the same budget, then the same grid again."""
    graphed = toy([16], max_frames_per_batch=4)
    one, other = [[1, 1, 8], [1, 1, 4]], [[1, 1, 4], [1, 1, 8]]
    pixels = pixels_for(graphed.encoder, one)
    graphed(pixels, one)
    with monkeypatch.context() as patch:
        patch.setattr(type(graphed.encoder), where, lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            graphed(pixels, other)
    for grids in (one, other, one):
        assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))


def test_a_call_interrupted_when_its_metadata_are_written_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the copy, before it is noted: the next call of the grid before must write its own."""
    graphed = toy([16], max_frames_per_batch=4)
    one, other = [[1, 1, 8], [1, 1, 4]], [[1, 1, 4], [1, 1, 8]]
    pixels = pixels_for(graphed.encoder, one)
    expected = copy_of(graphed(pixels, one))
    held, copy = executor_of(graphed).graphs.arena.metadata_bytes, Tensor.copy_

    def interrupted(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy(target, *args, **kwargs)
        if target.data_ptr() == held.data_ptr():
            raise KeyboardInterrupt
        return target

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            graphed(pixels, other)
    assert_same_bits(graphed(pixels, one), expected)


# --- several callers ------------------------------------------------------------------------------


def ask(graphed: GraphedEncoder, seed: int) -> bool:
    """Forty calls of a thread's own grids and pixels, each answer checked."""
    draw = random.Random(seed)
    for _ in range(40):
        grids = [[draw.randint(1, 2), 1, 2 * draw.randint(1, 9)] for _ in range(draw.randint(0, 5))]
        pixels = pixels_for(graphed.encoder, grids, draw.randint(0, 10**6))
        assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))
    return True


def test_eight_threads_over_one_object_get_right_answers() -> None:
    """The first of them captures; the others wait for it."""
    graphed = toy()
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda seed: ask(graphed, seed), range(8)))
    stats = graphed.stats()
    assert len(stats.budgets) == len(graphed.budgets)


def test_calls_of_several_threads_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers alone may be luck: each call's forward lasts until others had time to begin."""
    graphed = toy([8]).capture(progress=False)
    pixels = pixels_for(graphed.encoder, SMALL)
    forward, inside, most = graphed.encoder.forward, [], []

    def slow(*args: Any, **kwargs: Any) -> EncoderOutput:
        inside.append(threading.get_ident())
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(graphed.encoder), "forward", staticmethod(slow))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: graphed(pixels, SMALL), range(8)))
    assert most == [1] * 8


def test_release_while_others_call_is_survived() -> None:
    graphed, stop = toy(), threading.Event()

    def release() -> None:
        while not stop.wait(0.002):
            graphed.release()
            graphed.stats()

    releasing = threading.Thread(target=release)
    releasing.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(lambda seed: ask(graphed, seed), range(4)))
    finally:
        stop.set()
        releasing.join()


@pytest.mark.parametrize("name", ["intern_vit_300m", "qwen2_5_vl"])
def test_eight_threads_over_one_tower_get_right_answers(name: str) -> None:
    encoder, calls = tower(name), list(mixes(name).values())
    graphed = static(encoder)

    def work(number: int) -> float:
        grids = calls[number % len(calls)]
        pixels = pixels_for(encoder, grids, number)
        expected = encoder(pixels, grids)._replace(last_hidden_state=None)
        return max(worst_distance(graphed(pixels, grids), expected) for _ in range(3))

    with ThreadPoolExecutor(8) as threads:
        assert max(threads.map(work, range(8))) <= 2e-6


def test_two_objects_in_one_process_do_not_disturb_each_other() -> None:
    encoder = ToyEncoder()
    one, other = toy(clone=False), static(encoder, [6, 20], outputs=EVERY_FIELD, clone=False)
    pixels = [pixels_for(encoder, MANY, seed) for seed in range(2)]
    first = one(pixels[0], MANY)
    kept = copy_of(first)
    second = other(pixels[1], MANY)
    other._poison()
    assert_same_bits(first, kept)
    other.release()
    assert_same_bits(one(pixels[1], MANY), encoder(pixels[1], MANY))
    assert second.pooler_output is not None
    assert other.stats().budgets == []


def test_two_objects_over_one_encoder_agree() -> None:
    encoder = tower("qwen3_vl")
    grids = mixes("qwen3_vl")["images"]
    pixels = pixels_for(encoder, grids)
    outputs = [static(encoder, budgets)(pixels, grids) for budgets in ([96], [32, 64])]
    assert worst_distance(*outputs) <= 2e-6


# --- release --------------------------------------------------------------------------------------


def test_release_gives_everything_back_and_the_next_call_captures_again() -> None:
    graphed = toy()
    pixels = pixels_for(graphed.encoder, MANY)
    before = graphed(pixels, MANY)
    assert graphed.stats().arena_bytes > 0
    graphed.release()
    stats = graphed.stats()
    assert (stats.arena_bytes, stats.pool_bytes, stats.cache_bytes) == (0, 0, 0)
    assert stats.budgets == []
    assert_same_bits(graphed(pixels, MANY), before)
    assert graphed.stats().arena_bytes > 0


def test_release_frees_the_buffers_at_once_not_when_garbage_is_collected() -> None:
    graphed = toy()
    graphed(pixels_for(graphed.encoder, MANY), MANY)
    arena = executor_of(graphed).graphs.arena
    buffers = [weakref.ref(arena.pixels), weakref.ref(arena)]
    del arena
    gc.disable()
    try:
        graphed.release()
        assert [buffer() for buffer in buffers] == [None, None]
    finally:
        gc.enable()


def test_release_twice_or_before_capture_is_nothing_special() -> None:
    graphed = toy()
    graphed.release()
    graphed.release()
    pixels = pixels_for(graphed.encoder, SMALL)
    assert_same_bits(graphed(pixels, SMALL), graphed.encoder(pixels, SMALL))


def test_capture_again_changes_nothing_and_returns_the_object() -> None:
    graphed = toy()
    assert graphed.capture(progress=False) is graphed
    graphed(pixels_for(graphed.encoder, SMALL), SMALL)
    hits = sum(budget.hits for budget in graphed.stats().budgets)
    assert graphed.capture(progress=True) is graphed
    assert sum(budget.hits for budget in graphed.stats().budgets) == hits == 1


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphed = toy(None).capture(progress=False)
        graphed(pixels_for(graphed.encoder, MANY), MANY)
