"""Packing: every capacity kept, the caller's order kept, the optimum found, quick."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import BY_NAME

from encoders.contract import EncoderItemSpec
from graphwrap.budgets import Budget, Ladder, Load, plan_ladder
from graphwrap.costs import Costs, CostTable, RowCosts
from graphwrap.packing import Group, Packer, eager_bound

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "graphs_h200.json"
IMAGES = [(4, 4), (8, 8), (14, 18), (16, 16), (30, 46), (32, 32), (36, 64), (46, 82), (64, 64)]
CLIPS = [(2, 16, 16), (4, 8, 8), (8, 16, 16), (16, 24, 32), (32, 16, 16), (16, 32, 32)]


@cache
def ladder(name: str) -> tuple[Budget, ...]:
    family = BY_NAME[name]
    with torch.device("meta"):
        encoder = family.encoder_class(family.config_class.from_hf(family.config))
    return plan_ladder(encoder).budgets


def measured(budgets: Sequence[Budget], floor: float = 13.5) -> CostTable:
    """Prices of the order measured on one H200 for a Qwen tower at true size."""
    return CostTable(
        empty_ms={b: max(1.9, 0.6 + b.rows * 0.0048) + 2e-4 * (b.rows**0.5) for b in budgets},
        row_ms=2e-5,
        area_ms=1.3e-7,
        replay_host_ms=0.12,
        eager_floor_ms=floor,
        eager_gap_ms=0.4,
    )


PRICES: dict[str, Callable[[Sequence[Budget]], Costs]] = {
    "rows": lambda budgets: RowCosts(),
    "measured": measured,
    "measured beside a slow host": lambda budgets: measured(budgets, floor=60.0),
}


def spec_of(grid: tuple[int, ...], window: int = 8) -> EncoderItemSpec:
    t, h, w = grid if len(grid) == 3 else (1, *grid)
    windows = t * -(-h // window) * -(-w // window)
    return EncoderItemSpec(t * h * w, t * h * w // 4, t, h * w, windows)


def draw_specs(draw: random.Random, count: int) -> list[EncoderItemSpec]:
    return [spec_of(draw.choice(CLIPS if draw.random() < 0.2 else IMAGES)) for _ in range(count)]


def check_groups(packer: Packer, specs: Sequence[EncoderItemSpec], groups: list[Group]) -> None:
    """Each item once, in order inside its group, every capacity kept, eager items with why."""
    assert sorted(item for group in groups for item in group.items) == list(range(len(specs)))
    assert [group.items[0] for group in groups] == sorted(group.items[0] for group in groups)
    for group in groups:
        assert list(group.items) == sorted(group.items)
        load = Load.of([specs[item] for item in group.items])
        if group.budget is None:
            whys = [packer.overflow(specs[item]) for item in group.items]
            assert group.reasons == tuple(f"over {why}" if why else "cheaper" for why in whys)
            assert load.tokens <= packer.eager_tokens or load.items == 1
            continue
        assert group.reasons == ()
        assert group.budget in packer.budgets
        assert load.items <= packer.max_batch_size
        assert load.tokens <= group.budget.tokens
        assert load.rows <= group.budget.rows
        assert load.segments <= group.budget.segments
        assert load.longest_segment <= group.budget.longest_segment
        assert load.windows <= group.budget.windows


def price(packer: Packer, specs: Sequence[EncoderItemSpec], groups: list[Group]) -> float:
    """What the groups cost, worked out again from the table."""
    total = 0.0
    for group in groups:
        load = Load.of([specs[item] for item in group.items])
        costs = packer.costs
        total += costs.replay(group.budget, load) if group.budget else costs.eager(load)
    return total


def cheapest(packer: Packer, specs: Sequence[EncoderItemSpec]) -> float:
    """The optimum over every way to divide the items into groups, run by replay or eagerly."""
    count = len(specs)
    cost = [0.0] * (1 << count)
    for chosen in range(1, 1 << count):
        load = Load.of([specs[item] for item in range(count) if chosen >> item & 1])
        too_long = load.tokens > packer.eager_tokens and load.items > 1
        options = [float("inf") if too_long else packer.costs.eager(load)]
        if load.items <= packer.max_batch_size:
            takers = [budget for budget in packer.budgets if budget.refuses(load) is None]
            options += [packer.costs.replay(budget, load) for budget in takers]
        cost[chosen] = min(options)
    best = [0.0] + [float("inf")] * ((1 << count) - 1)
    for chosen in range(1, 1 << count):
        lowest = chosen & -chosen  # the group that holds the first item, then the rest
        others = chosen ^ lowest
        part = others
        while True:
            group = part | lowest
            best[chosen] = min(best[chosen], cost[group] + best[chosen ^ group])
            if not part:
                break
            part = (part - 1) & others
    return best[-1]


def check_optimal(packer: Packer, specs: Sequence[EncoderItemSpec]) -> None:
    """The groups are valid, and cost what the best of all divisions costs."""
    groups = packer.pack(specs)
    check_groups(packer, specs, groups)
    best = cheapest(packer, specs)
    assert price(packer, specs, groups) == pytest.approx(best, rel=1e-9), specs


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("items", [1, 2, 3, 5, 8])
def test_no_packing_is_cheaper(items: int, name: str, prices: str) -> None:
    budgets = ladder(name)
    draw = random.Random(items)
    for most in (64, 3):
        packer = Packer(budgets, PRICES[prices](budgets), most)
        for _ in range(4):
            check_optimal(packer, draw_specs(draw, items))


def test_no_packing_is_cheaper_at_the_prices_measured_on_an_h200() -> None:
    for tower in json.loads(RESULTS.read_text())["towers"]:
        table = read_prices(tower["prices"])
        windows = any(budget.windows for budget in table.empty_ms)
        draw = random.Random(tower["tower"])
        for most, items in [(64, 3), (64, 8), (3, 5), (3, 9)]:
            packer = Packer(list(table.empty_ms), table, most)
            for _ in range(3):
                specs = draw_specs(draw, items)
                if tower["tower"].startswith("Intern"):
                    specs = [tiles(draw.randint(1, 13)) for _ in range(items)]
                elif not windows:
                    specs = [spec._replace(windows=0) for spec in specs]
                check_optimal(packer, specs)


def read_prices(body: dict[str, Any]) -> CostTable:
    """A table as ``benchmarks/graphs.py`` keeps it."""
    kept = {field.name: body[field.name] for field in fields(CostTable)}
    empty = {
        Budget(*(row[name] for name in Budget._fields)): row["ms"] for row in kept.pop("empty_ms")
    }
    return CostTable(empty, **kept)


def tiles(count: int) -> EncoderItemSpec:
    return EncoderItemSpec(count, count * 256, count, 1025)


@pytest.mark.slow
@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("items", [9, 10, 11, 12])
def test_no_packing_of_twelve_items_is_cheaper(items: int, prices: str) -> None:
    budgets = ladder("qwen2_5_vl")
    draw = random.Random(100 + items)
    for most in (64, 3):
        packer = Packer(budgets, PRICES[prices](budgets), most)
        for _ in range(2):
            check_optimal(packer, draw_specs(draw, items))


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    """Prices that no machine would measure: falling, flat, without host time or with much."""
    sizes, times = st.integers(1, 60), st.floats(0.01, 10.0)
    budget = st.builds(
        lambda n, s, x, w: Budget(n, 4 * n, s, x, w), sizes, sizes, st.integers(4, 240), sizes
    )
    prices = st.floats(0.0, 1.0)
    return CostTable(
        empty_ms=draw(st.dictionaries(budget, times, min_size=1, max_size=6)),
        row_ms=draw(prices) * 0.01,
        area_ms=draw(prices) * 1e-5,
        replay_host_ms=draw(prices),
        eager_floor_ms=draw(times),
        eager_gap_ms=draw(prices),
    )


SMALL_ITEMS = st.lists(
    st.builds(
        lambda t, n, w: EncoderItemSpec(4 * t * n, t * n, t, 4 * n, w),
        st.integers(1, 4), st.integers(1, 16), st.integers(1, 9),
    ),
    min_size=1, max_size=7,
)  # fmt: skip


@given(table=tables(), specs=SMALL_ITEMS, most=st.integers(1, 8))
@settings(max_examples=150)
def test_no_packing_is_cheaper_whatever_was_measured(
    table: CostTable, specs: list[EncoderItemSpec], most: int
) -> None:
    check_optimal(Packer(list(table.empty_ms), table, most), specs)


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("items", [2, 5, 9])
@pytest.mark.parametrize("tokens", [300, 1200, 4000])
def test_no_packing_with_eager_runs_of_bounded_length_is_cheaper(
    tokens: int, items: int, prices: str
) -> None:
    budgets = [budget for budget in ladder("qwen2_vl") if budget.tokens <= 512]
    packer = Packer(budgets, PRICES[prices](budgets), 64, eager_tokens=tokens)
    for seed in range(3):
        specs = [s._replace(windows=0) for s in draw_specs(random.Random(seed), items)]
        check_optimal(packer, specs)


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("count", [13, 40, 300])
def test_an_eager_run_of_many_items_is_bounded_in_tokens(count: int, prices: str) -> None:
    """However much cheaper one run of everything is: its memory is nobody's to give."""
    budgets = [budget for budget in ladder("qwen2_vl") if budget.tokens <= 512]
    packer = Packer(budgets, PRICES[prices](budgets), 64, eager_tokens=2000)
    specs = [s._replace(windows=0) for s in draw_specs(random.Random(count), count)]
    groups = packer.pack(specs)
    check_groups(packer, specs, groups)
    over = [spec.output_tokens for spec in specs if packer.overflow(spec)]
    runs = [group for group in groups if any(why != "cheaper" for why in group.reasons)]
    assert len(runs) <= 2 * sum(over) / 2000 + 1  # each run and the next are more than it


@pytest.mark.parametrize(
    ("captured", "bound"), [([64, 512], 16_384), ([64], 128), ([], 16_384)],
    ids=["whole ladder", "cut short", "nothing"],
)  # fmt: skip
def test_eager_runs_are_as_long_as_twice_what_is_worth_a_graph_or_fits(
    captured: list[int], bound: int
) -> None:
    budgets = [Budget(tokens, 4 * tokens, 8, 4 * tokens, 0) for tokens in (64, 512)]
    kept = [budget for budget in budgets if budget.tokens in captured]
    assert eager_bound(kept, Ladder(tuple(budgets), 8, True), 8192) == bound


@pytest.mark.parametrize("count", [1, 5, 12, 13, 40])
@pytest.mark.parametrize("prices", PRICES)
def test_items_that_no_budget_holds_share_one_eager_run(prices: str, count: int) -> None:
    """Each alone would wait for its own launches: many times as slow as the encoder itself."""
    budgets = [budget for budget in ladder("qwen2_vl") if budget.tokens <= 256]
    packer = Packer(budgets, PRICES[prices](budgets), 64)
    over = [spec_of((36, 64))._replace(windows=0)] * count
    (group,) = packer.pack(over)
    check_groups(packer, over, [group])
    assert group.cost == pytest.approx(packer.costs.eager(Load.of(over)))
    for specs in (over + [spec_of((4, 4))._replace(windows=0)] * 2, over[:4]):
        groups = packer.pack(specs)
        check_groups(packer, specs, groups)
        assert sum(group.budget is None for group in groups) == 1
        assert price(packer, specs, groups) <= packer.costs.eager(Load.of(specs))


def test_a_small_item_joins_an_eager_run_that_must_be_where_that_is_cheaper() -> None:
    (budget,) = [Budget(64, 256, 8, 256, 0)]
    table = CostTable({budget: 2.0}, 0.0, 0.0, 0.1, eager_floor_ms=9.0, eager_gap_ms=0.0)
    specs = [EncoderItemSpec(64, 16, 1, 64), EncoderItemSpec(400, 100, 1, 400)]
    (group,) = Packer([budget], table, 8).pack(specs)
    assert (group.budget, group.reasons) == (None, ("cheaper", "over tokens"))
    first, second = Packer([budget], RowCosts(), 8).pack(specs)  # no clock: what fits is replayed
    assert (first.budget, second.reasons) == (budget, ("over tokens",))


def test_many_items_that_leave_a_large_budget_half_empty_go_into_smaller_ones() -> None:
    budgets = [Budget(n, 4 * n, 64, 4 * n, 0) for n in (64, 1024, 8192)]
    packer = Packer(budgets, RowCosts(), 64)
    specs = [EncoderItemSpec(1024, 256, 1, 1024, 0)] * 20  # 5,120 tokens
    groups = packer.pack(specs)
    check_groups(packer, specs, groups)
    assert [group.budget.tokens for group in groups if group.budget] == [1024] * 5


def test_rows_are_a_capacity_of_their_own_beyond_twelve_items_too() -> None:
    budgets = [Budget(8, 8, 8, 8, 0), Budget(64, 64, 64, 64, 0)]
    packer = Packer(budgets, RowCosts(), 64)
    specs = [EncoderItemSpec(4, 1, 1, 4, 0)] * 130  # the rows of a budget run out first
    groups = packer.pack(specs)
    check_groups(packer, specs, groups)
    assert all(group.budget for group in groups)


def test_beyond_twelve_items_too_one_eager_run_is_taken_where_it_is_cheaper() -> None:
    (budget,) = [Budget(64, 256, 8, 256, 0)]
    table = CostTable({budget: 2.0}, 0.0, 0.0, 0.1, eager_floor_ms=5.0, eager_gap_ms=-1.9)
    specs = [EncoderItemSpec(256, 64, 1, 256, 0)] * 20
    groups = Packer([budget], table, 8).pack(specs)
    assert [(group.items, group.budget) for group in groups] == [(tuple(range(20)), None)]


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("count", [1, 7, 12, 13, 100, 2000])
def test_packing_is_deterministic_whole_and_within_capacities(count: int, prices: str) -> None:
    budgets = ladder("qwen2_5_vl")
    specs = draw_specs(random.Random(count), count)
    packer = Packer(budgets, PRICES[prices](budgets), 16)
    groups = packer.pack(specs)
    check_groups(packer, specs, groups)
    assert groups == packer.pack(specs) == Packer(budgets[::-1], packer.costs, 16).pack(specs)


@given(data=st.data())
@settings(max_examples=150)
def test_any_items_go_into_any_ladder(data: st.DataObject) -> None:
    sizes = st.integers(1, 60)
    budgets = data.draw(
        st.lists(
            st.builds(
                lambda n, s, x, w: Budget(n, 4 * n, s, x, w),
                sizes, sizes, st.integers(1, 240), sizes,
            ),
            min_size=1, max_size=5, unique_by=lambda budget: (budget.tokens, budget.segments),
        )
    )  # fmt: skip
    specs = data.draw(
        st.lists(
            st.builds(
                lambda t, n, w: EncoderItemSpec(4 * t * n, t * n, t, 4 * n, w),
                st.integers(1, 6), st.integers(1, 20), st.integers(1, 9),
            ),
            max_size=20,
        )
    )  # fmt: skip
    packer = Packer(budgets, RowCosts(), data.draw(st.integers(1, 8)))
    groups = packer.pack(specs)
    check_groups(packer, specs, groups)
    for group in groups:
        if group.budget is None:
            assert all(packer.overflow(specs[item]) for item in group.items)


def test_every_item_within_capacity_is_replayed_where_nothing_is_timed() -> None:
    budgets = ladder("qwen2_5_vl")
    for count in (1, 12, 500):
        specs = draw_specs(random.Random(count), count)
        packer = Packer(budgets, RowCosts(), 64)
        assert all(group.budget for group in packer.pack(specs))


def test_eager_is_chosen_where_it_is_cheaper_and_said() -> None:
    (budget,) = [Budget(1024, 4096, 8, 4096, 0)]
    table = CostTable({budget: 20.0}, 0.0, 0.0, 0.1, eager_floor_ms=2.0, eager_gap_ms=0.0)
    (group,) = Packer([budget], table, 8).pack([spec_of((4, 4))._replace(windows=0)])
    assert group.budget is None
    assert group.reasons == ("cheaper",)
