"""Encoders of several paths: each has budgets of its own, and every guarantee holds for all."""

from __future__ import annotations

import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepseek_cases import build
from encoders.contract import EncoderOutput, VisionInputs
from graph_cases import static, toy
from graph_outputs import EVERY_FIELD, assert_same_bits, copy_of, fields, worst_distance
from graphwrap import GraphedEncoder
from path_cases import IMAGES, NAMES, shared
from test_graph_packing import measured
from toy_encoder import ToyEncoder
from toy_paths import Item, TwoPaths, inputs_of, with_pixels

SMALL: list[Item] = [((1, 1, 6), None)]
MIXED: list[Item] = [((1, 1, 6), (3, 1, 4)), ((1, 2, 4), None), ((2, 1, 4), (1, 1, 2))]
ONE_OVER: list[Item] = [((1, 1, 6), (1, 10, 10)), ((1, 2, 4), (1, 1, 2))]
"""The pieces of the first item run eagerly, the rest replays."""
BOTH_OVER: list[Item] = [((1, 10, 10), (1, 10, 10)), ((1, 1, 2), None)]
CALLS = {"one path": SMALL, "both": MIXED, "one eager": ONE_OVER, "both eager": BOTH_OVER}
BUDGETS = {"image": [4, 16, 32], "tiles": [2, 8]}


def graphed_of(backend: str = "static", **settings_: Any) -> GraphedEncoder:
    settings_ = {"budgets": BUDGETS, "outputs": EVERY_FIELD, **settings_}
    return GraphedEncoder(TwoPaths(), backend=backend, **settings_)


def assert_agrees(graphed: GraphedEncoder, inputs: VisionInputs) -> list[EncoderOutput]:
    """The outputs are the encoder's, bit for bit, one per item."""
    outputs = graphed(inputs)
    expected = graphed.encoder(inputs)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert_same_bits(ours, theirs)
    return outputs


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
@pytest.mark.parametrize("name", [*NAMES, "deepseek_vl_hybrid", "deepseek_ocr"])
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


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ([8], r"budgets=\[8\]: this encoder has the paths image, tiles.*give a mapping"),
        ({"image": [8]}, "give a mapping from the name of each"),
        ({"image": [8], "pieces": [4]}, "give a mapping from the name of each"),
        ({"image": [8], "tiles": []}, "budgets is empty"),
        ({"image": [8], "tiles": [0]}, "budget=0: must be a positive integer"),
    ],
)
def test_budgets_of_other_paths_are_refused(budgets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graphed_of(budgets=budgets)


def test_a_mapping_of_budgets_may_leave_paths_to_defaults() -> None:
    tokens = {budget.tokens for budget in graphed_of(budgets={"image": [8], "tiles": None}).budgets}
    assert {8, 2, 32} <= tokens
    assert {b.tokens for b in static(ToyEncoder(), {"image": [8]}).budgets} == {8}


def test_inputs_of_another_encoder_are_refused() -> None:
    inputs, graphed = inputs_of(MIXED), graphed_of()
    with pytest.raises(ValueError, match="has the paths image, tiles: pass the whole result"):
        graphed(inputs.pixel_values, inputs.grid_thw)
    with pytest.raises(ValueError, match="inputs have the paths image, this encoder has image, t"):
        graphed(inputs._replace(other_paths={}))
    with pytest.raises(ValueError, match="inputs have the paths image, tiles, this encoder has im"):
        toy()(inputs)
    for extra in ({"grid_thw": inputs.grid_thw}, {"out": copy_of(graphed(inputs)[0])}):
        with pytest.raises(ValueError, match="without grid_thw and out"):
            graphed(inputs, **extra)


def test_a_wrong_path_is_refused_before_any_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphed, inputs = graphed_of(on_overflow="raise").capture(progress=False), inputs_of(MIXED)
    short = inputs.other_paths["tiles"]._replace(pixel_values=torch.zeros(3, 3))
    for wrong, message in (
        (inputs._replace(other_paths={"tiles": short}), "3 rows but the grid makes 14"),
        (inputs_of(ONE_OVER), r"grid \(1, 10, 10\) is over every budget"),
    ):
        monkeypatch.setattr(graphed.encoder.whole, "forward", lambda *_, **__: pytest.fail("ran"))
        with pytest.raises(ValueError, match=message):
            graphed(wrong)


def test_a_path_that_keeps_no_contract_is_refused() -> None:
    class Half(TwoPaths):
        @property
        def paths(self) -> Any:
            return {"image": self.whole, "tiles": torch.nn.Linear(3, 3)}

    with pytest.raises(TypeError, match="Linear has no budget_range"):
        GraphedEncoder(Half())


# --- the guarantees -------------------------------------------------------------------------------


def test_nan_in_every_stale_buffer_changes_no_bit_of_any_path() -> None:
    graphed = graphed_of()
    for seed, items in enumerate([*CALLS.values(), *list(CALLS.values())[::-1]]):
        graphed.capture(progress=False)._poison()
        for output in assert_agrees(graphed, inputs_of(items, seed)):
            assert all(bool(value.isfinite().all()) for value in fields(output).values())


ITEM = st.tuples(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4).map(lambda n: 2 * n)),
    st.none() | st.tuples(st.integers(1, 4), st.just(1), st.integers(1, 3).map(lambda n: 2 * n)),
)
SHARED = {clone: graphed_of(clone=clone) for clone in (True, False)}


@given(calls=st.lists(st.lists(ITEM, max_size=5), min_size=1, max_size=4), clone=st.booleans())
@settings(max_examples=60)
def test_calls_in_any_order_give_the_encoders_bits(calls: list[list[Item]], clone: bool) -> None:
    for seed, items in enumerate(calls):
        assert_agrees(SHARED[clone], inputs_of(items, seed))


@pytest.mark.parametrize("call", CALLS)
def test_results_are_the_callers_own_whatever_path_ran(call: str) -> None:
    graphed = graphed_of()
    outputs = graphed(inputs_of(CALLS[call]))
    kept = [copy_of(output) for output in outputs]
    for seed, items in enumerate(CALLS.values()):
        graphed(inputs_of(items, seed + 7))
    graphed._poison()
    graphed.release()
    for output, before in zip(outputs, kept, strict=True):
        assert_same_bits(output, before)


@pytest.mark.parametrize("part", ["whole", "pieces"])
@pytest.mark.parametrize("backend", ["static", "eager"])
def test_weights_rebound_in_either_path_are_an_error_with_graphs(part: str, backend: str) -> None:
    graphed, inputs = graphed_of(backend), inputs_of(MIXED)
    graphed(inputs)
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    getattr(graphed.encoder, part).weight = weight
    if backend == "eager":
        assert_agrees(graphed, inputs)
        return
    with pytest.raises(RuntimeError, match=rf"weight '{part}.weight' was rebound"):
        graphed(inputs)
    graphed.release()
    assert_agrees(graphed, inputs)


def test_a_path_that_is_no_submodule_is_guarded_too() -> None:
    class Views(TwoPaths):
        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "pieces", self._modules.pop("pieces"))

    graphed = GraphedEncoder(Views(), BUDGETS, backend="static")
    inputs = inputs_of(MIXED)
    graphed(inputs)
    graphed.encoder.pieces.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"weight 'path tiles.weight' was rebound"):
        graphed(inputs)


def test_eight_threads_over_one_object_get_right_answers() -> None:
    graphed = graphed_of()

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(20):
            assert_agrees(graphed, inputs_of(draw.choice(list(CALLS.values())), draw.randint(0, 9)))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))


def test_pixels_of_every_path_are_checked_and_cast() -> None:
    graphed, inputs = graphed_of(), inputs_of(MIXED)
    doubled = inputs.to(dtype=torch.float64)
    for ours, theirs in zip(graphed(doubled), graphed.encoder(inputs), strict=True):
        assert_same_bits(ours, theirs)
    whole = inputs.pixel_values
    for wrong in (whole.to(torch.uint8), whole[:, :2]):
        with pytest.raises(ValueError, match="pixel_values"):
            graphed(with_pixels(inputs, wrong))


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
        executor.graphs.packer.prices = measured(list(executor.graphs.runners))
    graphed.save_table(path)
    other = graphed_of()
    other.load_table(path)
    assert {name: len(table.prices.replay_ms) for name, table in other._tables.items()} == {
        "image": 6,
        "tiles": 4,
    }
    with pytest.raises(ValueError, match=r"it has the paths \['image', 'tiles'\], this encoder"):
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
