"""Features in vLLM's form, against a table of shapes written from its source (0.33.0)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphwrap import GraphedEncoder
from tests.oracles import tiny
from tests.support.photographs import china, flower, panning_clip
from vitgraph.integrations.vllm import multi_modal_data

IMAGES = [china().resize((96, 64)), flower().resize((60, 130))]
CLIPS = [panning_clip(4, 64, 96), panning_clip(2, 64, 64)]
LIMITS = {"min_pixels": 4096, "max_pixels": 16384}
WIDTH = 48
"""Of the language models of the tiny towers."""
CHANNELS = {"qwen2_vl": WIDTH, "qwen2_5_vl": WIDTH, "qwen3_vl": 3 * WIDTH, "qwen3_5": WIDTH}
"""``embeds`` are [tokens, channels]: qwen3_vl.py joins the merger's and two DeepStack layers."""
TIMES = {"qwen3_vl": [[0.25, 1.25], [0.5]], "qwen3_5": [[0.25, 1.25], [0.5]]}


def tokens(grid: torch.Tensor) -> int:
    return int(grid.prod(-1).sum()) // 4


@pytest.mark.parametrize("name", CHANNELS)
def test_qwen_features_have_vllms_names_and_shapes(name: str) -> None:
    data = multi_modal_data(tiny(name), IMAGES, CLIPS, timestamps=TIMES.get(name), **LIMITS)
    assert list(data) == ["image", "video"]
    for kind, count in (("image", 2), ("video", 2)):
        fields = dict(data[kind])
        if kind == "video" and name in TIMES:
            assert fields.pop("timestamps") == TIMES[name]
        assert list(fields) == [f"{kind}_embeds", f"{kind}_grid_thw"]
        grid = fields[f"{kind}_grid_thw"]
        assert tuple(grid.shape) == (count, 3)
        assert tuple(fields[f"{kind}_embeds"].shape) == (tokens(grid), CHANNELS[name])
        assert fields[f"{kind}_embeds"].device.type == "cpu"


def test_deepstack_layers_lie_after_the_merged_tokens() -> None:
    encoder = tiny("qwen3_vl")
    embeds = multi_modal_data(encoder, IMAGES, **LIMITS)["image"]["image_embeds"]
    inputs = encoder.preprocess(images=IMAGES, **LIMITS)
    output = encoder(inputs.pixel_values, inputs.grid_thw)
    parts = (output.pooler_output, *output.deepstack_features)
    for ours, wanted in zip(embeds.split(WIDTH, dim=1), parts, strict=True):
        assert torch.equal(ours, wanted)


def test_internvl_features_are_one_tensor_per_image() -> None:
    encoder = tiny("intern_vit_300m")
    data = multi_modal_data(encoder, IMAGES, max_tiles=4)
    specs = encoder.item_specs(encoder.preprocess(images=IMAGES, max_tiles=4).grid_thw)
    assert [tuple(part.shape) for part in data["image"]] == [
        (spec.output_tokens, WIDTH) for spec in specs
    ]
    with pytest.raises(ValueError, match="frames as images"):
        multi_modal_data(encoder, videos=CLIPS)


@pytest.mark.slow
def test_a_graphed_encoder_gives_the_same_features() -> None:
    encoder = tiny("qwen3_vl")
    graphed = GraphedEncoder(encoder, [64], backend="static")
    ours, wanted = (multi_modal_data(run, IMAGES, **LIMITS)["image"] for run in (graphed, encoder))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    short = GraphedEncoder(encoder, [64], backend="static", outputs=["pooler_output"])
    with pytest.raises(ValueError, match="leaves out what language models read"):
        multi_modal_data(short, IMAGES, **LIMITS)


@pytest.mark.parametrize("times", [None, [[0.5]], [[0.25, 1.25, 2.25], [0.5]]])
def test_timestamps_are_one_per_frame_pair(times: Any) -> None:
    with pytest.raises(ValueError, match=r"these videos have \[2, 1\]"):
        multi_modal_data(tiny("qwen3_vl"), videos=CLIPS, timestamps=times, **LIMITS)
