"""ERNIE-4.5-VL's pairs of frames, and the whole model of transformers beside its tower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeModel

from encoders import EncoderItemSpec, Ernie4_5VLConfig
from encoders.baidu.frame_pairs import frame_pairs
from tests.oracles import distance, draw_pixels, tiny
from tests.support.graphs.cases import static
from tests.support.graphs.outputs import worst_distance
from tests.support.hub.checkpoints import edit_config
from tests.support.photographs import panning_clip
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

ROPE = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 2, 4]}
VISION = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96}
TEXT = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 8}


def test_pairs_are_those_of_the_worked_example() -> None:
    pairs = [[0, 2], [1, 3], [4, 4], [5, 5], [6, 6]]
    assert frame_pairs([(3, 2, 4), (1, 2, 2)], 2, 5).tolist() == pairs
    assert frame_pairs([(3, 2, 4), (1, 2, 2)], 2, 7).tolist() == [*pairs, [5, 5], [6, 6]]


def test_odd_clips_replay_beside_images() -> None:
    encoder, grids = tiny("ernie4_5_vl"), [[1, 4, 6], [5, 2, 4], [2, 4, 4], [1, 2, 2]]
    assert encoder.item_specs(grids)[1] == EncoderItemSpec(40, 6, 5, 8)
    graphed = static(encoder, [256], outputs=("last_hidden_state", "pooler_output"))
    pixels = draw_pixels(encoder, grids)
    output = encoder(pixels, grids)
    assert worst_distance(graphed(pixels, grids), output) <= 2e-6
    assert graphed.stats().eager_items == 0
    patches, tokens = (encoder.feature_maps(part, grids) for part in output[:2])
    assert patches[1].shape[:3] == (5, 2, 4)
    assert tokens[1].shape[:3] == (3, 1, 2)


def test_a_long_clip_is_cut_between_pairs_by_the_limit_on_tokens() -> None:
    encoder, frames = tiny("ernie4_5_vl"), {"min_pixels": 784, "max_pixels": 56 * 56}
    [whole] = encoder.encode(videos=[panning_clip(7)], **frames)
    for limit in (1, len(whole.pooler_output) // 2 + 1):
        [parts] = encoder.encode(videos=[panning_clip(7)], max_tokens_per_call=limit, **frames)
        assert distance(parts.pooler_output, whole.pooler_output) <= 2e-6


@pytest.mark.filterwarnings("default")  # of transformers, and no processor file
@pytest.mark.slow
def test_a_model_that_transformers_saved_gives_its_own_features(tmp_path: Path) -> None:
    model = Ernie4_5_VLMoeModel(
        Ernie4_5_VLMoeConfig(vision_config=VISION, text_config={**TEXT, "rope_parameters": ROPE})
    ).eval()
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="no preprocessor_config.json"):
        encoder = load_encoder(tmp_path)
    for t, features in ((1, model.get_image_features), (4, model.get_video_features)):
        pixels, grids = draw_pixels(encoder, [[t, 4, 6], [t, 2, 8]]), [[t, 4, 6], [t, 2, 8]]
        with torch.no_grad():
            items = encoder.split(encoder(pixels, grids), grids)
            theirs = features(pixels, torch.tensor(grids)).pooler_output
        for one, wanted in zip(items, theirs, strict=True):
            assert distance(one.pooler_output, wanted) <= 1e-5


def test_other_towers_are_refused_and_sizes_left_out_are_those_of_tensors(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "repo", "ernie4_5_vl", width=64)
    whole = load_encoder(folder).config
    wrong = {"use_temporal_conv": False, "temporal_conv_size": 4, "pixel_hidden_size": 128}
    for name, value in (wrong | {"spatial_conv_size": 4}).items():
        edit_config(folder, lambda config, new={name: value}: config.update(new))
        with pytest.raises(CheckpointError, match=name):
            load_encoder(folder)
        edit_config(folder, lambda config, old=name: config.pop(old))
    edit_config(folder, lambda config: config.update(vision_config={"num_heads": 2}))
    edit_config(folder, lambda config: config.pop("hidden_size"))
    assert load_encoder(folder).config == whole
    with pytest.raises(ValueError, match="no hidden_size and there is no published default"):
        Ernie4_5VLConfig.from_hf(VISION)
