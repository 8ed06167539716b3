"""SAM 3: its windows, the levels of its neck, and what a config may state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.sam3 import configuration_sam3

from encoders import Sam3Config, Sam3Encoder
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, LiftFloat32, build_pair, distance, draw_pixels
from tests.oracles.configs import edited
from tests.oracles.references.sam3 import SAM3_NARROW, sam3_maps
from tests.support.photographs import china, flower

ROW = BY_NAME["sam3"]
LEVELS = {"scale_factors": [4.0, 2.0, 1.0, 0.5]}
PUBLISHED_WINDOWS = {
    **SAM3_NARROW, **LEVELS,
    "window_size": 24, "pretrain_image_size": 336, "num_hidden_layers": 2,
    "global_attn_indexes": [1], "image_size": 672,
}  # fmt: skip


def small(**changes: Any) -> tuple[Sam3Encoder, Any]:
    encoder, reference = build_pair(ROW, {**ROW.tiny, **LEVELS, **changes})
    assert isinstance(encoder, Sam3Encoder)
    return encoder, reference


def test_every_level_of_the_neck_is_that_of_transformers() -> None:
    lift = LiftFloat32()
    encoder, reference = build_pair(ROW, PUBLISHED_WINDOWS, torch.float64, lift)
    assert isinstance(encoder, Sam3Encoder)
    grids = [[1, 48, 48]]
    pixels = draw_pixels(encoder, grids, dtype=torch.float64)
    output = encoder(pixels, grids)
    with lift:
        hidden, levels = sam3_maps(reference, pixels)
    assert distance(output.last_hidden_state, hidden) <= 1e-10
    (maps,) = encoder.neck_maps(output.last_hidden_state, grids)
    assert [*maps] == ["x4", "x2", "x1", "x0.5"]
    for ours, theirs in zip(maps.values(), levels, strict=True):
        assert distance(ours, theirs.permute(0, 2, 3, 1)) <= 1e-10


def test_levels_of_outputs_are_those_of_their_pixels() -> None:
    encoder, reference = small()
    inputs = encoder.preprocess([china(), flower()])
    outputs = encoder(inputs)
    maps = encoder.neck_maps(outputs, inputs)
    _, levels = sam3_maps(reference, inputs.pixel_values)
    for item, (output, of_item) in enumerate(zip(outputs, maps, strict=True)):
        for ours, theirs in zip(of_item.values(), levels, strict=True):
            assert distance(ours[0], theirs[item].permute(1, 2, 0)) <= 1e-5
        assert torch.equal(of_item["x1"].flatten(0, 2), output.pooler_output)


def test_the_neck_takes_only_hidden_states() -> None:
    encoder, _ = small()
    inputs = encoder.preprocess([china()])
    (output,) = encoder(inputs)
    with pytest.raises(ValueError, match=r"64 columns: pass last_hidden_state"):
        encoder.neck_maps(output.pooler_output, inputs)


def test_graphs_replay_windows_of_several_views() -> None:
    encoder, _ = small()
    inputs = encoder.preprocess([china(), flower(), china()])
    graphed = GraphedEncoder(encoder, backend="static", budgets=[64, 256], max_batch_size=4)
    plain, replayed = encoder(inputs), graphed(inputs)
    for one, other in zip(plain, replayed, strict=True):
        assert distance(other.pooler_output, one.pooler_output) <= 1e-5


def test_a_view_must_be_of_whole_windows() -> None:
    encoder, _ = small(window_size=4)
    with pytest.raises(ValueError, match=r"height 6 must be a multiple of window_size=4"):
        encoder.prepare_encoder_metadata([[1, 6, 8]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 112, "window_size": 3}, "patches per side=8 must be a multiple"),
        ({"scale_factors": [2.0, 0.5]}, "with 1.0 among them"),
        ({"scale_factors": []}, "with 1.0 among them"),
        ({"scale_factors": [2.0, 1.0, 2.0]}, "each once"),
        ({"scale_factors": [1.0, 3.0]}, "must be some of"),
        ({"layer_scale_init_value": 0.1}, "layer_scale_init_value=0.1 is not implemented"),
        ({"hidden_size": 24, "num_attention_heads": 4}, "head size=6 must be a multiple"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not implemented"),
    ],
    ids=str,
)
def test_a_config_that_is_not_implemented_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sam3Config.from_hf(edited(ROW.config, **changes))


def test_configs_that_transformers_saves_are_read() -> None:
    vision = configuration_sam3.Sam3VisionConfig().to_dict()
    whole = configuration_sam3.Sam3Config().to_dict()
    wanted = Sam3Config.from_hf(ROW.config)
    assert Sam3Config.from_hf(vision) == Sam3Config.from_hf(whole) == wanted
