"""Encoders of several input paths: each path is an encoder, and items are joined from them."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders import Encoder, PathsEncoder, Step3Config, Step3Encoder, Step3VLConfig, Step3VLEncoder
from encoders.contract import EncoderOutput, MultiPathEncoder, PathInputs, VisionInputs
from encoders.streams import ItemResults, join_inputs, split_inputs
from encoders.streams.calls import FIELDS
from graphwrap import GraphedEncoder
from oracles import distance, draw_weights

SIZES = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
STEP3_VL = Step3VLConfig(**SIZES, out_hidden_size=48, image_size=112, tile_size=84)
STEP3 = Step3Config(**SIZES, downsampled_size=40, out_hidden_size=48, image_size=112, tile_size=84)
NAMES = ("step3_vl", "step3")


def fresh(name: str, dtype: torch.dtype = torch.float32) -> PathsEncoder:
    encoder = Step3VLEncoder(STEP3_VL) if name == "step3_vl" else Step3Encoder(STEP3)
    draw_weights(encoder.to(dtype), calm=0.5)
    return encoder.eval().requires_grad_(False)


@cache
def shared(name: str) -> PathsEncoder:
    """An encoder that tests must not change."""
    return fresh(name)


def image(width: int, height: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (3, height, width), generator=generator, dtype=torch.uint8)


IMAGES = [image(300, 200, 1), image(80, 90, 2), image(150, 160, 3), image(60, 60, 4)]
"""Of 12, 0, 4 and 0 tiles of 84 pixels."""
COUNTS = [12, 0, 4, 0]


def tokens(output: EncoderOutput) -> Tensor:
    assert output.pooler_output is not None
    return output.pooler_output


# --- what an encoder of paths is -----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_paths_are_encoders_over_the_same_parameters(name: str) -> None:
    encoder = shared(name)
    assert isinstance(encoder, Encoder)
    assert isinstance(encoder, MultiPathEncoder)
    assert list(encoder.paths) == ["image", "tiles"]
    own = dict(encoder.named_parameters())
    for path in encoder.paths.values():
        assert {key: id(weight) for key, weight in path.named_parameters()} == {
            key: id(weight) for key, weight in own.items()
        }
    assert encoder.state_dict().keys() == own.keys()
    assert encoder.paths["image"].row_shape == (3, 112, 112)
    assert encoder.paths["tiles"].row_shape == (3, 84, 84)
    assert (encoder.num_features, encoder.out_features) == (64, 48)
    assert (encoder.device, encoder.dtype) == (torch.device("cpu"), torch.float32)
    assert len(encoder.blocks) == encoder.config.depth


@pytest.mark.parametrize("name", NAMES)
def test_paths_follow_casts_copies_and_new_weights(name: str) -> None:
    encoder = fresh(name)
    inputs = encoder.preprocess(IMAGES[:1])
    other = copy.deepcopy(encoder).to(torch.float64)
    assert (other.paths["tiles"].dtype, encoder.paths["tiles"].dtype) == (
        torch.float64,
        torch.float32,
    )
    assert distance(tokens(other(inputs)[0]), tokens(encoder(inputs)[0])) <= 1e-5
    zeros = {key: torch.zeros_like(value) for key, value in encoder.state_dict().items()}
    encoder.load_state_dict(zeros, assign=True)
    assert not tokens(encoder(inputs)[0]).any()


# --- running and joining -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_item_is_its_tiles_then_the_whole_image(name: str) -> None:
    encoder = shared(name)
    inputs = encoder.preprocess(IMAGES)
    whole, tiles = (encoder.paths[path](*inputs.paths[path]) for path in ("image", "tiles"))
    outputs = encoder(inputs)
    assert [len(tokens(output)) for output in outputs] == [4 * (count + 1) for count in COUNTS]
    start = 0
    for number, (output, count) in enumerate(zip(outputs, COUNTS, strict=True)):
        first = tokens(tiles)[4 * start : 4 * (start + count)]
        last = tokens(whole)[4 * number : 4 * number + 4]
        assert torch.equal(tokens(output), torch.cat([first, last]))
        assert output.last_hidden_state is not None
        assert output.last_hidden_state.shape == (36 * count + 64, 64)
        assert torch.equal(output.last_hidden_state[-64:], whole.last_hidden_state[number, -64:])
        start += count


def test_items_without_tiles_run_one_path_only() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES[1::2])
    assert list(encoder.forward_intermediates(inputs, 1)) == ["image"]
    joined: list[set[str]] = []

    class Watched(Step3VLEncoder):
        def join(self, outputs: Any, inputs: VisionInputs) -> list[EncoderOutput]:
            joined.append(set(outputs))
            return super().join(outputs, inputs)

    watched = Watched(STEP3_VL)
    watched.load_state_dict(encoder.state_dict())
    watched.encode(IMAGES[1::2])
    watched(inputs)
    assert joined == [{"image"}] * 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [None, 1, 5, 9, 21, 1000])
def test_encode_gives_the_items_of_forward_at_every_limit(name: str, limit: int | None) -> None:
    encoder = shared(name)
    expected = encoder(encoder.preprocess(IMAGES))
    for one, other in zip(encoder.encode(IMAGES, max_tokens_per_call=limit), expected, strict=True):
        assert distance(tokens(one), tokens(other)) <= 2e-6
        assert distance(one.last_hidden_state, other.last_hidden_state) <= 2e-6
        assert tokens(one).untyped_storage().nbytes() == tokens(one).nbytes


@pytest.mark.parametrize("batch_tokens", [1, 40, 1000])
def test_a_stream_gives_what_encode_gives(batch_tokens: int) -> None:
    encoder = shared("step3_vl")
    results = encoder.encode_many(IMAGES, batch_tokens=batch_tokens, progress=False)
    for one, other in zip(results, encoder.encode(IMAGES), strict=True):
        assert distance(tokens(one), tokens(other)) <= 2e-6


def test_a_pool_is_over_the_tokens_of_every_path() -> None:
    encoder = shared("step3_vl")
    for vector, output in zip(
        encoder.encode(IMAGES, pool="mean"), encoder.encode(IMAGES), strict=True
    ):
        assert distance(vector, tokens(output).mean(0)) <= 2e-6
    with pytest.raises(ValueError, match="pool='cls': this encoder has no class token"):
        encoder.encode(IMAGES, pool="cls")


def test_nothing_is_encoded_to_nothing() -> None:
    encoder = shared("step3_vl")
    assert encoder.encode() == encoder(encoder.preprocess()) == []


def test_fields_that_were_left_out_stay_out() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES[:1])
    outputs = {
        name: encoder.paths[name](*path)._replace(last_hidden_state=None, deepstack_features=None)
        for name, path in inputs.paths.items()
    }
    (joined,) = encoder.join(outputs, inputs)
    assert joined.last_hidden_state is joined.deepstack_features is None
    assert tokens(joined).shape == (52, 48)


@pytest.mark.parametrize("name", NAMES)
def test_intermediates_are_those_of_each_path(name: str) -> None:
    encoder = shared(name)
    inputs = encoder.preprocess(IMAGES)
    found = encoder.forward_intermediates(inputs, [-1])
    for path, (last,) in found.items():
        output = encoder.paths[path](*inputs.paths[path])
        assert torch.equal(last, output.last_hidden_state)


@pytest.mark.parametrize("name", NAMES)
def test_intermediates_of_each_path_come_as_maps_too(name: str) -> None:
    encoder = shared(name)
    inputs = encoder.preprocess(IMAGES)
    rows = encoder.forward_intermediates(inputs, [0, -1])
    maps = encoder.forward_intermediates(inputs, [0, -1], output_fmt="NCHW")
    assert maps.keys() == rows.keys() == inputs.paths.keys()
    for path, states in rows.items():
        grids = inputs.paths[path].grid_thw
        for state, items in zip(states, maps[path], strict=True):
            expected = encoder.paths[path].feature_maps(state, grids)
            for item, raster in zip(items, expected, strict=True):
                assert torch.equal(item.permute(0, 2, 3, 1), raster)


def test_gradients_reach_the_tower_from_both_paths() -> None:
    encoder = fresh("step3_vl").requires_grad_(True)
    inputs = encoder.preprocess(IMAGES[:1])
    plain = gradient(encoder, inputs)
    encoder.gradient_checkpointing_enable()
    assert distance(gradient(encoder, inputs), plain) <= 1e-6
    encoder.gradient_checkpointing_disable()
    alone = inputs._replace(tiles=[(1, 1, False)], other_paths={"tiles": nothing()})
    assert distance(gradient(encoder, alone), plain) > 0.1


def gradient(encoder: PathsEncoder, inputs: VisionInputs) -> Tensor:
    weight = next(encoder.parameters())
    (found,) = torch.autograd.grad(tokens(encoder(inputs)[0]).square().sum(), weight)
    return found


def nothing() -> PathInputs:
    return PathInputs(torch.zeros(0, 3, 84, 84), torch.zeros(0, 3, dtype=torch.int64))


# --- features in space ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["last_hidden_state", "pooler_output"])
def test_maps_are_one_of_the_image_and_one_of_its_tiles(name: str, kind: str) -> None:
    """Every row carries its item, path, row and column in the image."""
    encoder, side, whole = shared(name), *((6, 8) if kind == "last_hidden_state" else (2, 2))
    inputs = encoder.preprocess(IMAGES)
    codes: list[tuple[int, int, int, int]] = []
    for item, (columns, rows, tiled) in enumerate(inputs.tiles or []):
        for tile in range(columns * rows if tiled else 0):
            top, left = side * (tile // columns), side * (tile % columns)
            codes += [(item, 1, top + y, left + x) for y in range(side) for x in range(side)]
        codes += [(item, 0, y, x) for y in range(whole) for x in range(whole)]
    for item, maps in enumerate(encoder.feature_maps(torch.tensor(codes), inputs)):
        assert set(maps) == ({"image", "tiles"} if COUNTS[item] else {"image"})
        for path, found in maps.items():
            rows, columns = found.shape[1:3]
            for y in range(rows):
                for x in range(columns):
                    assert found[0, y, x].tolist() == [item, path == "tiles", y, x]


def test_features_of_other_inputs_are_refused() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES)
    with pytest.raises(
        ValueError, match="features have 7 rows: these inputs make 832 patches or 80"
    ):
        encoder.feature_maps(torch.zeros(7, 48), inputs)
    with pytest.raises(ValueError, match="features is of type list"):
        encoder.feature_maps([1], inputs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"inputs is of type Tensor: .* paths image, tiles"):
        encoder.feature_maps(torch.zeros(7, 48), inputs.grid_thw)


# --- inputs --------------------------------------------------------------------------------------


def test_inputs_are_split_and_joined_without_loss() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES)
    alone = split_inputs(inputs, encoder.paths)
    assert [len(item.paths["tiles"].pixel_values) for item in alone] == COUNTS
    again = join_inputs(alone)
    assert again.tiles == inputs.tiles
    for name, path in inputs.paths.items():
        assert torch.equal(again.paths[name].pixel_values, path.pixel_values)
        assert torch.equal(again.paths[name].grid_thw, path.grid_thw)


def test_all_pixels_move_together() -> None:
    inputs = shared("step3_vl").preprocess(IMAGES).to(dtype=torch.float16)
    assert {path.pixel_values.dtype for path in inputs.paths.values()} == {torch.float16}


@pytest.mark.parametrize("tiles", [None, [(1, 1, False)] * 4, [(2, 2, True)] * 3])
def test_entries_that_fit_no_item_are_refused(tiles: Any) -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES)._replace(tiles=tiles)
    with pytest.raises(ValueError, match="path 'tiles' has 2 entries for 4 items"):
        encoder(inputs)


def test_tiles_that_got_lost_are_missed_before_a_path_runs() -> None:
    encoder = fresh("step3_vl")
    inputs = encoder.preprocess(IMAGES)
    pixels, grids = inputs.paths["tiles"]
    lost = inputs._replace(other_paths={"tiles": PathInputs(pixels[:0], grids[:0])})
    graphed = GraphedEncoder(encoder, backend="eager")
    with pytest.raises(ValueError, match="path 'tiles' has 0 entries for 4 items"):
        graphed(lost)
    encoder.conv1.register_forward_hook(lambda *_: pytest.fail("a path ran"))
    with pytest.raises(ValueError, match="path 'tiles' has 0 entries for 4 items"):
        encoder(lost)


def test_what_is_no_input_of_this_encoder_is_named() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES)
    with pytest.raises(ValueError, match="of type Tensor: this encoder has the paths image, tiles"):
        encoder(inputs.pixel_values)
    with pytest.raises(
        ValueError, match="the inputs have the paths image, this encoder has image,"
    ):
        encoder(inputs._replace(other_paths={}))
    with pytest.raises(ValueError, match=r"path.*call preprocess or encode of the encoder"):
        encoder.paths["tiles"].encode(IMAGES)


def test_views_of_two_sizes_in_one_call_are_refused() -> None:
    path = shared("step3_vl").paths["tiles"]
    with pytest.raises(ValueError, match="grid 8x8: all views of a call have one size, here 6x6"):
        path.prepare_encoder_metadata([[1, 6, 6], [1, 8, 8]])
    with pytest.raises(ValueError, match="grid 8x8: all views of a call have one size, here 6x6"):
        path.prepare_encoder_metadata([[1, 8, 8]], max_input_size=4)


def test_a_view_too_small_for_the_convolutions_is_refused() -> None:
    path = shared("step3").paths["tiles"]
    with pytest.raises(ValueError, match="grid 8x1: the first convolution joins 2x2 patches"):
        path(torch.zeros(1, 3, 112, 14), [[1, 8, 1]])
    assert len(tokens(path(torch.zeros(1, 3, 28, 28), [[1, 2, 2]]))) == 1


# --- accelerated ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("fused")
def test_the_accelerated_form_accelerates_every_path() -> None:
    encoder = shared("step3_vl")
    fast = encoder.accelerated()
    for one, other in zip(fast.encode(IMAGES), encoder.encode(IMAGES), strict=True):
        assert distance(tokens(one), tokens(other)) <= 2e-6
    choices = fast.kernel_choices()
    assert set(choices) == {"image", "tiles"}
    assert [choice["layers_called"] for choice in choices.values()] == [0, 0]
    encoder.accelerated().load_kernel_choices(choices)
    with pytest.raises(ValueError, match="for image: this encoder has the paths image, tiles"):
        fast.load_kernel_choices({"image": choices["image"]})
    with pytest.raises(ValueError, match="accelerated already"):
        fast.accelerated()


@pytest.mark.usefixtures("fused")
@torch.no_grad()
def test_fused_blocks_refuse_angles_of_larger_views() -> None:
    path = shared("step3_vl").paths["tiles"]
    pixels, metadata = torch.zeros(1, 3, 84, 84), path.prepare_encoder_metadata([[1, 8, 8]])
    for tower in (path, path.accelerated()):
        with pytest.raises(ValueError, match=r"views of.* 64"):
            tower(pixels, encoder_metadata=metadata)


@pytest.mark.usefixtures("fused")
def test_blocks_with_norms_on_their_branches_run_as_the_reference() -> None:
    encoder = shared("step3")
    fast = encoder.accelerated()
    for one, other in zip(fast.encode(IMAGES), encoder.encode(IMAGES), strict=True):
        assert torch.equal(tokens(one), tokens(other))
    assert "norms on its branches" in fast.kernel_choices()["image"]["reference_because"]


@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_both_paths_give_the_items_of_encode(name: str) -> None:
    encoder = shared(name)
    graphed = GraphedEncoder(
        encoder, {"image": [4, 16], "tiles": [16, 48]}, outputs=FIELDS, backend="static"
    )
    expected = encoder.encode(IMAGES)
    inputs = encoder.preprocess(IMAGES)
    for results in (graphed.encode(IMAGES), graphed(inputs)):
        for one, other in zip(results, expected, strict=True):
            assert distance(tokens(one), tokens(other)) <= 2e-6
    assert {budget.path for budget in graphed.stats().budgets} == {"image", "tiles"}


def test_tiling_can_be_off_by_the_config() -> None:
    encoder = Step3VLEncoder(replace(STEP3_VL, enable_patch=False))
    assert encoder.preprocess(IMAGES).tiles == [(1, 1, False)] * 4


def test_an_encoding_owns_no_views_of_the_next_call() -> None:
    encoder = shared("step3_vl")
    encoding = replace(encoder.encoding(), owned=False)
    inputs = encoder.preprocess(IMAGES)
    for one, other in zip(encoding.run(inputs, ItemResults()), encoder(inputs), strict=True):
        assert distance(tokens(one), tokens(other)) <= 2e-6
