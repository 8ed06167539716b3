"""Wrong pixels, grids and configs raise errors that state the value, the rule and the fix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from encoders import VisionInputs
from tests.oracles import (
    BY_NAME,
    MERGING_TOWERS,
    PATCH_TOWERS,
    TOWERS,
    WHOLE,
    draw_pixels,
    edited,
    tiny,
)

# --- pixels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_integer_pixels_are_refused(name: str, dtype: torch.dtype) -> None:
    encoder = tiny(name)
    pixels = torch.zeros(4 if name in PATCH_TOWERS else 1, *encoder.row_shape, dtype=dtype)
    grid = [[1, 2, 2]] if name in PATCH_TOWERS else [[1, 8, 8]]
    with pytest.raises(ValueError, match=rf"{dtype}.*normalised.*preprocess"):
        encoder(pixels, grid)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("qwen2_vl", (4, 1536), "rows of patches"),
        ("qwen3_vl", (4, 1176), "rows of patches"),
        ("qwen3_vl", (4, 3, 448, 448), "whole images or tiles"),
        ("intern_vit_300m", (1, 1176), "rows of patches"),
    ],
)
def test_pixels_of_another_kind_of_tower_are_recognised(name: str, shape: tuple, kind: str) -> None:
    encoder = tiny(name)
    metadata = encoder.prepare_encoder_metadata(
        [[1, 2, 2]] if name in PATCH_TOWERS else [[1, 8, 8]]
    )
    with pytest.raises(ValueError, match=kind) as caught:
        encoder(torch.zeros(shape), encoder_metadata=metadata)
    assert str(shape) in str(caught.value)
    assert "preprocess" in str(caught.value)


@pytest.mark.parametrize("name", PATCH_TOWERS)
def test_a_width_of_no_family_is_refused_with_the_right_one(name: str) -> None:
    encoder = tiny(name)
    with pytest.raises(ValueError, match=rf"\(4, 100\).*{encoder.row_shape[0]}"):
        encoder(torch.zeros(4, 100), [[1, 2, 2]])


@pytest.mark.parametrize(
    "shape", [(1, 3, 100, 112), (1, 3, 112, 0), (1, 4, 112, 112), (1, 112, 112), (3, 112, 112, 3)]
)
def test_tiles_that_cannot_be_cut_into_patches_are_refused(shape: tuple[int, ...]) -> None:
    encoder = tiny("intern_vit_300m")
    metadata = encoder.prepare_encoder_metadata([[shape[0], 8, 8]])
    with pytest.raises(ValueError, match=r"multiples of 28") as caught:
        encoder(torch.zeros(shape), encoder_metadata=metadata)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("name", TOWERS)
def test_a_grid_that_disagrees_with_the_pixels_names_both_counts(name: str) -> None:
    encoder = tiny(name)
    right, wrong = (
        ([[1, 4, 4]], [[1, 4, 6]]) if name in PATCH_TOWERS else ([[2, 8, 8]], [[3, 8, 8]])
    )
    pixels = draw_pixels(encoder, right)
    counts = ("16", "24") if name in PATCH_TOWERS else ("2", "3")
    with pytest.raises(ValueError, match=rf"{counts[0]} rows.*{counts[1]}.*grid_thw that belongs"):
        encoder(pixels, wrong)
    with pytest.raises(ValueError, match=rf"{counts[0]} rows.*{counts[1]}"):
        encoder.forward_intermediates(pixels, wrong)


def test_tiles_of_another_size_than_the_grid_says_are_refused() -> None:
    encoder = tiny("intern_vit_300m")
    pixels = draw_pixels(encoder, [[1, 8, 8]])
    with pytest.raises(ValueError, match=r"grid 4x4 .*\(1, 3, 112, 112\).*grid_thw"):
        encoder(pixels, [[1, 4, 4]])


@pytest.mark.parametrize("name", PATCH_TOWERS)
def test_metadata_of_another_grid_is_refused(name: str) -> None:
    encoder = tiny(name)
    metadata = encoder.prepare_encoder_metadata([[1, 4, 6]])
    with pytest.raises(
        ValueError, match=r"16 rows but encoder_metadata is for 24: pass .*made of it"
    ):
        encoder(draw_pixels(encoder, [[1, 4, 4]]), encoder_metadata=metadata)


@pytest.mark.parametrize("name", [name for name in TOWERS if name not in PATCH_TOWERS])
@pytest.mark.parametrize(("pixels", "other"), [(4, 8), (8, 4)])
def test_metadata_of_tiles_of_another_size_is_refused(name: str, pixels: int, other: int) -> None:
    encoder = tiny(name)
    metadata = encoder.prepare_encoder_metadata([[1, other, other]])
    with pytest.raises(ValueError, match=r"these pixels.*metadata"):
        encoder(draw_pixels(encoder, [[1, pixels, pixels]]), encoder_metadata=metadata)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("kind", ["list", "array", "scalar", "batch"])
def test_values_that_are_no_tensor_of_rows_are_named(name: str, kind: str) -> None:
    encoder = tiny(name)
    grid = [[1, 4, 6]] if name in PATCH_TOWERS else [[1, 8, 8]]
    pixels = draw_pixels(encoder, grid)
    wrong: Any = {
        "list": [pixels],
        "array": pixels.numpy(),
        "scalar": pixels[0].mean(),
        "batch": pixels[None],
    }[kind]
    words = {"list": "list", "array": "ndarray", "scalar": r"\(\)", "batch": r"\(1, "}[kind]
    with pytest.raises(ValueError, match=rf"pixel_values.*{words}.*preprocess"):
        encoder(wrong, grid)
    with pytest.raises(ValueError, match=rf"pixel_values.*{words}.*preprocess"):
        encoder.forward_intermediates(wrong, grid)


@pytest.mark.parametrize("name", WHOLE)
def test_what_preprocess_gives_is_not_pixels_and_it_says_what_is(name: str) -> None:
    encoder = tiny(name)
    inputs: Any = encoder.preprocess([torch.zeros(3, 56, 56, dtype=torch.uint8)])
    with pytest.raises(ValueError, match=r"VisionInputs.*inputs\.pixel_values, inputs\.grid"):
        encoder.forward(inputs, inputs.grid_thw)
    with pytest.raises(ValueError, match="was given with grid_thw or encoder_metadata"):
        encoder(inputs, inputs.grid_thw)
    with pytest.raises(ValueError, match=r"^grid_thw was given with the result of preprocess"):
        encoder.forward_intermediates(inputs, inputs.grid_thw)
    with pytest.raises(ValueError, match=r"of type list.*call encoder\.preprocess"):
        encoder([inputs.pixel_values])


# --- outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
def test_a_whole_output_and_one_of_its_tensors_are_told_apart(name: str) -> None:
    encoder = tiny(name)
    grids = [[1, 4, 6]] if name in PATCH_TOWERS else [[1, 8, 8]]
    output: Any = encoder(draw_pixels(encoder, grids), grids)
    for wrong, words in (
        (output, "EncoderOutput"),
        (output._replace(pooler_output=None)[1], "None"),
    ):
        with pytest.raises(ValueError, match=rf"features .*{words}.*output\.last_hidden_state"):
            encoder.feature_maps(wrong, grids)
    with pytest.raises(
        ValueError, match=r"output is of type Tensor: split takes the EncoderOutput"
    ):
        encoder.split(output.pooler_output, grids)


# --- grids -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MERGING_TOWERS)
def test_an_indivisible_grid_is_refused_with_the_nearest_sizes(name: str) -> None:
    encoder = tiny(name)
    with pytest.raises(
        ValueError,
        match=r"grid 27x36: height 27 must be a multiple of spatial_merge_size=2; .*26 or 28",
    ):
        encoder.item_specs([[1, 27, 36]])
    with pytest.raises(ValueError, match=r"grid 4x1: width 1 .*resize to 2 patches"):
        encoder.prepare_encoder_metadata([[1, 4, 1]])


def test_a_tile_grid_that_pixel_shuffle_cannot_halve_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grid 5x4: height 5 must be a multiple of .*=2"):
        tiny("intern_vit_300m").item_specs([[1, 5, 4]])


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize(
    "grid",
    [
        [[1, 4]],
        [[1, 4, 4, 4]],
        [[0, 4, 4]],
        [[1, -4, 4]],
        [[1, 4, 0]],
        [[1, 4.5, 4]],
        [[1, float("nan"), 4]],
        [[1, float("inf"), 4]],
        [["1", "4", "4"]],
        [["a", "b", "c"]],
        [[1, None, 4]],
        [[[1, 4, 4]]],
        5,
        None,
        "144",
    ],
    ids=str,
)
def test_a_row_that_is_not_three_positive_integers_is_refused(name: str, grid: Any) -> None:
    with pytest.raises(ValueError, match=r"grid_thw.*three positive integers \(t, h, w\)"):
        tiny(name).prepare_encoder_metadata(grid)


@pytest.mark.parametrize("name", TOWERS)
def test_pixels_in_place_of_a_grid_are_not_printed(name: str) -> None:
    encoder = tiny(name)
    grids = [[1, 4, 6]] if name in PATCH_TOWERS else [[1, 8, 8]]
    pixels = draw_pixels(encoder, grids)
    with pytest.raises(ValueError, match=r"three positive integers \(t, h, w\)") as raised:
        encoder.item_specs([pixels])
    assert len(str(raised.value)) < 200
    with pytest.raises(ValueError, match=r"whole result of preprocess: pass inputs\.grid_thw"):
        encoder.item_specs(VisionInputs(pixels, torch.tensor(grids)))


@pytest.mark.parametrize("name", TOWERS)
def test_splitting_by_too_many_items_names_both_counts(name: str) -> None:
    encoder = tiny(name)
    grids = [[1, 4, 6]] if name in PATCH_TOWERS else [[1, 8, 8]]
    output = encoder(draw_pixels(encoder, grids), grids)
    counts = ("24", "48") if name in PATCH_TOWERS else ("1", "2")
    with pytest.raises(ValueError, match=rf"{counts[0]} rows.*{counts[1]}.*grid_thw"):
        encoder.split(output, [*grids, *grids])
    tokens = len(output.pooler_output)
    with pytest.raises(ValueError, match=rf"{tokens} rows.*{2 * tokens}"):
        encoder.split(output._replace(last_hidden_state=None), [*grids, *grids])


@pytest.mark.parametrize("name", TOWERS)
def test_a_grid_may_be_a_list_tuple_tensor_array_or_one_item(name: str) -> None:
    encoder = tiny(name)
    specs = encoder.item_specs([[2, 4, 6]])
    one_item: Any
    for one_item in (
        [(2, 4, 6)],
        ((2, 4, 6),),
        (2, 4, 6),
        [2, 4, 6],
        torch.tensor([[2, 4, 6]]),
        torch.tensor([2, 4, 6]),
        [torch.tensor([2, 4, 6])],
        torch.tensor([[2, 4, 6]], dtype=torch.int32),
        np.array([[2, 4, 6]]),
        np.array([2, 4, 6]),
        [np.array([2, 4, 6], dtype=np.uint8)],
    ):
        assert encoder.item_specs(one_item) == specs


# --- configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen2_vl", {"hidden_act": "relu"}, r"hidden_act='relu'.*quick_gelu"),
        ("qwen2_5_vl", {"hidden_act": "gelu"}, r"hidden_act='gelu'.*silu"),
        ("qwen3_vl", {"hidden_act": "gelu"}, r"hidden_act='gelu'.*gelu_pytorch_tanh"),
        ("intern_vit_300m", {"norm_type": "batch_norm"}, r"norm_type='batch_norm'.*layer_norm"),
        ("qwen2_vl", {"num_heads": 7}, r"hidden_size=1280.*num_heads=7"),
        ("qwen3_vl", {"num_position_embeddings": 2300}, r"2300.*square"),
        ("qwen3_vl", {"depth": 20}, r"\[8, 16, 24\].*blocks 0 to 19"),
        ("qwen2_5_vl", {"window_size": 14}, r"window_size=14.*28"),
        ("intern_vit_300m", {"select_layer": -30}, r"select_layer=-30 must be from -25 to 24"),
        ("qwen3_vl", {"depth": 0}, r"depth=0"),
        ("qwen3_vl", {"hidden_size": "1152"}, r"hidden_size='1152'"),
        ("qwen3_vl", {"deepstack_visual_indexes": ["8"]}, r"_indexes=\['8'\].*list of"),
        ("qwen3_vl", {"deepstack_visual_indexes": 8}, r"deepstack_visual_indexes=8.*list of"),
        ("qwen2_5_vl", {"fullatt_block_indexes": ["7", "15"]}, r"_indexes=\['7', '15'\].*list"),
        ("qwen2_5_vl", {"fullatt_block_indexes": 7}, r"fullatt_block_indexes=7.*list of"),
        ("qwen2_5_vl", {"fullatt_block_indexes": "7"}, r"fullatt_block_indexes='7'.*list of"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str
) -> None:
    family = BY_NAME[name]
    with pytest.raises(ValueError, match=words):
        family.config_class.from_hf(edited(family.config, **changes))


def test_a_width_without_a_published_default_must_be_given() -> None:
    config = {"vision_config": {"model_type": "qwen2_5_vl"}}
    with pytest.raises(ValueError, match=r"no hidden_size.*no published default"):
        BY_NAME["qwen2_5_vl"].config_class.from_hf(config)


@pytest.mark.parametrize("name", TOWERS)
def test_unknown_keys_are_ignored_and_configs_are_frozen(name: str) -> None:
    family = BY_NAME[name]
    config = family.config_class.from_hf(edited(family.config, num_experts=8, use_moe=False))
    assert config == family.config_class.from_hf(family.config)
    with pytest.raises(AttributeError):
        config.depth = 1
