"""Budgets: four ways to configure, numbers of any kind, and how they are rounded."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from encoders.contract import EncoderItemSpec, GridLike
from graphwrap import fit_budgets
from graphwrap.budgets import choose_budgets
from tests.oracles import BY_NAME
from tests.support.graphs.cases import (
    NUMBERS,
    OURS,
    at_true_size,
    is_tiled,
    pixels_for,
    static,
    tokens,
)
from tests.support.towers.toy_encoder import ToyEncoder

# --- four ways to configure -----------------------------------------------------------------------


def test_both_given_are_kept() -> None:
    chosen = choose_budgets(ToyEncoder(), [32, 8, 16, 8], max_batch_size=5)
    assert tokens(chosen) == [8, 16, 32]
    assert chosen.max_batch_size == 5
    assert not chosen.inferred


@pytest.mark.parametrize(("budgets", "items"), [([8, 32], 8), ([500, 64], 64), ([1], 1)])
def test_only_budgets_infer_the_items_of_a_replay(budgets: list[int], items: int) -> None:
    chosen = choose_budgets(ToyEncoder(), budgets)
    assert tokens(chosen) == sorted(budgets)
    assert chosen.max_batch_size == items


@pytest.mark.parametrize(("items", "start"), [(2, 4), (4, 4), (10, 10), (100, 100)])
def test_only_items_start_budgets_where_each_has_a_token(items: int, start: int) -> None:
    chosen = choose_budgets(ToyEncoder(), max_batch_size=items)
    assert tokens(chosen)[0] == start
    assert chosen.max_batch_size == items
    assert chosen.inferred


@pytest.mark.parametrize("name", OURS)
def test_neither_infers_budgets_over_the_encoders_range(name: str) -> None:
    encoder = at_true_size(name)
    chosen = choose_budgets(encoder)
    low, high = encoder.budget_range
    assert (tokens(chosen)[0], tokens(chosen)[-1]) == (low, high)
    assert len(chosen.budgets) <= 48
    assert chosen.max_batch_size == min(64, low)
    assert list(chosen.budgets) == sorted(set(chosen.budgets))


@pytest.mark.parametrize(
    ("name", "views"),
    [("step3_vl", [8, 36]), ("step3", [8, 36]), ("deepseek_ocr", [16, 16])],
)
def test_towers_whose_views_cost_much_get_few_budgets(name: str, views: list[int]) -> None:
    """A graph per view count up to 64 would take minutes to capture and time, and gain nothing."""
    family = BY_NAME[name]
    with torch.device("meta"):
        encoder = family.encoder_class(family.config_class.from_hf(family.config))
    assert [len(choose_budgets(path).budgets) for path in encoder.paths.values()] == views


CONFIGURED: list[dict[str, int]] = [
    {},
    {"max_batch_size": 3},
    {"max_graphs": 5},
    {"min_budget": 200, "max_budget": 3000},
    {"max_frames_per_batch": 40},
]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("settings_", CONFIGURED, ids=str)
def test_every_choice_has_room_for_its_items_and_whole_tiles(
    name: str, settings_: dict[str, int]
) -> None:
    encoder = at_true_size(name)
    chosen = choose_budgets(encoder, **settings_)
    assert 1 <= chosen.max_batch_size <= tokens(chosen)[0]
    assert len(chosen.budgets) <= settings_.get("max_graphs", 48)
    for budget in chosen.budgets:
        spec = encoder.item_specs([encoder.grid_for(budget.tokens)])[0]
        assert (spec.output_tokens, spec.input_size) == (budget.tokens, budget.rows)
        assert budget.segments >= 1
        assert budget.longest_segment >= 1
        assert budget.segments * budget.longest_segment >= budget.rows or is_tiled(name)


def test_bounds_clip_the_inferred_budgets_and_may_be_one_number() -> None:
    assert tokens(choose_budgets(ToyEncoder(), min_budget=10, max_budget=20))[::99] == [10]
    assert tokens(choose_budgets(ToyEncoder(), min_budget=12, max_budget=12)) == [12]
    assert tokens(choose_budgets(ToyEncoder(), max_graphs=1)) == [64]
    assert tokens(choose_budgets(ToyEncoder(), min_budget=100)) == [100]


# --- integers of any kind -------------------------------------------------------------------------

ITERABLES: dict[str, Callable[[list[int]], Any]] = {
    "a tuple": tuple,
    "a set": set,
    "a generator": iter,
    "an array": np.array,
    "a small array": lambda counts: np.array(counts, dtype=np.uint8),
    "a list of NumPy integers": lambda counts: [np.int32(count) for count in counts],
    "a tensor": torch.tensor,
}


@pytest.mark.parametrize("kind", ITERABLES)
def test_budgets_and_counts_may_be_any_iterable_of_integers(kind: str) -> None:
    make = ITERABLES[kind]
    assert tokens(choose_budgets(ToyEncoder(), make([64, 8, 200]))) == [8, 64, 200]
    fitted = fit_budgets(make([3, 200, 5, 180]), 2)
    assert fitted == [5, 200]
    assert {type(budget) for budget in fitted} == {int}


class NumPyEncoder(ToyEncoder):
    """Counts in NumPy, as an encoder may whose grids are arrays."""

    budget_range = (np.int64(4), np.int64(64))

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        specs = super().item_specs(grid_thw)
        return [EncoderItemSpec(*(np.int64(number) for number in spec)) for spec in specs]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_leave_no_trace(name: str) -> None:
    chosen = choose_budgets(NumPyEncoder(), **{name: np.int64(8)})
    assert chosen == choose_budgets(ToyEncoder(), **{name: 8})
    assert {type(number) for budget in chosen.budgets for number in budget} == {int}
    graphed = static(ToyEncoder(), None, **{name: np.int64(8)})
    graphed(pixels_for(graphed.encoder, [[1, 1, 8]]), [[1, 1, 8]])
    json.dumps(graphed.stats().to_dict())


# --- rounding -------------------------------------------------------------------------------------


def test_budgets_are_rounded_up_to_whole_tiles_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match=r"\[1, 257, 512\] rounded up .*\[256, 512\]"):
        chosen = choose_budgets(at_true_size("intern_vit_300m"), [257, 1, 512])
    assert tokens(chosen) == [256, 512]
    assert [budget.rows for budget in chosen.budgets] == [1, 2]


def test_budgets_that_are_whole_are_not_spoken_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_budgets(at_true_size("intern_vit_300m"), [256, 1024])
        choose_budgets(at_true_size("qwen2_5_vl"), [1, 17, 257])
