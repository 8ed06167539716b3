"""Which budgets: the default ones, and those that ``fit_budgets`` finds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphwrap import fit_budgets
from graphwrap.budget_sizes import default_budgets, square_counts
from graphwrap.budgets import Batch, choose_budgets
from tests.support.graphs.cases import at_true_size, pixels_for, tokens, toy

# --- the default budgets --------------------------------------------------------------------------


def test_the_default_budgets_hold_squares_and_step_by_a_sixth_at_most() -> None:
    budgets = default_budgets(64, 8192, 40)
    assert len(budgets) == 40
    assert set(budgets) >= set(square_counts(64, 8192))
    assert max(after / before for before, after in pairwise(budgets)) <= 7 / 6
    assert min(size for size in budgets if size >= 1369) <= 1.05 * 1369  # 1024x1024, patches of 14


@pytest.mark.parametrize(("low", "high"), [(4, 512), (64, 512), (64, 1024), (64, 8192), (7, 9)])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 40, 10_000])
def test_default_budgets_climb_from_low_to_high_without_useless_steps(
    low: int, high: int, count: int
) -> None:
    budgets = default_budgets(low, high, count)
    assert budgets == sorted(set(budgets))
    assert len(budgets) <= count
    assert budgets[-1] == high
    assert budgets[0] == (low if count > 1 else high)
    if count <= 40:  # where there is one token to save on a hundred, the graph is worth more
        steps = [(a, b) for a, b in pairwise(budgets) if b - a < a / 50]
        assert not steps, steps


@pytest.mark.parametrize(("most", "graphs"), [(5, 5), (16, 16), (48, 48), (64, 64), (100, 64)])
def test_whole_tiles_are_filled_up_to_as_many_graphs_as_asked(most: int, graphs: int) -> None:
    chosen = tokens(choose_budgets(at_true_size("intern_vit_300m"), max_graphs=most))
    assert len(chosen) == graphs
    assert most < 64 or chosen == [256 * n for n in range(1, 65)]


BATCHES = [(count, side) for side in (224, 448) for count in (1, 2, 4, 8, 16, 32, 64)]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_batches_of_squares_replay_without_padding(name: str) -> None:
    encoder = at_true_size(name)
    budgets = choose_budgets(encoder).budgets
    replayed = []
    for count, side in BATCHES:
        patches = side // encoder.config.patch_size
        batch = Batch.of(encoder.item_specs([(1, patches, patches)] * count))
        if budgets[0].tokens <= batch.tokens <= budgets[-1].tokens:
            exact = [budget for budget in budgets if budget.tokens == batch.tokens]
            assert any(budget.exceeded_by(batch) is None for budget in exact), (count, side)
            replayed.append((count, side))
    assert replayed == BATCHES[name == "qwen3_vl" : -1]  # 49 tokens are too few, 64x448 too many


# --- fit_budgets ----------------------------------------------------------------------------------


def padding(budgets: Sequence[int], counts: Sequence[int]) -> int:
    return sum(min(budget for budget in budgets if budget >= count) - count for count in counts)


def least_padding(counts: Sequence[int], graphs: int) -> int:
    """By trying all budgets made of sizes that occur (no other budget is ever better)."""
    sizes = sorted(set(counts))
    choices = itertools.combinations(sizes[:-1], min(graphs, len(sizes)) - 1)
    return min(padding([*choice, sizes[-1]], counts) for choice in choices)


@given(
    counts=st.lists(st.integers(1, 60) | st.integers(1, 10_000), min_size=1, max_size=11),
    graphs=st.integers(1, 6),
)
@settings(max_examples=400)
def test_fitted_budgets_pad_as_little_as_any(counts: list[int], graphs: int) -> None:
    budgets = fit_budgets(counts, graphs)
    assert budgets == sorted(set(budgets))
    assert 1 <= len(budgets) <= graphs
    assert budgets[-1] == max(counts)
    assert padding(budgets, counts) == least_padding(counts, graphs)


@given(
    counts=st.lists(st.sampled_from([1, 2, 3, 5, 8, 13, 21, 34]), min_size=1, max_size=60),
    graphs=st.integers(1, 5),
)
@settings(max_examples=200)
def test_fitted_budgets_know_how_often_each_size_occurs(counts: list[int], graphs: int) -> None:
    assert padding(fit_budgets(counts, graphs), counts) == least_padding(counts, graphs)


def test_counts_of_few_bits_do_not_overflow() -> None:
    counts = [3] * 50_000 + [60_000] * 50_000 + [70_000]
    assert fit_budgets(np.array(counts, dtype=np.int32), 2) == fit_budgets(counts, 2)


def test_fitting_budgets_to_thousands_of_sizes_takes_a_moment() -> None:
    budgets = fit_budgets([1 + n * n % 7919 for n in range(20_000)], 48)
    assert len(budgets) == 48


@pytest.mark.parametrize(
    ("counts", "graphs", "rule"),
    [
        ([], 4, "token_counts is empty"),
        ([5, 0], 4, "token count=0: must be a positive integer"),
        ([5, 2.5], 4, "token count=2.5"),
        ([5], 0, "max_graphs=0: must be a positive integer"),
        ([5], True, "max_graphs=True"),
    ],
)
def test_fit_budgets_refuses_what_is_no_count(counts: Any, graphs: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        fit_budgets(counts, graphs)


def test_fitted_budgets_replay_their_sizes_without_padding() -> None:
    counts = [3, 7, 7, 11, 30]
    graphed = toy(fit_budgets(counts))
    for count in counts:
        grids = [[1, 1, 2 * count]]
        graphed(pixels_for(graphed.encoder, grids), grids)
    assert graphed.stats().padding == 0.0
