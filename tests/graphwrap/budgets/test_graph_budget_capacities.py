"""What budgets hold: clips and images at true size, and each capacity that an item may exceed."""

from __future__ import annotations

import pytest
import torch

from encoders.contract import EncoderItemSpec
from graphwrap import Budget
from graphwrap.budgets import Batch, choose_budgets
from graphwrap.costs import Costs
from graphwrap.packing import Packer
from tests.oracles import BY_NAME
from tests.support.graphs.cases import OURS, at_true_size, is_tiled, pixels_for, static, tower
from tests.support.towers.toy_encoder import ToyEncoder

CLIPS = {"32 frames of 448x448": (32, 448), "64 frames of 224x224": (64, 224)}
WITH_VIDEO = [name for name in OURS if BY_NAME[name].takes_videos]


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
        pairs = 1 if BY_NAME[name].joins else 2  # frames per row of the grid
        grid = (frames // pairs, *[round(side / merged) * merged // patch] * 2)
    spec = encoder.item_specs([grid])[0]
    chosen = choose_budgets(encoder)
    packer = Packer(Costs.unmeasured(chosen.budgets), chosen.max_batch_size, 16_384)
    assert packer.why_eager(spec) == "cheaper"
    (group,) = packer.pack([spec])
    assert group.budget is not None
    per_segment = 1 if is_tiled(name) else pairs * BY_NAME[name].segment_rows
    assert group.budget.segments >= spec.segments == frames // per_segment
    assert group.budget.longest_segment >= spec.longest_segment


@pytest.mark.parametrize("items", [1, 2, 8, 64])
def test_clips_of_large_frames_fit_whatever_number_of_items_a_replay_takes(items: int) -> None:
    """By default 8 long segments or 64 short ones, also where a replay takes one item."""
    encoder = at_true_size("qwen2_vl")
    chosen = choose_budgets(encoder, max_batch_size=items)
    assert {budget.segments for budget in chosen.budgets} == {8, 64}
    (group,) = Packer(Costs.unmeasured(chosen.budgets), items, 16_384).pack(
        encoder.item_specs([(4, 46, 46)])
    )
    assert group.budget is not None
    assert group.budget.tokens <= 1.2 * 4 * 23 * 23


def of_four_frames(name: str) -> list[int]:
    """A budget of four tiles, or of 16 tokens or those of nine frames, if these are more."""
    encoder = tower(name)
    if is_tiled(name):
        return [encoder.item_specs([[4, 8, 8]])[0].output_tokens]
    side = encoder.config.spatial_merge_size
    return [max(16, encoder.item_specs([[9, side, side]])[0].output_tokens)]


@pytest.mark.parametrize("name", OURS)
def test_a_video_of_more_frames_than_any_budget_is_eager_and_counted(name: str) -> None:
    encoder = tower(name)
    side = 8 if is_tiled(name) else encoder.config.spatial_merge_size
    room = 2 if BY_NAME[name].segment_rows > 1 else 4  # four rows of its grids are one segment
    grids = [[1, side, side], [9, side, side]]
    pixels = pixels_for(encoder, grids)
    graphed = static(encoder, of_four_frames(name), max_frames_per_batch=room)
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"output_tokens": 65}, "tokens"),
        ({"input_size": 129}, "tokens"),
        ({"segments": 5}, "segments"),
        ({"longest_segment": 65}, "longest segment"),
        ({"windows": 7}, "windows"),
    ],
    ids=str,
)
def test_each_capacity_alone_makes_an_item_overflow(change: dict[str, int], reason: str) -> None:
    budget = Budget(tokens=64, rows=128, segments=4, longest_segment=64, windows=6)
    packer = Packer(Costs.unmeasured([budget]), 8, 16_384)
    fits = EncoderItemSpec(128, 64, 2, 64, 6)
    assert packer.why_eager(fits) == "cheaper"
    assert budget.fits(Batch.of([fits]))
    assert packer.why_eager(fits._replace(**change)) == f"over {reason}"
    assert budget.exceeded_by(Batch.of([fits._replace(**change)])) == reason


def test_a_smaller_budget_may_have_the_most_segments() -> None:
    """Its rows before the patches, which are one for each segment, fit the static buffers."""
    graphed = static(tower("dinov2"), [64, 100], max_graphs=3).capture(progress=False)
    assert {stats.segments for stats in graphed.stats().budgets} == {8, 64}
    assert graphed.stats().dropped == []


def test_the_short_shapes_longest_segment_is_rounded_up() -> None:
    short = max(choose_budgets(ToyEncoder(), [7]).budgets, key=lambda budget: budget.segments)
    assert (short.rows, short.longest_segment) == (14, 2)


@pytest.mark.parametrize("frames", [1, 3, 8, 50])
def test_frames_given_are_the_segments_of_every_budget(frames: int) -> None:
    chosen = choose_budgets(ToyEncoder(), [64], max_frames_per_batch=frames)
    assert max(budget.segments for budget in chosen.budgets) == frames
