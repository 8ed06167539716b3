"""``DataParallelEncoder`` over encoders of several paths: items stay whole, on one rank each.

What needs ranks is slow: a plain pytest starts those of ``test_parallel_encoder.py`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders import PathsEncoder, Step3Config, Step3Encoder, Step3VLConfig, Step3VLEncoder
from encoders.contract import EncoderOutput, VisionInputs
from encoders.streams.calls import join_inputs, select_items, split_inputs
from tests.oracles import draw_weights
from tests.support.comparisons import assert_all_equal
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits
from tests.support.processes import ranks as cases
from tests.support.processes.ranks import Ranks, form_of
from tests.support.towers.deepseek import build
from tests.support.towers.toy_paths import Item, TwoPaths, inputs_of
from vitgraph.parallel.shares import assign_items, cost_of, costs_of_items

SIZES = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
VIEWS = {"out_hidden_size": 48, "image_size": 112, "tile_size": 84}
FAMILIES = ["step3_vl", "step3", "deepseek_ocr", "deepseek_vl_hybrid", "deepseek_vl2"]
CALLS: dict[str, list[Item]] = {
    "no item": [],
    "one item": [((1, 2, 2), (1, 2, 4))],
    "one item without tiles": [((1, 2, 2), None)],
    "no tiles at all": [((1, 2, 2), None), ((1, 2, 4), None), ((2, 2, 2), None)],
    "tiles of some": [
        ((1, 2, 2), None),
        ((1, 2, 4), (3, 2, 2)),
        ((1, 2, 2), None),
        ((1, 4, 4), (1, 2, 2)),
        ((2, 2, 2), (2, 2, 4)),
    ],
    "one item of many times the others' size": [
        ((1, 2, 2), None),
        ((1, 6, 6), (4, 4, 4)),
        ((1, 2, 2), (1, 1, 2)),
    ],
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    two = Ranks(2, tmp_path_factory.mktemp("store") / "store")
    yield two
    two.close()


@cache
def encoder_of(name: str) -> PathsEncoder:
    """A tiny encoder, which tests must not change."""
    if name.startswith("deepseek"):
        return build(name)
    if name == "step3":
        step3 = Step3Encoder(Step3Config(**SIZES, **VIEWS, downsampled_size=40))
        return draw_weights(step3, calm=0.5).eval().requires_grad_(False)
    step3_vl = Step3VLEncoder(Step3VLConfig(**SIZES, **VIEWS))
    return draw_weights(step3_vl, calm=0.5).eval().requires_grad_(False)


def images(*sizes: tuple[int, int]) -> list[Tensor]:
    dice = torch.Generator().manual_seed(0)
    return [torch.randint(0, 255, (3, *size), generator=dice, dtype=torch.uint8) for size in sizes]


IMAGES = images((60, 60), (300, 200), (80, 90), (200, 420), (50, 70))
"""With and without tiles."""


def of_same_shares(
    encoder: PathsEncoder, inputs: VisionInputs, count: int, call: Any
) -> list[EncoderOutput]:
    """What one process computes for the shares of ``count`` ranks."""
    shares = assign_items(costs_of_items(inputs, encoder.paths), count)
    found: dict[int, EncoderOutput] = {}
    for share in shares:
        if share:
            outputs = call(select_items(inputs, encoder.paths, share))
            found |= dict(zip(share, outputs, strict=True))
    return [found[item] for item in sorted(found)]


def assert_equal(found: Sequence[EncoderOutput], wanted: Sequence[EncoderOutput]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("outputs", [EVERY_FIELD, ("pooler_output",), ("deepstack_features",)])
def test_every_rank_returns_the_items_of_one_process(
    ranks: Ranks, graphed: bool, outputs: tuple[str, ...]
) -> None:
    toy = TwoPaths()
    calls = [inputs_of(items) for items in CALLS.values()]
    for found in ranks(cases.call_with_inputs, toy, calls, graphed, outputs):
        for one, inputs in zip(found, calls, strict=True):
            left_out = dict.fromkeys(set(EVERY_FIELD) - set(outputs))
            assert_equal(one, [item._replace(**left_out) for item in toy(inputs)])


@pytest.mark.slow
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_results_have_the_bits_of_the_same_shares_run_alone(
    ranks: Ranks, name: str, graphed: bool
) -> None:
    encoder = encoder_of(name)
    inputs = encoder.preprocess(IMAGES)
    wanted = of_same_shares(encoder, inputs, 2, form_of(encoder, graphed, EVERY_FIELD))
    for (found,) in ranks(cases.call_with_inputs, encoder, [inputs], graphed, EVERY_FIELD):
        assert_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "graphed"), [("step3_vl", False), ("deepseek_vl_hybrid", True)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_encode_takes_images_and_gives_outputs_or_vectors(
    ranks: Ranks, name: str, graphed: bool, count: int
) -> None:
    encoder = encoder_of(name)
    call = form_of(encoder, graphed, EVERY_FIELD)
    wanted = of_same_shares(encoder, encoder.preprocess(IMAGES[:count]), 2, call)
    for found in ranks(cases.encode_images, encoder, IMAGES[:count], None, True, graphed):
        assert_equal(found, [item._replace(last_hidden_state=None) for item in wanted])
    for found in ranks(cases.encode_images, encoder, IMAGES[:count], "mean", True, graphed):
        assert found.shape == (count, encoder.out_features)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other.pooler_output.mean(0))


@pytest.mark.slow
@pytest.mark.parametrize("graphed", [False, True])
def test_without_scatter_each_rank_encodes_its_own_items(ranks: Ranks, graphed: bool) -> None:
    toy = TwoPaths()
    own = [inputs_of(CALLS[name], seed=7) for name in ("no item", "tiles of some")]
    for found, inputs in zip(
        ranks(cases.call_with_own_inputs, toy, own, graphed), own, strict=True
    ):
        assert_equal(found, toy(inputs))
    encoder = encoder_of("step3_vl")
    for found in ranks(cases.encode_images, encoder, IMAGES[:2], "max", False):
        assert_all_equal(found, encoder.embed(IMAGES[:2], pool="max"))


# --- errors ---------------------------------------------------------------------------------------


def bad_inputs() -> dict[str, tuple[Any, str]]:
    good = inputs_of(CALLS["tiles of some"])
    return {
        "pixels alone": (good.pixel_values, "a Tensor without grid_thw, and this encoder has the"),
        "one path": (
            good._replace(other_paths={}),
            "inputs have the paths image, and this encoder",
        ),
        "rows": (
            good._replace(pixel_values=good.pixel_values[1:]),
            "path 'image' has 39 rows of pixels, its grid_thw describes 40",
        ),
        "entries": (good._replace(tiles=None), "path 'tiles' has 3 entries for 5 items"),
        "other items": (inputs_of(CALLS["one item"]), "ranks 0 and 1 made different calls"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", list(bad_inputs()))
def test_input_that_one_rank_refuses_is_an_error_on_all(ranks: Ranks, name: str) -> None:
    good = inputs_of(CALLS["tiles of some"])
    bad, message = bad_inputs()[name]
    toy = TwoPaths()
    for raised, after in ranks(cases.call_with_a_bad_one, toy, [good, bad], good):
        assert message in str(raised)
        wanted = [item._replace(last_hidden_state=None) for item in toy(good)]
        assert_equal(after, wanted)


@pytest.mark.slow
def test_ranks_of_other_encoders_are_an_error_on_all(ranks: Ranks) -> None:
    encoders = [encoder_of("step3_vl"), deepcopy(encoder_of("step3_vl")).double()]
    for raised in ranks(cases.call_each_with_its_encoder, encoders, IMAGES):
        assert isinstance(raised, ValueError)
        assert "the ranks encode to different fields" in str(raised)


# --- shares ---------------------------------------------------------------------------------------


def test_an_item_costs_what_all_of_its_paths_cost() -> None:
    toy = TwoPaths()
    items = CALLS["tiles of some"]
    costs = costs_of_items(inputs_of(items), toy.paths)
    for (whole, pieces), cost in zip(items, costs, strict=True):
        grids = [whole] if pieces is None else [whole, pieces]
        assert cost == sum(cost_of(toy.whole.item_specs([grid])[0]) for grid in grids)


@pytest.mark.parametrize("chosen", [[], [1], [3, 0], [0, 1, 2, 3, 4]])
def test_selected_items_keep_all_of_their_paths(chosen: list[int]) -> None:
    toy = TwoPaths()
    inputs = inputs_of(CALLS["tiles of some"])
    some = select_items(inputs, toy.paths, chosen)
    assert list(some.paths) == list(inputs.paths)
    assert [path.pixel_values.shape[1:] for path in some.paths.values()] == [(3,), (3,)]
    whole = toy(inputs)
    assert_equal(toy(some) if chosen else [], [whole[item] for item in chosen])
    if chosen:
        again = join_inputs(split_inputs(some, toy.paths))
        tiles, wanted = again.paths["tiles"], some.paths["tiles"]
        assert_all_equal(tiles[:2], wanted[:2])
        assert tiles.items == wanted.items
