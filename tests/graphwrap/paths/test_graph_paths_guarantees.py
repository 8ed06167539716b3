"""The guarantees of graphs hold for every path: bits, memory of the caller, weights, threads."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphwrap import GraphedEncoder
from tests.support.graphs.outputs import assert_same_bits, copy_of, fields
from tests.support.graphs.path_cases import BUDGETS, CALLS, MIXED, assert_agrees, graphed_of
from tests.support.towers.toy_paths import Item, TwoPaths, inputs_of, with_pixels


def test_nan_in_every_stale_buffer_changes_no_bit_of_any_path() -> None:
    graphed = graphed_of()
    for seed, items in enumerate([*CALLS.values(), *list(CALLS.values())[::-1]]):
        graphed.capture(progress=False)._poison()
        for output in assert_agrees(graphed, inputs_of(items, seed)):
            assert all(bool(value.isfinite().all()) for value in fields(output).values())


ITEM = st.tuples(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4).map(lambda n: 2 * n)),
    st.none() | st.tuples(st.integers(1, 4), st.just(1), st.integers(1, 3).map(lambda n: 2 * n)),
)
SHARED = {clone: graphed_of(clone=clone) for clone in (True, False)}


@given(calls=st.lists(st.lists(ITEM, max_size=5), min_size=1, max_size=4), clone=st.booleans())
@settings(max_examples=60)
def test_calls_in_any_order_give_the_encoders_bits(calls: list[list[Item]], clone: bool) -> None:
    for seed, items in enumerate(calls):
        assert_agrees(SHARED[clone], inputs_of(items, seed))


@pytest.mark.parametrize("call", CALLS)
def test_results_are_the_callers_own_whatever_path_ran(call: str) -> None:
    graphed = graphed_of()
    outputs = graphed(inputs_of(CALLS[call]))
    kept = [copy_of(output) for output in outputs]
    for seed, items in enumerate(CALLS.values()):
        graphed(inputs_of(items, seed + 7))
    graphed._poison()
    graphed.release()
    for output, before in zip(outputs, kept, strict=True):
        assert_same_bits(output, before)


@pytest.mark.parametrize("part", ["whole", "pieces"])
@pytest.mark.parametrize("backend", ["static", "eager"])
def test_weights_rebound_in_either_path_are_an_error_with_graphs(part: str, backend: str) -> None:
    graphed, inputs = graphed_of(backend), inputs_of(MIXED)
    graphed(inputs)
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    getattr(graphed.encoder, part).weight = weight
    if backend == "eager":
        assert_agrees(graphed, inputs)
        return
    with pytest.raises(RuntimeError, match=rf"weight '{part}.weight' was rebound"):
        graphed(inputs)
    graphed.release()
    assert_agrees(graphed, inputs)


def test_a_path_that_is_no_submodule_is_guarded_too() -> None:
    class Views(TwoPaths):
        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "pieces", self._modules.pop("pieces"))

    graphed = GraphedEncoder(Views(), BUDGETS, backend="static")
    inputs = inputs_of(MIXED)
    graphed(inputs)
    graphed.encoder.pieces.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"weight 'path tiles.weight' was rebound"):
        graphed(inputs)


def test_eight_threads_over_one_object_get_right_answers() -> None:
    graphed = graphed_of()

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(20):
            assert_agrees(graphed, inputs_of(draw.choice(list(CALLS.values())), draw.randint(0, 9)))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))


def test_pixels_of_every_path_are_checked_and_cast() -> None:
    graphed, inputs = graphed_of(), inputs_of(MIXED)
    doubled = inputs.to(dtype=torch.float64)
    for ours, theirs in zip(graphed(doubled), graphed.encoder(inputs), strict=True):
        assert_same_bits(ours, theirs)
    whole = inputs.pixel_values
    for wrong in (whole.to(torch.uint8), whole[:, :2]):
        with pytest.raises(ValueError, match="pixel_values"):
            graphed(with_pixels(inputs, wrong))
