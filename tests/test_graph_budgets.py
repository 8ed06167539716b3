"""Budgets: four ways to configure, what is refused, what is rounded, what each of them holds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from encoders.contract import EncoderItemSpec, GridLike
from encoders.vision_encoder import VisionEncoder
from graph_cases import OURS, is_tiled, pixels_for, static, tower
from graphwrap import Budget, GraphedEncoder, fit_budgets
from graphwrap.budgets import Batch, BudgetSet, choose_budgets
from graphwrap.packing import Packer
from graphwrap.prices import Prices
from oracles import BY_NAME, edited
from toy_encoder import ToyEncoder


def tokens(chosen: BudgetSet) -> list[int]:
    return sorted({budget.tokens for budget in chosen.budgets})


def at_true_size(name: str) -> VisionEncoder:
    """The published tower without its weights."""
    family = BY_NAME[name]
    with torch.device("meta"):
        return family.build(family.config_class.from_hf(edited(family.config)))


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


@pytest.mark.parametrize("number", [64, np.int64(64), np.array(64), torch.tensor(64)], ids=repr)
def test_a_lone_number_is_refused_and_shown_as_a_list(number: Any) -> None:
    with pytest.raises(ValueError, match=r"^budgets=.*64.*: must be a list: write \[.*64.*\]"):
        static(ToyEncoder(), number)
    with pytest.raises(ValueError, match=r"^token_counts=.*64.*: must be a list: write \["):
        fit_budgets(number)


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


def test_more_items_than_the_smallest_budget_names_both_numbers_and_the_fix() -> None:
    with pytest.raises(ValueError, match=r"max_batch_size=9 .* 8 tokens .*<=8 or budgets>=9"):
        static(ToyEncoder(), [16, 8], max_batch_size=9)
    static(ToyEncoder(), [16, 8], max_batch_size=8)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (
            {"min_budget": 20, "max_budget": 10},
            r"^max_budget=10 is too small: min_budget=20; use max_budget>=20, or lower",
        ),
        (
            {"max_batch_size": 20, "max_budget": 10},
            r"^max_budget=10 is too small: max_batch_size=20, .* use max_budget>=20, or lower",
        ),
        ({"max_budget": 2}, r"^max_budget=2 .* the encoder's range starts at 4; use max_budget>=4"),
        (
            {"min_budget": 3, "max_batch_size": 5},
            r"^max_batch_size=5 items do not fit .* 3 tokens .*<=3 or min_budget>=5$",
        ),
    ],
    ids=str,
)
def test_bounds_that_cross_name_the_numbers_the_user_gave(given: dict[str, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        static(ToyEncoder(), None, **given)


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
        ("outputs", ("pooled",), "one or more of last_hidden_state, pooler_output"),
        ("outputs", (), "one or more of last_hidden_state"),
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
        chosen = choose_budgets(at_true_size("intern_vit_300m"), [257, 1, 512])
    assert tokens(chosen) == [256, 512]
    assert [budget.rows for budget in chosen.budgets] == [1, 2]


def test_budgets_that_are_whole_are_not_spoken_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_budgets(at_true_size("intern_vit_300m"), [256, 1024])
        choose_budgets(at_true_size("qwen2_5_vl"), [1, 17, 257])


# --- what budgets hold ----------------------------------------------------------------------------

CLIPS = {"32 frames of 448x448": (32, 448), "64 frames of 224x224": (64, 224)}
WITH_VIDEO = [name for name in OURS if name != "step3_vl"]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", WITH_VIDEO)
def test_default_clips_fit_the_default_budgets_at_true_size(name: str, clip: str) -> None:
    encoder = at_true_size(name)
    frames, side = CLIPS[clip]
    if is_tiled(name):
        grid = (frames, 32, 32)
    else:
        patch = encoder.config.patch_size
        merged = patch * encoder.config.spatial_merge_size
        grid = (frames // 2, *[round(side / merged) * merged // patch] * 2)
    spec = encoder.item_specs([grid])[0]
    chosen = choose_budgets(encoder)
    packer = Packer(Prices.unmeasured(chosen.budgets), chosen.max_batch_size, 16_384)
    assert packer.why_eager(spec) == "cheaper"
    (group,) = packer.pack([spec])
    assert group.budget is not None
    assert group.budget.segments >= spec.segments == frames // (1 if is_tiled(name) else 2)
    assert group.budget.longest_segment >= spec.longest_segment


@pytest.mark.parametrize("items", [1, 2, 8, 64])
def test_clips_of_large_frames_fit_whatever_number_of_items_a_replay_takes(items: int) -> None:
    """By default 8 long segments or 64 short ones, also where a replay takes one item."""
    encoder = at_true_size("qwen2_vl")
    chosen = choose_budgets(encoder, max_batch_size=items)
    assert {budget.segments for budget in chosen.budgets} == {8, 64}
    (group,) = Packer(Prices.unmeasured(chosen.budgets), items, 16_384).pack(
        encoder.item_specs([(4, 46, 46)])
    )
    assert group.budget is not None
    assert group.budget.tokens <= 1.2 * 4 * 23 * 23


@pytest.mark.parametrize("name", ["max_budget", "max_frames_per_batch", "min_budget"])
def test_numbers_beyond_32_bit_offsets_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=1000.*at most 2147483647"):
        choose_budgets(ToyEncoder(), **{name: 10**400})
    with pytest.raises(ValueError, match=r"budget=1000.*at most 2147483647"):
        choose_budgets(ToyEncoder(), [8, 10**30])


def of_four_frames(name: str) -> list[int]:
    """A budget of four tiles, or of 16 tokens."""
    return [tower(name).item_specs([[4, 8, 8]])[0].output_tokens] if is_tiled(name) else [16]


@pytest.mark.parametrize("name", OURS)
def test_a_video_of_more_frames_than_any_budget_is_eager_and_counted(name: str) -> None:
    encoder = tower(name)
    side = 8 if is_tiled(name) else 2
    grids = [[1, side, side], [9, side, side]]
    pixels = pixels_for(encoder, grids)
    graphed = static(encoder, of_four_frames(name), max_frames_per_batch=4)
    output = graphed(pixels, grids)
    assert torch.allclose(output.pooler_output, encoder(pixels, grids).pooler_output, atol=1e-4)
    stats = graphed.stats()
    assert stats.eager_items == 1
    assert list(stats.eager_reasons) == ["over tokens" if is_tiled(name) else "over segments"]


@pytest.mark.parametrize("name", OURS)
def test_an_item_over_every_budget_is_an_error_if_so_configured(name: str) -> None:
    encoder = tower(name)
    grid = [9, 8, 8]
    graphed = static(encoder, of_four_frames(name), on_overflow="raise")
    with pytest.raises(
        ValueError, match=r"item with grid \(9, 8, 8\) is over every budget .*\(tok"
    ):
        graphed(pixels_for(encoder, [grid]), [grid])


def test_each_capacity_alone_makes_an_item_overflow() -> None:
    budget = Budget(tokens=64, rows=128, segments=4, longest_segment=64, windows=6)
    packer = Packer(Prices.unmeasured([budget]), 8, 16_384)
    fits = EncoderItemSpec(128, 64, 2, 64, 6)
    assert packer.why_eager(fits) == "cheaper"
    assert budget.fits(Batch.of([fits]))
    for change, reason in [
        ({"output_tokens": 65}, "tokens"),
        ({"input_size": 129}, "tokens"),
        ({"segments": 5}, "segments"),
        ({"longest_segment": 65}, "longest segment"),
        ({"windows": 7}, "windows"),
    ]:
        assert packer.why_eager(fits._replace(**change)) == f"over {reason}"
        assert budget.exceeded_by(Batch.of([fits._replace(**change)])) == reason


def test_the_short_shapes_longest_segment_is_rounded_up() -> None:
    short = max(choose_budgets(ToyEncoder(), [7]).budgets, key=lambda budget: budget.segments)
    assert (short.rows, short.longest_segment) == (14, 2)


def test_frames_given_are_the_segments_of_every_budget() -> None:
    for frames in (1, 3, 8, 50):
        chosen = choose_budgets(ToyEncoder(), [64], max_frames_per_batch=frames)
        assert max(budget.segments for budget in chosen.budgets) == frames
