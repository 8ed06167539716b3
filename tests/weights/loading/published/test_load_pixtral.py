"""Mistral repos hold two sets of weights, and are published in fp8 with a tower in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.hub.checkpoints import edit_config
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

SINGLE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "repo", "ministral3", width=64, shards=1)


def test_the_weights_with_transformers_names_are_taken(folder: Path) -> None:
    native = {"vision_encoder.transformer.layers.0.attention.wq.weight": torch.ones(64, 64)}
    save_file(native, folder / "consolidated.safetensors")
    encoder = load_encoder(folder)
    stored = load_file(folder / SINGLE)["vision_tower.patch_conv.weight"]
    assert torch.equal(encoder.state_dict()["patch_embed.proj.weight"], stored)


def test_mistrals_own_names_are_refused_by_name(folder: Path) -> None:
    names = {"vision_tower": "vision_encoder", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv"}
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    for before, after in names.items():
        tensors = {name.replace(before, after): value for name, value in tensors.items()}
    save_file(tensors, folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"holds Mistral's own names.*model\.safetensors"):
        load_encoder(folder)


def test_a_language_model_in_fp8_is_no_obstacle(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    layer = "language_model.model.layers.0.self_attn.q_proj"
    tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{layer}.weight_scale_inv"] = torch.ones(())
    save_file(tensors, folder / SINGLE)
    edit_config(folder, lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    assert load_encoder(folder).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "part",
    [
        "vision_tower.transformer.layers.0.feed_forward.up_proj.weight",
        "multi_modal_projector.linear_1.weight",
    ],
)
def test_a_tower_or_projector_in_fp8_is_refused(folder: Path, part: str) -> None:
    tensors = load_file(folder / SINGLE)
    tensors[part] = tensors[part].to(torch.float8_e4m3fn)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"the tower is quantised.*(?s:.)*F8_E4M3"):
        load_encoder(folder)


def test_a_pixtral_without_projector_says_what_is_missing(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    kept = {name: value for name, value in tensors.items() if "projector" not in name}
    save_file(kept, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"missing.*multi_modal_projector"):
        load_encoder(folder)
