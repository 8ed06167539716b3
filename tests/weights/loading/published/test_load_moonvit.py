"""Kimi's checkpoints: clips for one of two, another tower under a similar name, and names twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoders import MoonViTConfig, MoonViTEncoder
from encoders.kimi.moonvit_pixels import NavitPreprocessor
from tests.support.hub.checkpoints import edit_config, same_weights
from tests.support.hub.server import HubServer
from tests.support.photographs import panning_clip
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

SINGLE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "repo", "kimi_k25", width=64, shards=1)


def test_kimi_vl_takes_images_alone_and_kimi_k25_clips(tmp_path: Path, folder: Path) -> None:
    encoder = load_encoder(folder)
    assert isinstance(encoder.config, MoonViTConfig)
    assert encoder.config.segment_frames == 4
    assert encoder.preprocess(videos=[panning_clip(5)]).grid_thw[0, 0] == 5
    alone = load_encoder(write_seeded_checkpoint(tmp_path / "vl", "kimi_vl", width=64))
    assert isinstance(alone.config, MoonViTConfig)
    assert alone.config.segment_frames == 1
    with pytest.raises(CheckpointError, match="Kimi-VL takes only images"):
        alone.preprocess(videos=[panning_clip(5)])


@pytest.mark.parametrize(("name", "frames"), [("kimi_vl", 1), ("kimi_k25", 4)])
def test_a_config_without_types_has_the_same_frames(tmp_path: Path, name: str, frames: int) -> None:
    folder = write_seeded_checkpoint(tmp_path, name, width=64)

    def strip(config: dict[str, Any]) -> None:
        for part in (config, config["vision_config"]):
            part.pop("model_type", None)

    edit_config(folder, strip)
    config = load_encoder(folder).config
    assert isinstance(config, MoonViTConfig)
    assert config.segment_frames == frames


def test_a_repo_id_loads_the_tower_alone(hub: HubServer, folder: Path) -> None:
    hub.push("moonshotai/Kimi-K2.5", folder)
    encoder = load_encoder("moonshotai/Kimi-K2.5", progress=False)
    assert same_weights(encoder, load_encoder(folder))
    assert encoder.preprocessor == load_encoder(folder).preprocessor


def test_kimi_k3_has_another_norm_table_and_projector(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "kimi_k3", width=64, shards=1)
    encoder = load_encoder(folder)
    assert isinstance(encoder, MoonViTEncoder)
    config = encoder.config
    assert (config.rms_norm, config.bilinear, config.norm_last, config.bias) == (*[True] * 3, False)
    assert (config.heads_width, config.segment_frames) == (96, 4)
    assert not [name for name in encoder.state_dict() if name.endswith("bias")]
    assert encoder.norm.eps == pytest.approx(2.0**-23)
    assert encoder.preprocessor == NavitPreprocessor.kimi(14, 2, 4, third=True)


def test_the_type_of_kimi_k3_says_what_its_config_leaves_out(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "kimi_k3", width=64, shards=1)
    whole = load_encoder(folder).config
    kept = ("vt_num_attention_heads", "patch_size")
    edit_config(
        folder,
        lambda config: config.update(
            vision_config={name: config["vision_config"][name] for name in kept}
        ),
    )
    assert load_encoder(folder).config == whole


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_type", "batchnorm"),
        ("pos_emb_interpolation_mode", "nearest"),
        ("mm_projector_type", "mlp"),
        ("mlp_type", "swiglu"),
        ("attn_bias", False),
        ("merge_type", "sd2"),
        ("init_pos_emb_width", 32),
        ("hidden_size", 128),
    ],
)
def test_another_kind_of_tower_is_refused(folder: Path, name: str, value: object) -> None:
    edit_config(folder, lambda config: config["vision_config"].update({name: value}))
    with pytest.raises(CheckpointError, match=name):
        load_encoder(folder)


def test_sizes_that_a_config_leaves_out_are_those_of_the_tensors(folder: Path) -> None:
    whole = load_encoder(folder).config
    kept = ("vt_num_attention_heads", "patch_size")

    def thin(config: dict[str, dict[str, object]]) -> None:
        section = config["vision_config"]
        config["vision_config"] = {name: section[name] for name in kept}

    edit_config(folder, thin)
    assert load_encoder(folder).config == whole


def test_a_table_that_is_no_square_is_refused(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    name = "vision_tower.patch_embed.pos_emb.weight"
    tensors[name] = tensors[name][:, :32].contiguous()
    save_file(tensors, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"pos_emb\.weight is \[64, 32, 64\].*\[64, 64, 64\]"):
        load_encoder(folder)


def test_a_tower_without_its_projector_says_what_is_missing(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    kept = {name: value for name, value in tensors.items() if "projector" not in name}
    save_file(kept, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"missing.*mm_projector"):
        load_encoder(folder)


def test_a_language_model_in_four_bits_is_no_obstacle(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    packed = torch.zeros(4, 4, dtype=torch.int32)
    tensors["language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed"] = packed
    save_file(tensors, folder / SINGLE)
    method = {"quant_method": "compressed-tensors"}
    edit_config(folder, lambda config: config["text_config"].update(quantization_config=method))
    assert load_encoder(folder).dtype == torch.bfloat16
