"""Checkpoints of SAM 3: whole models as transformers saves them, decoys, strict errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Sam3Config, Sam3Model
from transformers.models.sam3.image_processing_sam3 import Sam3ImageProcessor

from encoders import Sam3Encoder
from tests.oracles import distance
from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from tests.support.photographs import china
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

PREFIX = "detector_model.vision_encoder."
TRACKER = "tracker_neck.fpn_layers.2.proj1.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "sam3", "sam3", width=64)


def whole_model() -> Any:
    """A small SAM 3 of transformers, with views of 112x112 pixels in windows of 2x2 patches."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    views = {"image_size": 112, "window_size": 2, "pretrain_image_size": 56}
    vit = {"model_type": "sam3_vit_model", "num_attention_heads": 2, "global_attn_indexes": [1]}
    vit |= sizes | views
    narrow = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = {**narrow, "num_hidden_layers": 1, "vocab_size": 60, "projection_dim": 32}
    one = {**narrow, "num_layers": 1}
    config = Sam3Config(
        vision_config={"backbone_config": vit, "fpn_hidden_size": 32},
        text_config={**text, "model_type": "clip_text_model"},
        geometry_encoder_config=one,
        detr_encoder_config=one,
        detr_decoder_config={**one, "num_queries": 2},
        mask_decoder_config={"hidden_size": 32, "num_attention_heads": 2},
    )
    return Sam3Model(config).eval()


def test_a_model_that_transformers_saved_has_its_features(tmp_path: Path) -> None:
    model = whole_model()
    model.save_pretrained(tmp_path)
    Sam3ImageProcessor(size={"height": 112, "width": 112}).save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, progress=False)
    assert isinstance(encoder, Sam3Encoder)
    inputs = encoder.preprocess([china()])
    with torch.no_grad():
        theirs = model.get_vision_features(pixel_values=inputs.pixel_values)
        (maps,) = encoder.neck_maps(encoder(inputs), inputs)
    for ours, level in zip(maps.values(), theirs.fpn_hidden_states, strict=True):
        assert distance(ours, level.permute(0, 2, 3, 1)) <= 1e-5


def test_the_neck_of_the_tracker_is_not_read(folder: Path) -> None:
    whole = load_encoder(folder)
    edit_tensors(folder, lambda t: t.update({TRACKER: torch.full((32, 64, 1, 1), float("nan"))}))
    assert same_weights(load_encoder(folder), whole)


@pytest.mark.parametrize("extra", ["neck.fpn_layers.4.proj1.bias", "backbone.rope.freqs"])
def test_a_stranger_under_the_prefix_is_an_error(folder: Path, extra: str) -> None:
    edit_tensors(folder, lambda t: t.update({PREFIX + extra: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=rf"unexpected \(1\): .*{extra}"):
        load_encoder(folder)


def test_sizes_that_the_config_leaves_out_are_those_of_tensors(folder: Path) -> None:
    whole = load_encoder(folder)

    def forget(config: Any) -> None:
        vision = config["detector_config"]["vision_config"]
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size"):
            del vision["backbone_config"][name]
        del vision["fpn_hidden_size"]

    edit_config(folder, forget)
    assert same_weights(load_encoder(folder), whole)


def test_the_tracker_s_tower_is_refused(folder: Path) -> None:
    vision = json.loads((folder / "config.json").read_text())["detector_config"]["vision_config"]
    edit_config(folder, lambda c: (c.clear(), c.update(model_type="sam3_tracker")))
    edit_config(folder, lambda c: c.update(vision_config=vision))
    with pytest.raises(CheckpointError, match="its neck lies outside of the tower"):
        load_encoder(folder)
