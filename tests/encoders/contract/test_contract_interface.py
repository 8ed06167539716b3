"""The small conveniences of encoders and of what goes in and out of them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput, VisionInputs
from tests.oracles import TOWERS, draw_pixels, grids_for, tiny
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder


@pytest.mark.parametrize("name", TOWERS)
def test_an_encoder_says_its_widths_device_and_dtype(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    output = encoder(draw_pixels(encoder, grids), grids)
    assert encoder.num_features == output.last_hidden_state.shape[-1]
    assert encoder.out_features == output.pooler_output.shape[-1]
    assert (encoder.device, encoder.dtype) == (torch.device("cpu"), output.pooler_output.dtype)
    assert len(encoder.blocks) == encoder.config.depth


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_knows_the_weight_whose_dtype_its_pixels_get(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, grids, weights = tiny(name), grids_for(name), list[Tensor]()
    admit = VisionEncoder._admit_pixels

    def noting(self: VisionEncoder, pixels: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        weights.append(weight)
        return admit(self, pixels, weight, *rest)

    monkeypatch.setattr(VisionEncoder, "_admit_pixels", noting)
    encoder(draw_pixels(encoder, grids), grids)
    (weight,) = weights
    assert encoder._pixel_weight is weight


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("qwen3_vl", "patch_embed"),
        ("deepseek_v4", "patch_embed"),
        ("step3_vl", "conv1"),
        ("deepseek_ocr", "sam_model"),
        ("deepseek_ocr2", "sam_model"),
    ],
)
def test_pixels_are_not_rounded_before_a_layer_of_float32_reads_them(
    name: str, reader: str, tmp_path: Path
) -> None:
    write_seeded_checkpoint(tmp_path, name, width=64)
    encoder = load_encoder(tmp_path, dtype=torch.bfloat16, progress=False)
    assert encoder.item_encoder().pixel_dtype == torch.bfloat16
    encoder.get_submodule(reader).float()
    assert encoder.item_encoder().pixel_dtype == torch.float32


@pytest.mark.parametrize("name", TOWERS)
def test_intermediates_come_as_maps_too(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    rows = encoder.forward_intermediates(pixels, grids, [0, -1])
    maps = encoder.forward_intermediates(pixels, grids, [0, -1], output_fmt="NCHW")
    for state, items in zip(rows, maps, strict=True):
        expected = encoder.feature_maps(state, grids)
        assert [list(x.shape) for x in items] == [[t, state.shape[-1], h, w] for t, h, w in grids]
        for item, raster in zip(items, expected, strict=True):
            assert torch.equal(item.permute(0, 2, 3, 1), raster)


def test_another_output_format_is_refused() -> None:
    encoder, grids = tiny("qwen3_vl"), [[1, 4, 4]]
    with pytest.raises(ValueError, match='output_fmt=\'HWC\': must be "NLC" or "NCHW"'):
        encoder.forward_intermediates(draw_pixels(encoder, grids), grids, 1, output_fmt="HWC")


def test_checkpointing_is_switched_on_and_off() -> None:
    encoder = tiny("qwen3_vl")
    encoder.gradient_checkpointing_enable()
    assert encoder.gradient_checkpointing
    encoder.gradient_checkpointing_disable()
    assert not encoder.gradient_checkpointing


def test_inputs_and_outputs_are_cast_together() -> None:
    inputs = VisionInputs(torch.ones(4, 3), torch.tensor([[1, 2, 2]])).to("cpu", torch.float16)
    assert inputs.pixel_values.dtype == torch.float16
    assert inputs.grid_thw.dtype == torch.int64
    whole = EncoderOutput(torch.ones(4, 2), torch.ones(1, 2), (torch.ones(1, 2),))
    cast = whole.to(dtype=torch.float64)
    assert cast.deepstack_features is not None
    assert {x.dtype for x in (cast[0], cast[1], *cast.deepstack_features)} == {torch.float64}
    assert EncoderOutput(None, torch.ones(1), None).to("cpu")[0] is None


def test_a_dtype_alone_may_be_the_first_argument() -> None:
    inputs = VisionInputs(torch.ones(4, 3), torch.tensor([[1, 2, 2]])).to(torch.float16)
    assert inputs.pixel_values.dtype == torch.float16
    assert inputs.paths["image"].to(torch.float64).pixel_values.dtype == torch.float64
    output = EncoderOutput(torch.ones(4, 2), None, None).to(torch.float64)
    assert output.last_hidden_state is not None
    assert output.last_hidden_state.dtype == torch.float64
    with pytest.raises(ValueError, match=r"torch.float16, torch.float32\): two dtypes"):
        inputs.to(torch.float16, torch.float32)


def test_a_processors_images_come_before_its_videos() -> None:
    features = {
        "input_ids": [1, 2],
        "pixel_values_videos": torch.full((8, 3), 2.0),
        "video_grid_thw": [[2, 2, 2]],
        "pixel_values": torch.full((4, 3), 1.0),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }
    inputs = VisionInputs.from_processor(features)
    assert inputs.grid_thw.tolist() == [[1, 2, 2], [2, 2, 2]]
    assert inputs.pixel_values[:, 0].tolist() == [1.0] * 4 + [2.0] * 8


def test_half_a_processors_output_is_refused() -> None:
    with pytest.raises(ValueError, match="gave pixel_values without image_grid_thw"):
        VisionInputs.from_processor({"pixel_values": torch.ones(4, 3)})
    with pytest.raises(ValueError, match=r"gave \['input_ids'\]: pass the output that has"):
        VisionInputs.from_processor({"input_ids": [1]})


def test_inputs_travel_between_processes() -> None:
    inputs = VisionInputs(torch.ones(4, 2), torch.tensor([[1, 2, 2]]), [(1, 1, False)])
    for copied in (pickle.loads(pickle.dumps(inputs)), copy.deepcopy(inputs)):
        assert type(copied) is VisionInputs
        assert torch.equal(copied.pixel_values, inputs.pixel_values)
        assert copied.tiles == inputs.tiles
        assert copied.paths.keys() == {"image"}
