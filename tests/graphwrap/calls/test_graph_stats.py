"""Counters and tables, the progress bar, saved costs, and ``encode`` from pictures."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from encoders.contract import EncoderItemSpec, GridLike
from graphwrap import BudgetStats, GraphedEncoder, GraphStats, replay
from tests.oracles import Grids
from tests.support.graphs.cases import (
    OVER,
    SMALL,
    executor_of,
    is_tiled,
    pixels_for,
    static,
    tower,
    toy,
)
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, worst_distance
from tests.support.photographs import china, flower, panning_clip
from tests.support.towers.toy_encoder import ToyEncoder


def call(graphed: GraphedEncoder, grids: Grids) -> None:
    graphed(pixels_for(graphed.encoder, grids), grids)


# --- counters -------------------------------------------------------------------------------------


def test_every_replay_is_counted_with_its_items_real_and_padded_tokens() -> None:
    graphed = toy([4, 16], max_frames_per_batch=4, max_batch_size=4)
    call(graphed, SMALL)
    call(graphed, SMALL)
    call(graphed, [[1, 1, 20], [1, 1, 8]])
    small, large = graphed.stats().budgets
    assert (small.tokens, small.hits, small.items, small.real_tokens, small.padded_tokens) == (
        4,
        2,
        2,
        6,
        8,
    )
    assert (large.tokens, large.hits, large.items, large.real_tokens, large.padded_tokens) == (
        16,
        1,
        2,
        14,
        16,
    )
    assert graphed.stats().padding == pytest.approx(24 / 20 - 1)


def test_eager_items_are_counted_with_their_reason() -> None:
    graphed = toy([16], max_frames_per_batch=4, max_batch_size=4)
    call(graphed, [*SMALL, *OVER])
    call(graphed, [[9, 1, 2]])
    stats = graphed.stats()
    assert (stats.eager_calls, stats.eager_items) == (2, 2)
    assert stats.eager_reasons == {"over tokens": 1, "over segments": 1}
    wholly = GraphedEncoder(graphed.encoder, [16], backend="eager")
    call(wholly, [*SMALL, *OVER])
    assert wholly.stats().eager_reasons == {"eager backend": 2}


@pytest.mark.parametrize(("count", "runs"), [(3, 1), (5, 1), (6, 2), (20, 4)])
def test_items_over_every_budget_share_eager_runs_of_bounded_length(count: int, runs: int) -> None:
    """Twice the 64 tokens that are worth a graph, so five pairs of 10 and 12 tokens."""
    graphed, grids = toy((4, 8)), [*SMALL, *[[1, 2, 10], [1, 4, 6]] * count]
    pixels = pixels_for(graphed.encoder, grids)
    assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))
    stats = graphed.stats()
    assert (stats.eager_calls, stats.eager_items) == (runs, 2 * count)
    assert stats.eager_reasons == {"over tokens": 2 * count}


def test_a_call_of_nothing_counts_as_no_eager_run() -> None:
    graphed = toy()
    graphed(torch.zeros(0, 3), [])
    stats = graphed.stats()
    assert (stats.eager_calls, stats.eager_items, dict(stats.eager_reasons)) == (0, 0, {})


def test_what_capture_did_is_there_before_any_call() -> None:
    stats = toy().capture(progress=False).stats()
    assert [budget.tokens for budget in stats.budgets] == sorted(b.tokens for b in stats.budgets)
    assert {budget.tokens for budget in stats.budgets} == {4, 8, 16, 32}
    assert all(budget.hits == budget.items == budget.real_tokens == 0 for budget in stats.budgets)
    assert all(budget.capture_seconds > 0 for budget in stats.budgets)
    assert all(budget.replay_ms is None for budget in stats.budgets)
    assert stats.capture_seconds >= sum(budget.capture_seconds for budget in stats.budgets)
    assert stats.backend == "static"


def test_static_bytes_are_those_of_the_largest_budget() -> None:
    """Every budget uses a prefix of one arena."""
    ten = toy([4, 8, 12, 16, 20, 24, 28, 32, 48, 64], max_frames_per_batch=8, max_batch_size=4)
    alone = toy([64], max_frames_per_batch=8, max_batch_size=4)
    held = [graphed.capture(progress=False).stats().arena_bytes for graphed in (ten, alone)]
    assert held[1] <= held[0] <= 1.05 * held[1]


def test_metadata_kept_is_counted_and_bounded() -> None:
    graphed = toy([64])
    for number in range(1, 30):
        call(graphed, [[1, 1, 2 * number]])
    few = graphed.stats().cache_bytes
    assert few > 0
    call(graphed, [[1, 1, 2]])
    assert graphed.stats().cache_bytes == few


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize(("bytes_", "entries"), [(4000, 10**6), (10**9, 3)])
def test_what_is_kept_per_grid_is_bounded(
    monkeypatch: pytest.MonkeyPatch, backend: str, bytes_: int, entries: int
) -> None:
    """Small metadata are mostly the host's objects around them: bytes alone bound those badly."""
    monkeypatch.setattr(replay, "METADATA_BYTES", bytes_)
    monkeypatch.setattr(replay, "ENTRIES", entries)
    encoder = ToyEncoder()
    graphed = GraphedEncoder(encoder, [32], backend=backend, outputs=EVERY_FIELD)
    for number in [*range(1, 30), *range(1, 30)]:
        grids = [[1, 1, 2 * number]]
        pixels = pixels_for(encoder, grids)
        assert_same_bits(graphed(pixels, grids), encoder(pixels, grids))
        runs = executor_of(graphed)
        held = [len(cache._values) for cache in (runs.prepared, runs.schedules)]
        assert graphed.stats().cache_bytes <= bytes_
        assert max(held) <= entries
        assert min(held) >= 1


def test_schedules_are_bounded_by_their_items_and_those_used_last_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "SCHEDULE_ITEMS", 6)
    graphed = toy()
    often, large = [[1, 1, 2]], [[1, 1, 2], [1, 1, 4], [1, 1, 6]]
    call(graphed, often)
    kept = executor_of(graphed).schedule(often)
    for number in range(1, 9):
        call(graphed, [*large, [1, 1, 2 * number]])
        assert executor_of(graphed).schedule(often) is kept
        assert executor_of(graphed).schedules.size == 5


def test_counters_start_again_and_what_capture_measured_stays() -> None:
    graphed = toy()
    call(graphed, [*SMALL, *OVER])
    before = graphed.stats()
    graphed.reset_stats()
    after = graphed.stats()
    assert sum(budget.hits + budget.items for budget in after.budgets) == 0
    assert (after.eager_calls, after.eager_items, dict(after.eager_reasons)) == (0, 0, {})
    assert after.capture_seconds == before.capture_seconds
    assert after.arena_bytes == before.arena_bytes


def test_stats_are_a_copy() -> None:
    graphed = toy()
    call(graphed, SMALL)
    stats = graphed.stats()
    stats.budgets[0].hits += 100
    stats.eager_reasons["invented"] += 1
    assert "invented" not in graphed.stats().eager_reasons
    assert sum(budget.hits for budget in graphed.stats().budgets) == 1


class NumpyToy(ToyEncoder):
    """An encoder that counts in NumPy's integers."""

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        return [EncoderItemSpec(*map(np.int64, spec)) for spec in super().item_specs(grid_thw)]


def test_stats_become_json_also_for_an_encoder_that_counts_in_numpy() -> None:
    graphed = GraphedEncoder(NumpyToy(), [4, 16], backend="static")
    for grids in ([[1, 2, 4]], [[1, 2, 4]] * 3, [[1, 10, 10]]):
        rows = sum(t * h * w for t, h, w in grids)
        graphed(torch.randn(rows, 3), grids)
    assert json.loads(json.dumps(graphed.stats().to_dict())) == graphed.stats().to_dict()


def test_stats_become_json_and_come_back_equal() -> None:
    graphed = toy()
    call(graphed, [*SMALL, *OVER])
    data = graphed.stats().to_dict()
    assert json.loads(json.dumps(data)) == data
    assert set(data["budgets"][0]) == set(vars(BudgetStats(1, 1, 1, 0)))
    assert data["padding"] == graphed.stats().padding


def test_stats_print_as_a_table_with_a_line_a_budget() -> None:
    graphed = toy()
    call(graphed, [*SMALL, *OVER])
    lines = str(graphed.stats()).splitlines()
    assert lines[0].split() == [
        "tokens",
        "segments",
        "hits",
        "items",
        "real",
        "padded",
        "ms",
        "capture",
        "s",
        "MiB",
        "kernel",
    ]
    assert len(lines) >= 1 + len(graphed.budgets) + 2
    assert "eager: 1 item in 1 run (over tokens: 1)" in lines
    assert any(line.startswith("static: arena") for line in lines)


def test_stats_before_anything_are_empty_and_print() -> None:
    stats = toy().stats()
    assert stats == GraphStats("static")
    assert "captured in 0.00 s" in str(stats)


# --- progress -------------------------------------------------------------------------------------


def test_the_bar_names_budgets_and_mebibytes(capfd: pytest.CaptureFixture[str]) -> None:
    toy().capture(progress=True)
    shown = capfd.readouterr().err
    assert "capture: 100%" in shown
    assert "tokens" in shown
    assert "MiB" in shown


def test_without_progress_and_at_a_first_call_nothing_is_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    toy().capture(progress=False)
    call(toy(), SMALL)
    assert capfd.readouterr() == ("", "")


# --- encode ---------------------------------------------------------------------------------------

SIZES: dict[str, dict[str, Any]] = {
    "intern_vit_300m": {"max_tiles": 2},
    "qwen2_vl": {"min_pixels": 3136, "max_pixels": 90_000},
    "qwen2_5_vl": {"min_pixels": 3136, "max_pixels": 90_000},
    "qwen3_vl": {"min_pixels": 3136, "max_pixels": 90_000},
    "qwen3_5": {"min_pixels": 3136, "max_pixels": 90_000},
}


@pytest.mark.parametrize("name", SIZES)
def test_photographs_and_a_clip_are_encoded_as_the_encoder_does(name: str) -> None:
    encoder = tower(name)
    graphed = static(encoder, [48, 128] if is_tiled(name) else [64, 512], outputs=EVERY_FIELD)
    images, videos = [china(), flower().crop((10, 20, 311, 220))], [panning_clip(4)]
    ours = graphed.encode(images, videos, **SIZES[name])
    theirs = encoder.encode(images, videos, **SIZES[name])
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        assert worst_distance(one, other) <= 2e-6
    assert graphed.stats().eager_items == 0


def test_encode_takes_the_keywords_of_preprocess_and_raises_what_it_raises() -> None:
    graphed = static(tower("qwen2_vl"), [64])
    frames = graphed.encode(videos=[panning_clip(9)], num_frames=4)[0]
    assert frames.last_hidden_state is None
    with pytest.raises(ValueError, match="max_tiles"):
        graphed.encode([china()], max_tiles=3)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_on_the_cpu_auto_is_eager_and_pads_nothing(backend: str) -> None:
    encoder = tower("qwen3_vl")
    graphed = GraphedEncoder(encoder, backend=backend)
    grids = [[1, 4, 6], [2, 4, 4]]
    pixels = pixels_for(encoder, grids)
    output = graphed(pixels, grids)
    assert_same_bits(output, encoder(pixels, grids)._replace(last_hidden_state=None))
    assert graphed.backend == "eager"
    assert graphed.stats().arena_bytes == 0
