"""Hundreds of configurations and calls drawn at random: each answer is eager's, bit for bit.

The toy's sums have two terms, so any row mixed up, stale or leaked shows as a difference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encoders.contract import EncoderItemSpec
from graphwrap import GraphedEncoder
from graphwrap.budgets import LONG_SEGMENTS, Batch, choose_budgets
from graphwrap.costs import Costs
from graphwrap.packing import Packer, make_schedule
from tests.oracles import Grids
from tests.support.graphs.cases import pixels_for, tower, toy
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, fields, worst_distance
from tests.support.graphs.packing import check_groups
from tests.support.towers.toy_encoder import ToyEncoder

QUICK = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

GRID = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5).map(lambda n: 2 * n))
CALL = st.lists(GRID.map(list), max_size=7)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """One of the four ways to configure, valid by construction."""
    chosen: dict[str, Any] = {"clone": draw(st.booleans())}
    if draw(st.booleans()):
        budgets = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
        chosen["budgets"] = budgets
        low = min(budgets)
    else:
        chosen["budgets"] = None
        chosen["max_graphs"] = draw(st.integers(1, 6))
        chosen["max_budget"] = draw(st.integers(8, 64))
        low = 4
    if draw(st.booleans()):
        chosen["max_batch_size"] = draw(st.integers(1, low))
    if draw(st.booleans()):
        chosen["max_frames_per_batch"] = draw(st.integers(1, 12))
    return chosen


def answers_are_eagers(chosen: dict[str, Any], calls: list[Grids], poison: list[bool]) -> None:
    graphed = toy(**chosen)
    for seed, (grids, poisoned) in enumerate(zip(calls, poison, strict=True)):
        pixels = pixels_for(graphed.encoder, grids, seed)
        if poisoned:
            graphed._poison()
        output = graphed(pixels, grids)
        assert_same_bits(output, graphed.encoder(pixels, grids))
        assert all(bool(value.isfinite().all()) for value in fields(output).values())
    stats = graphed.stats()
    replayed = sum(budget.items for budget in stats.budgets)
    assert replayed + stats.eager_items == sum(map(len, calls))
    for budget in stats.budgets:
        assert budget.padded_tokens == budget.hits * budget.tokens >= budget.real_tokens


@given(chosen=configurations(), data=st.data())
@settings(QUICK, max_examples=150)
def test_any_calls_on_any_configuration_give_eagers_bits(
    chosen: dict[str, Any], data: st.DataObject
) -> None:
    calls = data.draw(st.lists(CALL, min_size=1, max_size=4))
    poison = data.draw(st.lists(st.booleans(), min_size=len(calls), max_size=len(calls)))
    answers_are_eagers(chosen, calls, poison)


@pytest.mark.slow
@given(chosen=configurations(), data=st.data())
@settings(QUICK, max_examples=500)
def test_many_more_calls_on_many_more_configurations_give_eagers_bits(
    chosen: dict[str, Any], data: st.DataObject
) -> None:
    calls = data.draw(st.lists(CALL, min_size=1, max_size=4))
    poison = data.draw(st.lists(st.booleans(), min_size=len(calls), max_size=len(calls)))
    answers_are_eagers(chosen, calls, poison)


SHARED = toy([4, 12, 40, 64])
KNOWN: list[Grids] = [
    [],
    [[1, 1, 2]],
    [[2, 1, 4], [1, 1, 6]],
    [[1, 1, 6], [2, 1, 4]],
    [[1, 2, 6], [1, 4, 10]],
    [[3, 2, 8]],
    [[1, 1, 2]] * 9,
    [[4, 4, 10], [1, 1, 2]],
    [[1, 2, 2], [1, 1, 8], [1, 1, 4]],
]


@pytest.mark.slow
@given(order=st.lists(st.integers(0, len(KNOWN) - 1), min_size=2, max_size=8))
@settings(QUICK, max_examples=250)
def test_one_object_called_in_any_order_gives_eagers_bits(order: list[int]) -> None:
    """Every cache warm or cold, every buffer as the call before it left it."""
    for place, number in enumerate(order):
        pixels = pixels_for(SHARED.encoder, KNOWN[number], seed=place)
        assert_same_bits(SHARED(pixels, KNOWN[number]), SHARED.encoder(pixels, KNOWN[number]))


def budgets_are_sound(chosen: dict[str, Any]) -> None:
    encoder = ToyEncoder()
    asked = {key: value for key, value in chosen.items() if key not in ("clone", "budgets")}
    wanted = choose_budgets(encoder, chosen["budgets"], **asked)
    tokens = sorted({budget.tokens for budget in wanted.budgets})
    assert 1 <= wanted.max_batch_size <= tokens[0]
    assert list(wanted.budgets) == sorted(set(wanted.budgets))
    assert len(wanted.budgets) <= asked.get("max_graphs", 48)
    assert wanted.inferred == (chosen["budgets"] is None)
    if chosen["budgets"] is not None:
        assert tokens == sorted(set(chosen["budgets"]))
    most = asked.get("max_frames_per_batch", max(wanted.max_batch_size, LONG_SEGMENTS**2))
    for budget in wanted.budgets:
        assert budget.rows == 2 * budget.tokens
        assert budget.segments <= most
        assert budget.segments * budget.longest_segment >= budget.rows
        item = EncoderItemSpec(budget.rows, budget.tokens, 1, budget.longest_segment)
        assert budget.longest_segment < budget.rows or budget.exceeded_by(Batch.of([item])) is None


@pytest.mark.slow
@given(chosen=configurations())
@settings(QUICK, max_examples=250)
def test_every_valid_configuration_makes_sound_budgets(chosen: dict[str, Any]) -> None:
    budgets_are_sound(chosen)


@pytest.mark.slow
@given(chosen=configurations(), grids=st.lists(GRID, max_size=30))
@settings(QUICK, max_examples=250)
def test_every_packing_keeps_capacities_and_its_plan_covers_every_row_once(
    chosen: dict[str, Any], grids: list[tuple[int, int, int]]
) -> None:
    encoder = ToyEncoder()
    asked = {key: value for key, value in chosen.items() if key not in ("clone", "budgets")}
    wanted = choose_budgets(encoder, chosen["budgets"], **asked)
    specs = encoder.item_specs(grids)
    packer = Packer(Costs.unmeasured(wanted.budgets), wanted.max_batch_size, 16_384)
    groups = packer.pack(specs)
    check_groups(packer, specs, groups)
    schedule = make_schedule(tuple(grids), specs, groups)
    for unit, total in schedule.counts.items():
        covered = [0] * total
        for step in schedule.steps:
            filled = 0
            for run in step.spans[unit]:
                assert run.target == filled
                filled += run.length
                for place in range(run.source, run.source + run.length):
                    covered[place] += 1
            assert filled == step.counts[unit]
        assert covered == [1] * total


SIDE = st.integers(1, 5).map(lambda n: 2 * n)
TOWER_GRID = st.tuples(st.integers(1, 3), SIDE, SIDE)
TILE_GRID = st.integers(1, 7).map(lambda t: (t, 8, 8))


@pytest.fixture(scope="module")
def shared_towers() -> dict[str, GraphedEncoder]:
    return {
        name: GraphedEncoder(tower(name), [16, 32, 96], backend="static", outputs=EVERY_FIELD)
        for name in ("intern_vit_300m", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["intern_vit_300m", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@given(data=st.data())
@settings(QUICK, max_examples=30)
def test_any_call_of_any_family_agrees_with_the_encoder(
    shared_towers: dict[str, GraphedEncoder], name: str, data: st.DataObject
) -> None:
    graphed = shared_towers[name]
    one = TILE_GRID if "intern" in name else TOWER_GRID
    grids = [list(grid) for grid in data.draw(st.lists(one, min_size=1, max_size=4))]
    pixels = pixels_for(graphed.encoder, grids)
    graphed._poison()
    with torch.no_grad():
        assert worst_distance(graphed(pixels, grids), graphed.encoder(pixels, grids)) <= 2e-6
