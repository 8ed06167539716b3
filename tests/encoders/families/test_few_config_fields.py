"""Checkpoints of newer families load by few fields of their config, and refuse strange tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

STRANGERS = {
    "idefics3": "model.connector.perceiver.latents",
    "smolvlm": "model.connector.perceiver.latents",
    "modernvbert": "model.connector.perceiver.latents",
    "llama4": "vision_model.global_transformer.layers.0.gate",
    "minimax_m3": "vision_tower.vision_model.post_layernorm.weight",
    "lfm2_vl": "model.multi_modal_projector.linear_3.weight",
    "lfm2_5_vl": "model.multi_modal_projector.linear_3.weight",
}
"""A tensor that would lie in tower or projector, by the kind of checkpoint."""


def leave_few_fields(config: dict[str, Any]) -> None:
    """Keep what no tensor says: the types of model and tower, and the number of heads."""
    kept = ("model_type", "num_attention_heads")
    section = {name: config["vision_config"][name] for name in kept}
    outer = config["model_type"]
    config.clear()
    config.update(model_type=outer, vision_config=section)


@pytest.mark.parametrize("kind", STRANGERS)
def test_few_fields_are_enough_and_other_tensors_are_refused(tmp_path: Path, kind: str) -> None:
    folder = write_seeded_checkpoint(tmp_path / kind, kind, width=64)
    whole = load_encoder(folder)
    edit_config(folder, leave_few_fields)
    assert load_encoder(folder).config == whole.config
    assert same_weights(load_encoder(folder), whole)
    edit_tensors(folder, lambda tensors: tensors.update({STRANGERS[kind]: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=rf"unexpected \(1\): {STRANGERS[kind]}"):
        load_encoder(folder)
