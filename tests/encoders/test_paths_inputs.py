"""Inputs of several paths: split and joined without loss, and refused where paths do not agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from encoders import Step3VLEncoder
from encoders.contract import PathInputs
from encoders.streams.calls import join_inputs, split_inputs
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME
from tests.support.towers.step3_paths import COUNTS, IMAGES, STEP3_VL, fresh, shared, tokens


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
    pixels, grids, _ = inputs.paths["tiles"]
    lost = inputs._replace(other_paths={"tiles": PathInputs(pixels[:0], grids[:0], ())})
    graphed = GraphedEncoder(encoder, backend="eager")
    with pytest.raises(ValueError, match="path 'tiles' has 0 entries for 4 items"):
        graphed(lost)
    encoder.conv1.register_forward_hook(lambda *_: pytest.fail("a path ran"))
    with pytest.raises(ValueError, match="path 'tiles' has 0 entries for 4 items"):
        encoder(lost)


def test_what_is_no_input_of_this_encoder_is_named() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES)
    with pytest.raises(ValueError, match=r"has the paths image, tiles.*call encoder\(inputs\)"):
        encoder(inputs.pixel_values)
    with pytest.raises(
        ValueError, match="the inputs have the paths image, and this encoder has image,"
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


def test_tiling_can_be_off_by_the_config() -> None:
    encoder = Step3VLEncoder(replace(STEP3_VL, enable_patch=False))
    assert encoder.preprocess(IMAGES).tiles == [(1, 1, False)] * 4


def test_tiling_is_on_where_the_config_does_not_say() -> None:
    for family in (BY_NAME["step3"], BY_NAME["step3_vl"]):
        for flag in ({}, {"enable_patch": True}, {"enable_patch": False}):
            vision = {**family.config["vision_config"], **flag}
            config = family.config_class.from_hf({**family.config, "vision_config": vision})
            assert config.enable_patch is flag.get("enable_patch", True)
