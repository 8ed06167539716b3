"""Every encoder is called in one way: with what its preprocess returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from encoders import Encoder, EncoderOutput, PartialOutput, VisionInputs
from graphwrap import GraphedEncoder
from tests.support.comparisons import assert_all_equal
from tests.support.photographs import china, flower, hopper
from tests.support.towers.deepseek import build
from tests.support.towers.step3_paths import IMAGES as RANDOM_IMAGES
from tests.support.towers.step3_paths import shared
from tests.support.towers.streams import TOWERS, tower

IMAGES = [china().resize((120, 90)), hopper().resize((200, 230)), flower().resize((64, 200))]
STEP = ("step3_vl", "step3")
DEEPSEEK = ("deepseek_vl", "deepseek_vl_hybrid", "deepseek_vl2", "deepseek_ocr")
EVERY = (*TOWERS, *STEP, *DEEPSEEK)


def encoder_of(name: str) -> Encoder:
    if name in TOWERS:
        return tower(name)
    encoder: Encoder = shared(name) if name in STEP else build(name)
    return encoder


def inputs_of(name: str, encoder: Encoder) -> VisionInputs:
    return encoder.preprocess(RANDOM_IMAGES if name in STEP else IMAGES)


@pytest.mark.parametrize("name", EVERY)
def test_every_encoder_takes_what_its_preprocess_returned(name: str) -> None:
    encoder = encoder_of(name)
    inputs = inputs_of(name, encoder)
    outputs = encoder(inputs)
    assert len(outputs) == len(inputs.grid_thw)
    assert all(type(output) is EncoderOutput for output in outputs)
    for output, alone in zip(outputs, encoder.join(_by_path(encoder, inputs), inputs), strict=True):
        assert torch.equal(output.pooler_output, alone.pooler_output)


def _by_path(encoder: Encoder, inputs: VisionInputs) -> dict[str, EncoderOutput]:
    paths = inputs.paths.items()
    return {n: encoder.paths[n](p.pixel_values, p.grid_thw) for n, p in paths if p.items}


@pytest.mark.parametrize("name", EVERY)
def test_graphed_and_accelerated_encoders_take_whole_inputs_too(name: str) -> None:
    encoder = encoder_of(name)
    inputs = inputs_of(name, encoder)
    wanted = encoder(inputs)
    graphed = GraphedEncoder(encoder, backend="eager", kernels="reference")(inputs)
    for given, output, other in zip(graphed, wanted, encoder.accelerated()(inputs), strict=True):
        assert type(given) is PartialOutput
        assert given.last_hidden_state is None
        assert given.pooler_output is not None
        assert torch.equal(given.pooler_output, output.pooler_output)
        assert torch.equal(other.pooler_output, output.pooler_output)


@pytest.mark.parametrize("name", EVERY)
def test_maps_of_every_encoder_are_a_dict_per_item(name: str) -> None:
    encoder = encoder_of(name)
    inputs = inputs_of(name, encoder)
    outputs = encoder(inputs)
    hidden = [output.last_hidden_state for output in outputs]
    whole = encoder.feature_maps(torch.cat(hidden), inputs)
    for given in (encoder.feature_maps(hidden, inputs), encoder.feature_maps(outputs, inputs)):
        assert [list(item) for item in given] == [list(item) for item in whole]
        for item, wanted in zip(given, whole, strict=True):
            assert_all_equal(item.values(), wanted.values())
    assert all(item["image"].ndim == 4 for item in whole)


@pytest.mark.parametrize("name", EVERY)
def test_intermediates_of_whole_inputs_are_a_dict_by_path(name: str) -> None:
    encoder = encoder_of(name)
    inputs = inputs_of(name, encoder)
    found = encoder.forward_intermediates(inputs, indices=[-1, 0])
    assert list(found) == list(encoder.paths)
    for path, states in found.items():
        pixels, grid_thw, _ = inputs.paths[path]
        alone = encoder.paths[path].forward_intermediates(pixels, grid_thw, [-1, 0])
        assert_all_equal(states, alone)


@pytest.mark.parametrize("name", EVERY)
def test_no_items_give_an_empty_list(name: str) -> None:
    encoder = encoder_of(name)
    assert encoder(encoder.preprocess()) == encoder.encode() == []


@pytest.mark.parametrize("name", TOWERS)
def test_hooks_see_tensors_whichever_way_it_is_called(name: str) -> None:
    encoder = tower(name)
    inputs = encoder.preprocess(IMAGES)
    seen: list[tuple[Any, ...]] = []
    hook = encoder.register_forward_pre_hook(lambda _, given: seen.append(given))
    try:
        encoder(inputs)
        encoder(inputs.pixel_values, inputs.grid_thw)
    finally:
        hook.remove()
    assert len(seen) == 2
    assert all(isinstance(value, Tensor) for given in seen for value in given)


@pytest.mark.parametrize("name", [*STEP, "deepseek_vl_hybrid", "deepseek_vl2", "deepseek_ocr"])
def test_tensors_for_several_paths_are_refused_by_what_to_call(name: str) -> None:
    encoder = encoder_of(name)
    inputs = inputs_of(name, encoder)
    pixels, grid_thw = inputs[:2]
    for call in (encoder, encoder.feature_maps, encoder.forward_intermediates):
        with pytest.raises(ValueError, match=r"has the paths image.*call encoder.*inputs\)"):
            call(pixels, grid_thw)  # type: ignore[operator]


def test_metadata_of_several_paths_are_made_by_each_path() -> None:
    encoder = encoder_of("step3_vl")
    inputs = inputs_of("step3_vl", encoder)
    with pytest.raises(ValueError, match=r"has the paths image, tiles, each with .*paths\[name\]"):
        encoder.prepare_encoder_metadata(inputs.grid_thw)


def test_whole_inputs_stand_alone_in_a_call() -> None:
    encoder = tower("qwen3_vl")
    inputs = encoder.preprocess(IMAGES)
    metadata = encoder.prepare_encoder_metadata(inputs.grid_thw)
    call: Any = encoder
    for extra in ({"grid_thw": inputs.grid_thw}, {"encoder_metadata": metadata}):
        with pytest.raises(ValueError, match="given with grid_thw or encoder_metadata: pass it"):
            call(inputs, **extra)


# --- items by number ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*STEP, "deepseek_ocr"])
def test_tiles_in_another_order_than_the_images_are_refused(name: str) -> None:
    encoder = encoder_of(name)
    sizes = ((300, 200), (80, 90), (150, 160), (60, 60))
    images = RANDOM_IMAGES if name in STEP else [china().resize(size) for size in sizes]
    inputs = encoder.preprocess(images)
    assert inputs.tiles is not None
    assert len(set(inputs.tiles)) > 1
    turned = inputs._replace(tiles=inputs.tiles[::-1])
    features = torch.cat([output.last_hidden_state for output in encoder(inputs)])
    graphed = GraphedEncoder(encoder, backend="eager")
    for call in (encoder, graphed, lambda given: encoder.feature_maps(features, given)):
        with pytest.raises(ValueError, match="pass what preprocess returned"):
            call(turned)


@pytest.mark.parametrize("items", [(0, 0), (2, 0), (0, 1), (0, 4), (0,), (0, 1, 2)])
def test_entries_of_other_items_than_tiles_says_are_refused(items: tuple[int, ...]) -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(RANDOM_IMAGES)
    assert inputs.paths["tiles"].items == (0, 2)
    other = {"tiles": inputs.paths["tiles"]._replace(items=items)}
    with pytest.raises(ValueError, match=r"path 'tiles' has 2 entries for 4 items, those of the"):
        encoder(inputs._replace(other_paths=other))


# --- outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EncoderOutput, PartialOutput])
def test_fields_of_an_output_are_read_by_name_and_number(kind: Any) -> None:
    output = kind(torch.ones(2), torch.zeros(1), (torch.ones(3),), {"prefix": torch.ones(1, 1)})
    assert output["pooler_output"] is output.pooler_output is output[1]
    assert output["deepstack_features"] is output[2]
    assert output["prefix"] is output.extras["prefix"]
    assert output[:2] == (output.last_hidden_state, output.pooler_output)
    with pytest.raises(
        KeyError, match=r"'pooled': the fields of this output are .*, pooler_output"
    ):
        output["pooled"]


def test_a_wrapper_that_leaves_fields_out_returns_a_partial_output() -> None:
    graphed = GraphedEncoder(tower("qwen3_vl"), backend="eager", outputs=["pooler_output"])
    inputs = graphed.preprocess(IMAGES)
    called = graphed(inputs.pixel_values, inputs.grid_thw)
    for output in (called, *graphed.encode(IMAGES), *graphed(inputs)):
        assert type(output) is PartialOutput
        assert output.last_hidden_state is output.deepstack_features is None
    assert called.clone().to(torch.float64)["pooler_output"].dtype == torch.float64


def test_graphs_offer_what_their_encoder_offers() -> None:
    encoder = tower("qwen3_vl")
    graphed = GraphedEncoder(encoder, backend="eager", outputs=["last_hidden_state"])
    inputs = graphed.preprocess(IMAGES)
    maps = graphed.feature_maps(graphed(inputs), inputs)
    wanted = encoder.feature_maps(encoder(inputs), inputs)
    assert_all_equal((item["image"] for item in maps), (item["image"] for item in wanted))
    with pytest.raises(ValueError, match=r"no last_hidden_state.*name it in outputs="):
        graphed.feature_maps(GraphedEncoder(encoder, backend="eager")(inputs), inputs)
    assert graphed.config is encoder.config
    assert graphed.num_features == encoder.num_features
    assert graphed.out_features == encoder.out_features
