"""Replays give what the encoder gives: every family, every mix, whatever lay in the buffers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from graphwrap import Budget
from tests.oracles import BY_NAME, FEW_FAST, JOINING_TOWERS, Grids, slow
from tests.support.graphs.cases import (
    OURS,
    budgets_hit,
    budgets_of,
    is_tiled,
    mixes,
    pixels_for,
    single,
    static,
    tower,
    toy,
    unit_of,
)
from tests.support.graphs.outputs import (
    EVERY_FIELD,
    assert_same_bits,
    copy_of,
    fields,
    worst_distance,
)

MIXES = [
    "one image",
    "images",
    "a clip",
    "images and a clip",
    "with one over every budget",
]


def padded_eager(
    encoder: VisionEncoder, budget: Budget, pixels: Tensor, grids: Grids
) -> EncoderOutput:
    """The encoder itself on rows and metadata padded to a budget by hand; real rows only."""
    rows = torch.zeros(budget.rows, *pixels.shape[1:])
    rows[: len(pixels)] = pixels
    metadata = encoder.prepare_encoder_metadata(
        grids,
        max_frames_per_batch=budget.segments,
        max_seqlen_override=budget.longest_segment,
        max_input_size=budget.rows,
        max_windows_per_batch=budget.windows or None,
    )
    hidden, pooled, deep, *_ = encoder(rows, encoder_metadata=metadata)
    tokens = sum(spec.output_tokens for spec in encoder.item_specs(grids))
    assert hidden is not None
    assert pooled is not None
    assert deep is not None
    return EncoderOutput(
        hidden[: len(pixels)], pooled[:tokens], tuple(layer[:tokens] for layer in deep)
    )


@pytest.mark.parametrize("name", OURS)
def test_a_replay_is_padded_eager_bit_for_bit(name: str) -> None:
    encoder = tower(name)
    graphed = static(encoder, budgets_of(name), outputs=EVERY_FIELD)
    for grid in [*single(name), mixes(name)["a clip"][0]]:
        pixels = pixels_for(encoder, [grid])
        output = graphed(pixels, [grid])
        (budget,) = budgets_hit(graphed)
        assert_same_bits(output, padded_eager(encoder, budget, pixels, [grid]))
        graphed.reset_stats()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", OURS)
def test_a_replay_agrees_with_the_encoder_in_the_callers_order(name: str, mix: str) -> None:
    """To 2e-6: the CPU's matrix product may add in another order for other row counts."""
    encoder, grids = tower(name), mixes(name)[mix]
    pixels = pixels_for(encoder, grids)
    graphed = static(encoder, budgets_of(name), outputs=EVERY_FIELD)
    assert worst_distance(graphed(pixels, grids), encoder(pixels, grids)) <= 2e-6
    stats = graphed.stats()
    assert sum(budget.items for budget in stats.budgets) + stats.eager_items == len(grids)
    assert stats.eager_items == (mix == "with one over every budget")


@pytest.mark.parametrize("name", OURS)
def test_the_default_budgets_replay_images_and_clips(name: str) -> None:
    encoder, grids = tower(name), mixes(name)["images and a clip"]
    graphed = static(encoder, None, max_budget=16 * unit_of(name), max_graphs=8)
    pixels = pixels_for(encoder, grids)
    expected = encoder(pixels, grids)._replace(last_hidden_state=None)
    assert worst_distance(graphed(pixels, grids), expected) <= 2e-6
    assert graphed.stats().eager_items == 0


def test_the_toy_gives_the_bits_of_eager_in_every_mix() -> None:
    graphed = toy()
    for seed, grids in enumerate(
        [[[1, 1, 2]], [[2, 1, 4], [1, 2, 2]], [[1, 1, 2 * n] for n in range(1, 20)], [[1, 8, 10]]]
    ):
        pixels = pixels_for(graphed.encoder, grids, seed)
        assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))


SUBSETS = [*[(name,) for name in EVERY_FIELD], EVERY_FIELD[:2], EVERY_FIELD[1:]]


@pytest.mark.parametrize("outputs", SUBSETS, ids="+".join)
@pytest.mark.parametrize("name", ["intern_vit_300m", "qwen3_vl"])
def test_only_the_fields_asked_for_come_back(name: str, outputs: tuple[str, ...]) -> None:
    encoder, grids = tower(name), mixes(name)["with one over every budget"]
    pixels = pixels_for(encoder, grids)
    whole = static(encoder, budgets_of(name), outputs=EVERY_FIELD)(pixels, grids)
    output = static(encoder, budgets_of(name), outputs=outputs)(pixels, grids)
    for field in EVERY_FIELD:
        value, expected = getattr(output, field), getattr(whole, field)
        if field not in outputs:
            assert value is None
        elif isinstance(expected, tuple):
            assert len(value) == len(expected)
            for layer, wanted in zip(value, expected, strict=True):  # none in a family without
                assert torch.equal(layer, wanted)
        else:
            assert torch.equal(value, expected)


@pytest.mark.parametrize("name", OURS)
def test_nan_in_every_stale_buffer_changes_no_bit(name: str) -> None:
    encoder = tower(name)
    calls = [([grid], pixels_for(encoder, [grid])) for grid in single(name)]
    calls += [(grids, pixels_for(encoder, grids)) for grids in mixes(name).values()]
    clean = static(encoder, budgets_of(name), outputs=EVERY_FIELD)
    poisoned = static(encoder, budgets_of(name), outputs=EVERY_FIELD).capture(progress=False)
    for grids, pixels in [*calls, *calls[::-1]]:
        poisoned._poison()
        output = poisoned(pixels, grids)
        assert all(bool(value.isfinite().all()) for value in fields(output).values())
        assert_same_bits(output, clean(pixels, grids))


def test_poison_reaches_the_buffers() -> None:
    """Else the test above would hold for nothing."""
    graphed = toy(clone=False)
    output = graphed(pixels_for(graphed.encoder, [[1, 1, 8]]), [[1, 1, 8]])
    graphed._poison()
    assert all(bool(value.isnan().all()) for value in fields(output).values())


@pytest.mark.parametrize("name", OURS)
def test_nan_pixels_of_an_earlier_call_do_not_outlive_it(name: str) -> None:
    encoder = tower(name)
    graphed = static(encoder, budgets_of(name)[-1:], outputs=EVERY_FIELD)
    large, small = single(name)[-1], single(name)[0]
    pixels = pixels_for(encoder, [small])
    before = graphed(pixels, [small])
    graphed(pixels_for(encoder, [large]) * float("nan"), [large])
    assert_same_bits(graphed(pixels, [small]), before)


@pytest.mark.parametrize("name", [name for name in OURS if not is_tiled(name)])
def test_boundaries_that_differ_at_equal_totals_are_not_confused(name: str) -> None:
    """Equal rows, tokens and segments: only the metadata tells these calls apart."""
    encoder = tower(name)
    graphed = static(encoder, budgets_of(name)[-1:], outputs=EVERY_FIELD)
    calls = [
        [[1, 4, 6], [1, 8, 6], [1, 6, 4]],
        [[1, 6, 4], [1, 4, 6], [1, 8, 6]],
        [[1, 8, 6], [2, 6, 4]],
        [[2, 4, 6], [1, 6, 8]],
    ]
    if name in JOINING_TOWERS:  # clips have fewer tokens than images
        calls = [[[2, 4, 6], [1, 8, 6]], [[1, 6, 8], [2, 6, 4]], [[2, 6, 4], [1, 6, 8]]]
    if BY_NAME[name].learned(1, 1):  # other shapes have other numbers of tokens
        calls = calls[:2]
    pixels = pixels_for(encoder, calls[0])
    answers = [copy_of(graphed(pixels, grids)) for grids in calls]
    for grids, answer in zip(calls, answers, strict=True):
        assert worst_distance(answer, encoder(pixels, grids)) <= 2e-6
        assert_same_bits(graphed(pixels, grids), answer)
    for one in range(len(calls)):
        for other in range(one):
            assert worst_distance(answers[one], answers[other]) > 1e-2


@pytest.mark.parametrize("name", [*FEW_FAST, slow("qwen3_5")])
def test_budgets_in_random_order_among_eager_calls_keep_their_first_answers(name: str) -> None:
    encoder = tower(name)
    graphed = static(encoder, budgets_of(name), outputs=EVERY_FIELD)
    calls = [([grid], pixels_for(encoder, [grid], seed)) for seed, grid in enumerate(single(name))]
    calls += [(grids, pixels_for(encoder, grids)) for grids in mixes(name).values()]
    answers = [copy_of(graphed(pixels, grids)) for grids, pixels in calls]
    order = random.Random(3).choices(range(len(calls)), k=40)
    for number in order:
        grids, pixels = calls[number]
        if number % 3 == 0:
            encoder(pixels * 2, grids)
        assert_same_bits(graphed(pixels, grids), answers[number])


def test_an_item_one_token_over_takes_the_next_budget() -> None:
    graphed = toy(max_frames_per_batch=1)
    budgets = [4, 8, 16, 32]
    for number, tokens in enumerate(budgets):
        for more in (-1, 0, 1):
            grids = [[1, 1, 2 * (tokens + more)]]
            pixels = pixels_for(graphed.encoder, grids)
            graphed.reset_stats()
            assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))
            hit = [budget.tokens for budget in budgets_hit(graphed)]
            assert hit == budgets[number + (more > 0) :][:1]
            assert graphed.stats().eager_items == (not hit)


@pytest.mark.parametrize("name", OURS)
def test_a_family_replays_items_at_and_one_step_over_each_budget(name: str) -> None:
    encoder = tower(name)
    graphed = static(encoder, budgets_of(name), outputs=EVERY_FIELD)
    for tokens in budgets_of(name):
        for asked in (tokens, tokens + 1):
            grid = encoder.grid_for(asked)
            pixels = pixels_for(encoder, [grid])
            assert worst_distance(graphed(pixels, [grid]), encoder(pixels, [grid])) <= 2e-6
    assert graphed.stats().eager_items == 1


def test_items_split_over_replays_come_back_in_order() -> None:
    graphed = toy((4, 64), max_batch_size=4)
    grids = [[1, 1, 2 + 2 * (n % 3)] for n in range(23)]
    pixels = pixels_for(graphed.encoder, grids)
    assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))
    stats = graphed.stats()
    assert sum(budget.hits for budget in stats.budgets) >= 6
    assert sum(budget.items for budget in stats.budgets) == 23
