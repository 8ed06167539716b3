"""DeepSeek-VL converted to transformers: what its models save loads and gives their features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLHybridConfig,
    DeepseekVLHybridForConditionalGeneration,
    DeepseekVLHybridImageProcessor,
    DeepseekVLImageProcessor,
    SiglipVisionModel,
)

from tests.oracles import NO_LIFT, LiftFloat32, distance, draw_weights
from tests.support.hub.checkpoints import edit_tensors, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from tests.support.photographs import china
from vitgraph.seeded import write_seeded_checkpoint
from weights import FAMILIES, CheckpointError, extract_encoder, inspect_checkpoint, load_encoder
from weights.published import PUBLISHED

KINDS = ["deepseek_vl", "deepseek_vl_hybrid"]
LOW = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 112,
    "image_size": 96,
    "hidden_act": "gelu",
    "vision_use_head": False,
}
HIGH = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "mlp_dim": 84,
    "output_channels": 24,
    "image_size": 128,
    "window_size": 5,
    "global_attn_indexes": [1],
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "vocab_size": 8,
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 96, "width": 96}}
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
MODEL = "model.vision_model."
PUBLISHED_MODEL = "model.vision_model.vision_model."
"""The prefix in the published conversions, which transformers 4 wrote."""


def make_model(kind: str) -> Any:
    """Return transformers' tiny model, with weights at transformers' scale."""
    if kind == "deepseek_vl":
        config = DeepseekVLConfig(vision_config=LOW, text_config=TEXT)
        return DeepseekVLForConditionalGeneration(config)
    return DeepseekVLHybridForConditionalGeneration(
        DeepseekVLHybridConfig(vision_config=LOW, high_res_vision_config=HIGH, text_config=TEXT)
    )


def save(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Save transformers' tiny model with random weights and its processor; returns the model."""
    lift = LiftFloat32() if dtype == torch.float64 else NO_LIFT
    with lift:
        model = make_model(kind)
    draw_weights(model.to(dtype)).eval().requires_grad_(False)
    model.save_pretrained(folder)
    if kind == "deepseek_vl":
        DeepseekVLImageProcessor(**HALF).save_pretrained(folder)
    else:
        sizes: Any = {"high_res_size": {"height": 128, "width": 128}, "resample": 2, **HALF}
        DeepseekVLHybridImageProcessor(**sizes).save_pretrained(folder)
    return model


def as_published(tensors: dict[str, Tensor]) -> None:
    """Give the tensors of SigLIP the prefix that they have on the Hub."""
    for name in [name for name in tensors if name.startswith(MODEL)]:
        tensors[name.replace(MODEL, PUBLISHED_MODEL, 1)] = tensors.pop(name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("transformers")
    for kind in KINDS:
        save(root / kind, kind)
        edit_tensors(root / kind, as_published)
    return {kind: root / kind for kind in KINDS}


def copied(folder: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_transformers_saved_gives_its_features(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    model = save(tmp_path, kind, dtype)
    encoder: Any = load_encoder(tmp_path)
    assert next(encoder.parameters()).dtype == dtype
    inputs = encoder.preprocess([china(), china().rotate(90)]).to(dtype=dtype)
    pixels = [inputs.pixel_values, *(path.pixel_values for path in inputs.other_paths.values())]
    with LiftFloat32() if dtype == torch.float64 else NO_LIFT:
        theirs = model.model.get_image_features(*pixels).pooler_output
    if kind == "deepseek_vl":
        tokens = encoder(inputs.pixel_values, inputs.grid_thw).pooler_output
    else:
        tokens = torch.cat([item.pooler_output for item in encoder(inputs)])
    assert distance(tokens, theirs.flatten(0, 1)) <= BOUNDS[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_the_saved_processor(saved: dict[str, Path], kind: str) -> None:
    image = china().resize((500, 333))
    theirs = AutoImageProcessor.from_pretrained(saved[kind])([image], return_tensors="pt")
    inputs = load_encoder(saved[kind]).preprocess([image])
    exact: dict[str, float] = {"rtol": 0, "atol": 1e-5}  # normalised in another order
    torch.testing.assert_close(inputs.pixel_values, theirs["pixel_values"], **exact)
    for path in inputs.other_paths.values():
        wanted = theirs["high_res_pixel_values"]
        torch.testing.assert_close(path.pixel_values, wanted, **exact)


@pytest.mark.parametrize("kind", KINDS)
def test_both_prefixes_of_transformers_give_one_tower(
    saved: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """transformers 4 wrote the prefix of SigLIP twice, as the published repos have it."""
    save(tmp_path, kind)
    found = [inspect_checkpoint(folder) for folder in (saved[kind], tmp_path)]
    assert [info.prefix for info in found] == [PUBLISHED_MODEL, MODEL]
    assert same_weights(load_encoder(saved[kind]), load_encoder(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_repo_comes_by_byte_ranges(
    hub: HubServer, saved: dict[str, Path], cache: Path, kind: str
) -> None:
    hub.push(REPO, saved[kind])
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(saved[kind]))
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())


@pytest.mark.parametrize("kind", KINDS)
def test_the_original_and_the_converted_layout_give_one_tower(tmp_path: Path, kind: str) -> None:
    original, converted = (
        load_encoder(write_seeded_checkpoint(tmp_path / name, name, width=64))
        for name in (kind, f"{kind}_hf")
    )
    assert original.config == converted.config
    followed = replace(original.preprocessor, as_transformers=True)
    assert followed == converted.preprocessor
    assert same_weights(original, converted)


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("kind", KINDS)
def test_siglip_of_transformers_reads_an_extracted_tower(
    saved: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    out = extract_encoder(saved[kind], tmp_path / "tower")
    model, info = SiglipVisionModel.from_pretrained(out, output_loading_info=True)
    assert info["missing_keys"] == info["mismatched_keys"] == set()
    encoder: Any = load_encoder(out)
    tower = encoder if kind == "deepseek_vl" else encoder.paths["image"]
    pixels = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(pixels).last_hidden_state
    assert distance(tower(pixels, [[2, 6, 6]]).last_hidden_state, theirs) <= 1e-5


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("deepseek_vl", f"{PUBLISHED_MODEL}post_layernorm.bias"),
        ("deepseek_vl", f"{PUBLISHED_MODEL}encoder.layers.1.self_attn.k_proj.weight"),
        ("deepseek_vl", "model.aligner.linear2.bias"),
        ("deepseek_vl_hybrid", "model.high_res_vision_alpha"),
        ("deepseek_vl_hybrid", "model.high_res_vision_neck.layer_norm2.bias"),
        ("deepseek_vl_hybrid", "model.high_res_vision_model.vision_encoder.pos_embed"),
        ("deepseek_vl_hybrid", "model.high_res_vision_proj.conv2.weight"),
    ],
)
def test_a_missing_tensor_is_refused_by_its_published_name(
    saved: dict[str, Path], tmp_path: Path, kind: str, name: str
) -> None:
    folder = copied(saved[kind], tmp_path / "copy")
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"missing \(1\): {name}"):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("deepseek_vl", f"{PUBLISHED_MODEL}embeddings.class_embedding"),
        ("deepseek_vl", "model.aligner.linear3.weight"),
        ("deepseek_vl_hybrid", "model.high_res_vision_beta"),
        ("deepseek_vl_hybrid", "model.high_res_vision_model.vision_encoder.layers.0.attn.k.bias"),
        ("deepseek_vl_hybrid", "model.aligner.linear1.weight"),
    ],
)
def test_an_unexpected_tensor_is_refused(
    saved: dict[str, Path], tmp_path: Path, kind: str, name: str
) -> None:
    folder = copied(saved[kind], tmp_path / "copy")
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    with pytest.raises(CheckpointError, match=rf"unexpected \(1\): {name}"):
        load_encoder(folder)


def test_the_pooling_head_that_features_do_not_need_is_left_out(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    folder = copied(saved["deepseek_vl"], tmp_path / "copy")
    head = {f"{PUBLISHED_MODEL}head.probe": torch.ones(1, 1, 64)}
    edit_tensors(folder, lambda tensors: tensors.update(head))
    assert same_weights(load_encoder(folder), load_encoder(saved["deepseek_vl"]))


# --- configs -------------------------------------------------------------------------------------


def configs(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the published config of a family's original repos and of their conversion."""
    original, converted = (
        next(dict(m.config) for m in PUBLISHED if m.family == kind and m.repo_id.startswith(owner))
        for owner in ("deepseek-ai/", "deepseek-community/")
    )
    return original, converted


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_configs_say_the_same(kind: str) -> None:
    read = FAMILIES[kind].config.from_hf
    original, converted = configs(kind)
    assert read(original) == read(converted)
    whole = {"deepseek_vl": DeepseekVLConfig, "deepseek_vl_hybrid": DeepseekVLHybridConfig}[kind]
    assert read(whole(**converted).to_dict()) == read(original)


def test_sizes_that_transformers_leaves_out_are_its_defaults() -> None:
    """transformers 4 wrote only what differs from them: SAM-B, and the width of Llama 7B."""
    original, converted = configs("deepseek_vl_hybrid")
    short = {
        **converted,
        "high_res_vision_config": {"model_type": "sam_vision_model", "intermediate_size": 3072},
        "text_config": {"model_type": "llama"},
    }
    read = FAMILIES["deepseek_vl_hybrid"].config.from_hf
    assert read(short) == read(original)
    bare = read({"vision_config": {"hidden_act": "gelu"}, "text_config": {}}).low
    theirs = DeepseekVLConfig().vision_config
    assert (bare.depth, bare.hidden_size, bare.intermediate_size, bare.image_size) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.image_size,
    )
    assert (bare.num_heads, bare.patch_size) == (theirs.num_attention_heads, theirs.patch_size)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("vision_config", {"hidden_act": "gelu_pytorch_tanh"}),
        ("vision_config", {"layer_norm_eps": 1e-5}),
        ("high_res_vision_config", {"hidden_act": "relu"}),
        ("high_res_vision_config", {"layer_norm_eps": 1e-5}),
    ],
    ids=str,
)
def test_a_converted_tower_that_runs_otherwise_is_refused(
    section: str, fields: dict[str, Any]
) -> None:
    _, config = configs("deepseek_vl_hybrid")
    config[section] = {**config[section], **fields}
    (field,) = fields
    with pytest.raises(ValueError, match=f"config field {field}=.* is not implemented: must be"):
        FAMILIES["deepseek_vl_hybrid"].config.from_hf(config)


def test_the_activation_that_transformers_leaves_out_is_refused() -> None:
    """The default of its SigLIP is the tanh form of GELU, which no DeepSeek-VL has."""
    with pytest.raises(ValueError, match="hidden_act='gelu_pytorch_tanh' is not implemented"):
        FAMILIES["deepseek_vl"].config.from_hf({"vision_config": {}, "text_config": {}})


def test_an_odd_width_of_the_language_model_is_refused() -> None:
    _, config = configs("deepseek_vl_hybrid")
    config["text_config"] = {"hidden_size": 95}
    with pytest.raises(ValueError, match="width 95 of the language model must be even: each tower"):
        FAMILIES["deepseek_vl_hybrid"].config.from_hf(config)
