"""Budgets: four ways to configure, what is refused, what is rounded, what a ladder holds."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from graph_cases import OURS, is_tiled, pixels_for, static, tower, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import BY_NAME, edited
from toy_encoder import ToyEncoder

from encoders.contract import EncoderItemSpec, VisionEncoder
from graphwrap import Budget, GraphedEncoder, fit_budgets
from graphwrap.budgets import Ladder, Load, plan_ladder
from graphwrap.costs import RowCosts
from graphwrap.packing import Packer


def tokens(ladder: Ladder) -> list[int]:
    return sorted({budget.tokens for budget in ladder.budgets})


def at_true_size(name: str) -> VisionEncoder:
    """The published tower without its weights."""
    family = BY_NAME[name]
    with torch.device("meta"):
        return family.encoder_class(family.config_class.from_hf(edited(family.config)))


# --- four ways to configure -----------------------------------------------------------------------


def test_both_given_are_kept() -> None:
    ladder = plan_ladder(ToyEncoder(), [32, 8, 16, 8], max_batch_size=5)
    assert tokens(ladder) == [8, 16, 32]
    assert ladder.max_batch_size == 5
    assert not ladder.inferred


@pytest.mark.parametrize(("budgets", "items"), [([8, 32], 8), ([500, 64], 64), ([1], 1)])
def test_only_budgets_infer_the_items_of_a_replay(budgets: list[int], items: int) -> None:
    ladder = plan_ladder(ToyEncoder(), budgets)
    assert tokens(ladder) == sorted(budgets)
    assert ladder.max_batch_size == items


@pytest.mark.parametrize(("items", "start"), [(2, 4), (4, 4), (10, 10), (100, 100)])
def test_only_items_start_the_ladder_where_each_has_a_token(items: int, start: int) -> None:
    ladder = plan_ladder(ToyEncoder(), max_batch_size=items)
    assert tokens(ladder)[0] == start
    assert ladder.max_batch_size == items
    assert ladder.inferred


@pytest.mark.parametrize("name", OURS)
def test_neither_infers_a_ladder_over_the_encoders_range(name: str) -> None:
    encoder = at_true_size(name)
    ladder = plan_ladder(encoder)
    low, high = encoder.budget_range
    assert (tokens(ladder)[0], tokens(ladder)[-1]) == (low, high)
    assert len(ladder.budgets) <= 48
    assert ladder.max_batch_size == min(64, low)
    assert list(ladder.budgets) == sorted(set(ladder.budgets))


CONFIGURED: list[dict[str, int]] = [
    {},
    {"max_batch_size": 3},
    {"max_graphs": 5},
    {"min_budget": 200, "max_budget": 3000},
    {"max_frames_per_batch": 40},
]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("settings_", CONFIGURED, ids=str)
def test_every_ladder_has_room_for_its_items_and_whole_tiles(
    name: str, settings_: dict[str, int]
) -> None:
    encoder = at_true_size(name)
    ladder = plan_ladder(encoder, **settings_)
    assert 1 <= ladder.max_batch_size <= tokens(ladder)[0]
    assert len(ladder.budgets) <= settings_.get("max_graphs", 48)
    for budget in ladder.budgets:
        spec = encoder.item_specs([encoder.grid_for(budget.tokens)])[0]
        assert (spec.output_tokens, spec.input_size) == (budget.tokens, budget.rows)
        assert budget.segments >= 1
        assert budget.longest_segment >= 1
        assert budget.segments * budget.longest_segment >= budget.rows or is_tiled(name)


def test_bounds_clip_the_inferred_ladder_and_may_be_one_number() -> None:
    assert tokens(plan_ladder(ToyEncoder(), min_budget=10, max_budget=20))[::99] == [10]
    assert tokens(plan_ladder(ToyEncoder(), min_budget=12, max_budget=12)) == [12]
    assert tokens(plan_ladder(ToyEncoder(), max_graphs=1)) == [64]
    assert tokens(plan_ladder(ToyEncoder(), min_budget=100)) == [100]


# --- what is refused ------------------------------------------------------------------------------

NUMBERS = ["max_batch_size", "max_frames_per_batch", "min_budget", "max_budget", "max_graphs"]


@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "8", True, float("nan")], ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_must_be_a_positive_integer(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.*must be a positive integer"):
        static(ToyEncoder(), None, **{name: value})


@pytest.mark.parametrize("value", [0, -3, 2.5, 8.0, "8", None, False], ids=repr)
def test_every_budget_must_be_a_positive_integer(value: Any) -> None:
    with pytest.raises(ValueError, match=r"budget=.*must be a positive integer"):
        static(ToyEncoder(), [8, value])


@pytest.mark.parametrize("empty", [[], ()], ids=repr)
def test_an_empty_list_of_budgets_is_refused(empty: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="budgets is empty"):
        static(ToyEncoder(), empty)


def test_more_items_than_the_smallest_budget_names_both_numbers_and_the_fix() -> None:
    with pytest.raises(ValueError, match=r"max_batch_size=9 .* 8 tokens .*<=8 or budgets>=9"):
        static(ToyEncoder(), [16, 8], max_batch_size=9)
    static(ToyEncoder(), [16, 8], max_batch_size=8)


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match=r"min_budget=20 is above max_budget=10"):
        static(ToyEncoder(), None, min_budget=20, max_budget=10)
    with pytest.raises(ValueError, match=r"=20 .*max_budget=10|max_batch_size=20"):
        static(ToyEncoder(), None, max_batch_size=20, max_budget=10)


def test_bounds_beside_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="min_budget and max_budget only bound inferred ones"):
        static(ToyEncoder(), [8], max_budget=16)


def test_more_budgets_than_max_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 budgets, max_graphs=2"):
        static(ToyEncoder(), [4, 8, 16], max_graphs=2)


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("backend", "graphs", "must be one of auto, cudagraph, static, eager"),
        ("on_overflow", "drop", "must be one of eager, raise"),
        ("outputs", ("pooled",), "must be one of last_hidden_state, pooler_output"),
        ("outputs", (), "outputs is empty"),
        ("backend", "cudagraph", "needs the encoder on CUDA, it is on cpu"),
    ],
)
def test_other_settings_name_their_choices(setting: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        GraphedEncoder(ToyEncoder(), [8], **{setting: value})


def test_nothing_is_allocated_before_the_configuration_is_checked() -> None:
    """A tower on meta has no memory to give; its configuration is refused all the same."""
    with pytest.raises(ValueError, match="positive integer"):
        static(at_true_size("qwen3_vl"), [-1])


# --- rounding -------------------------------------------------------------------------------------


def test_budgets_are_rounded_up_to_whole_tiles_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match=r"\[1, 257, 512\] rounded up .*\[256, 512\]"):
        ladder = plan_ladder(at_true_size("intern_vit_300m"), [257, 1, 512])
    assert tokens(ladder) == [256, 512]
    assert [budget.rows for budget in ladder.budgets] == [1, 2]


def test_budgets_that_are_whole_are_not_spoken_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_ladder(at_true_size("intern_vit_300m"), [256, 1024])
        plan_ladder(at_true_size("qwen2_5_vl"), [1, 17, 257])


# --- what a ladder holds --------------------------------------------------------------------------

CLIPS = {"32 frames of 448x448": (32, 448), "64 frames of 224x224": (64, 224)}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", OURS)
def test_default_clips_fit_the_default_ladder_at_true_size(name: str, clip: str) -> None:
    encoder = at_true_size(name)
    frames, side = CLIPS[clip]
    if is_tiled(name):
        grid = (frames, 32, 32)
    else:
        patch = encoder.config.patch_size
        merged = patch * encoder.config.spatial_merge_size
        grid = (frames // 2, *[round(side / merged) * merged // patch] * 2)
    spec = encoder.item_specs([grid])[0]
    ladder = plan_ladder(encoder)
    packer = Packer(ladder.budgets, RowCosts(), ladder.max_batch_size)
    assert packer.overflow(spec) is None
    (group,) = packer.pack([spec])
    assert group.budget is not None
    assert group.budget.segments >= spec.segments == frames // (1 if is_tiled(name) else 2)
    assert group.budget.longest_segment >= spec.longest_segment


@pytest.mark.parametrize("name", OURS)
def test_a_video_of_more_frames_than_any_budget_is_eager_and_counted(name: str) -> None:
    encoder = tower(name)
    side = 8 if is_tiled(name) else 2
    grids = [[1, side, side], [9, side, side]]
    pixels = pixels_for(encoder, grids)
    graphed = static(encoder, [64] if is_tiled(name) else [16], max_frames_per_batch=4)
    output = graphed(pixels, grids)
    assert torch.allclose(output.pooler_output, encoder(pixels, grids).pooler_output, atol=1e-4)
    stats = graphed.stats()
    assert stats.eager_items == 1
    assert list(stats.eager_reasons) == ["over tokens" if is_tiled(name) else "over segments"]


@pytest.mark.parametrize("name", OURS)
def test_an_item_over_every_budget_is_an_error_if_so_configured(name: str) -> None:
    encoder = tower(name)
    grid = [9, 8, 8]
    graphed = static(encoder, [64] if is_tiled(name) else [16], on_overflow="raise")
    with pytest.raises(ValueError, match=r"item with grid \(9, 8, 8\) is over every budget \(tok"):
        graphed(pixels_for(encoder, [grid]), [grid])


def test_each_capacity_alone_makes_an_item_overflow() -> None:
    budget = Budget(tokens=64, rows=128, segments=4, longest_segment=64, windows=6)
    packer = Packer([budget], RowCosts(), 8)
    fits = EncoderItemSpec(128, 64, 2, 64, 6)
    assert packer.overflow(fits) is None
    for change, reason in [
        ({"output_tokens": 65}, "tokens"),
        ({"input_size": 129}, "tokens"),
        ({"segments": 5}, "segments"),
        ({"longest_segment": 65}, "longest segment"),
        ({"windows": 7}, "windows"),
    ]:
        assert packer.overflow(fits._replace(**change)) == reason
        assert budget.refuses(Load.of([fits._replace(**change)])) == reason


def test_frames_given_are_the_segments_of_every_budget() -> None:
    for frames in (1, 3, 8, 50):
        ladder = plan_ladder(ToyEncoder(), [64], max_frames_per_batch=frames)
        assert max(budget.segments for budget in ladder.budgets) == frames


# --- fit_budgets ----------------------------------------------------------------------------------


def padding(ladder: Sequence[int], counts: Sequence[int]) -> int:
    return sum(min(budget for budget in ladder if budget >= count) - count for count in counts)


def least_padding(counts: Sequence[int], graphs: int) -> int:
    """By trying every ladder made of sizes that occur (no other budget is ever better)."""
    sizes = sorted(set(counts))
    choices = itertools.combinations(sizes[:-1], min(graphs, len(sizes)) - 1)
    return min(padding([*choice, sizes[-1]], counts) for choice in choices)


@given(
    counts=st.lists(st.integers(1, 60) | st.integers(1, 10_000), min_size=1, max_size=11),
    graphs=st.integers(1, 6),
)
@settings(max_examples=400)
def test_a_fitted_ladder_pads_as_little_as_any(counts: list[int], graphs: int) -> None:
    ladder = fit_budgets(counts, graphs)
    assert ladder == sorted(set(ladder))
    assert 1 <= len(ladder) <= graphs
    assert ladder[-1] == max(counts)
    assert padding(ladder, counts) == least_padding(counts, graphs)


@given(
    counts=st.lists(st.sampled_from([1, 2, 3, 5, 8, 13, 21, 34]), min_size=1, max_size=60),
    graphs=st.integers(1, 5),
)
@settings(max_examples=200)
def test_a_fitted_ladder_knows_how_often_each_size_occurs(counts: list[int], graphs: int) -> None:
    assert padding(fit_budgets(counts, graphs), counts) == least_padding(counts, graphs)


def test_a_fitted_ladder_of_thousands_of_sizes_takes_a_moment() -> None:
    ladder = fit_budgets([1 + n * n % 7919 for n in range(20_000)], 48)
    assert len(ladder) == 48


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


def test_a_fitted_ladder_replays_its_sizes_without_padding() -> None:
    counts = [3, 7, 7, 11, 30]
    graphed = toy(fit_budgets(counts))
    for count in counts:
        grids = [[1, 1, 2 * count]]
        graphed(pixels_for(graphed.encoder, grids), grids)
    assert graphed.stats().padding == 0.0
