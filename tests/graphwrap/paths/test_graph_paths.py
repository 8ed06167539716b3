"""Encoders of several paths with graphs: each path has budgets, memory and counters of its own."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders.contract import EncoderOutput
from graphwrap import GraphedEncoder
from tests.support.graphs.cases import toy
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, fields, worst_distance
from tests.support.graphs.packing import measured
from tests.support.graphs.path_cases import (
    BUDGETS,
    CALLS,
    MIXED,
    ONE_OVER,
    SMALL,
    assert_agrees,
    graphed_of,
)
from tests.support.towers.deepseek import build
from tests.support.towers.step3_paths import IMAGES, NAMES, shared
from tests.support.towers.toy_paths import TwoPaths, inputs_of

# --- one face -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("call", CALLS)
def test_items_of_two_paths_give_the_encoders_bits(call: str, backend: str) -> None:
    graphed = graphed_of(backend)
    for seed in range(3):
        assert_agrees(graphed, inputs_of(CALLS[call], seed))


def test_one_path_replays_while_the_other_runs_eagerly() -> None:
    graphed = graphed_of()
    assert_agrees(graphed, inputs_of(ONE_OVER))
    stats = graphed.stats()
    assert {budget.path: budget.items for budget in stats.budgets if budget.hits} == {
        "image": 2,
        "tiles": 1,
    }
    assert stats.eager_reasons == {"over tokens": 1}


def test_a_path_without_entries_is_skipped_and_no_items_give_none() -> None:
    graphed = graphed_of()
    assert_agrees(graphed, inputs_of(SMALL))
    assert {budget.path for budget in graphed.stats().budgets if budget.hits} == {"image"}
    assert graphed(inputs_of([])) == []


def test_the_default_budgets_are_those_of_each_path() -> None:
    graphed = graphed_of(budgets=None, max_graphs=6).capture(progress=False)
    tokens = {"image": set[int](), "tiles": set[int]()}
    for budget in graphed.stats().budgets:
        tokens[budget.path].add(budget.tokens)
    assert {name: (min(of), max(of)) for name, of in tokens.items()} == {
        "image": (4, 64),
        "tiles": (2, 32),
    }
    assert graphed.max_batch_size == 2
    assert len(graphed.budgets) == len(graphed.stats().budgets)
    assert_agrees(graphed, inputs_of(MIXED))


def test_fields_that_were_not_asked_for_are_none_in_every_item() -> None:
    for output in graphed_of(outputs=("pooler_output",))(inputs_of(MIXED)):
        assert list(fields(output)) == ["pooler_output"]


def test_an_encoder_of_one_path_takes_its_inputs_whole_too() -> None:
    graphed = toy()
    inputs = inputs_of(MIXED)._replace(other_paths={})
    outputs = graphed(inputs)
    expected = graphed.encoder(inputs.pixel_values, inputs.grid_thw.tolist())
    parts = graphed.encoder.split(expected, inputs.grid_thw.tolist())
    for ours, theirs in zip(outputs, parts, strict=True):
        assert_same_bits(ours, theirs)
    empty = inputs_of([])._replace(other_paths={})
    assert graphed(empty) == []


# --- the families ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("name", [*NAMES, "deepseek_vl_hybrid", "deepseek_vl2", "deepseek_ocr"])
def test_images_of_a_family_of_paths_are_encoded_as_the_encoder_does(
    name: str, backend: str
) -> None:
    encoder = shared(name) if name in NAMES else build(name)
    graphed = GraphedEncoder(encoder, backend=backend, max_graphs=6, outputs=EVERY_FIELD)
    inputs, expected = encoder.preprocess(IMAGES), encoder.encode(IMAGES)
    ways = {
        "whole": graphed(inputs),
        "encode": graphed.encode(IMAGES),
        "in parts": graphed.encode(IMAGES, max_tokens_per_call=9),
        "a stream": list(graphed.encode_many(IMAGES, batch_tokens=20, progress=False)),
    }
    for way, outputs in ways.items():
        for ours, theirs in zip(outputs, expected, strict=True):
            assert worst_distance(ours, theirs) <= 2e-6, way
    stats = graphed.stats()
    assert stats.eager_items == 0 if backend == "static" else stats.eager_items > 0


def test_views_of_two_paths_are_joined_before_the_next_call_overwrites_them() -> None:
    encoder = shared("step3_vl")
    graphed = GraphedEncoder(encoder, backend="static", max_graphs=6, clone=False)
    for images in (IMAGES, IMAGES[::-1]):
        expected = [output._replace(last_hidden_state=None) for output in encoder.encode(images)]
        for ours, theirs in zip(graphed.encode(images), expected, strict=True):
            assert worst_distance(ours, theirs) <= 2e-6


# --- memory, tables, counters ---------------------------------------------------------------------


def test_each_path_has_an_arena_and_release_frees_all_at_once() -> None:
    graphed = graphed_of().capture(progress=False)
    arenas = graphed._captured.memory.arenas
    alone = [
        GraphedEncoder(encoder, BUDGETS[name], backend="static", outputs=EVERY_FIELD)
        for name, encoder in TwoPaths().paths.items()
    ]
    each = [one.capture(progress=False).stats().arena_bytes for one in alone]
    assert [arena.nbytes for arena in arenas] == each
    assert graphed.stats().arena_bytes == sum(each)
    buffers = [weakref.ref(arena.pixels) for arena in arenas]
    del arenas
    graphed.release()
    assert [buffer() for buffer in buffers] == [None, None]
    assert graphed.stats().budgets == []


def test_a_budget_that_fails_is_dropped_with_the_name_of_its_path() -> None:
    graphed = graphed_of(max_frames_per_batch=2)
    forward = graphed.encoder.pieces.forward

    def fails(pixels: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        if len(pixels) == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(pixels, *args, **kwargs)

    graphed.encoder.pieces.forward = fails
    with pytest.warns(UserWarning, match=r"budget tiles 8 \(2x16\) could not be captured"):
        graphed.capture(progress=False)
    assert graphed.stats().dropped == ["tiles 8 (2x16)"]


def test_a_table_holds_every_path_and_serves_no_encoder_of_others(tmp_path: Path) -> None:
    graphed, path = graphed_of().capture(progress=False), tmp_path / "table.json"
    for executor in graphed._captured.paths.values():
        executor.graphs.packer.costs = measured(list(executor.graphs.by_budget))
    graphed.save_table(path)
    other = graphed_of()
    other.load_table(path)
    assert {name: len(table.costs.replays) for name, table in other._tables.items()} == {
        "image": 6,
        "tiles": 4,
    }
    with pytest.raises(ValueError, match=r"it has the paths \['image', 'tiles'\], and this enc"):
        toy().load_table(path)


def test_stats_print_the_path_of_each_budget_and_reset(capfd: pytest.CaptureFixture[str]) -> None:
    graphed = graphed_of().capture()
    assert "capture: 100%" in capfd.readouterr().err
    graphed(inputs_of(MIXED))
    stats = graphed.stats()
    lines = str(stats).splitlines()
    assert sum(line.endswith("image path") for line in lines) == 6
    assert sum(line.endswith("tiles path") for line in lines) == 4
    assert {row["path"] for row in stats.to_dict()["budgets"]} == {"image", "tiles"}
    graphed.reset_stats()
    assert sum(budget.hits for budget in graphed.stats().budgets) == 0
