"""Checkpoints of the Step towers: what their configs and tensors say, and who reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

from encoders import Step3Config, Step3Encoder, Step3VLConfig, Step3VLEncoder
from tests.oracles import distance
from tests.oracles.versions import STEP_ROTATION, needs
from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, load_encoder

KINDS = ["step3_vl", "step3_vl_hf", "step3"]


def seeded(folder: Path, kind: str) -> Path:
    return write_seeded_checkpoint(folder, kind, width=64, decoy_shards=1)


@pytest.mark.parametrize("fetch", ["ranges", "shards"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_repo_id_gives_the_encoder_of_the_folder(
    hub: HubServer, tmp_path: Path, cache: Path, kind: str, fetch: str
) -> None:
    folder = seeded(tmp_path / "repo", kind)
    hub.push(REPO, folder)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch=fetch)
    assert type(encoder) is (Step3Encoder if kind == "step3" else Step3VLEncoder)
    assert same_weights(encoder, load_encoder(folder))
    sent = hub.files_sent()
    assert "model-00003-of-00003.safetensors" not in sent  # it has nothing of the tower


def test_both_layouts_give_one_tower(tmp_path: Path) -> None:
    """The rows of queries and keys differ in order between the files, and in nothing else."""
    published = load_encoder(seeded(tmp_path / "published", "step3_vl"))
    converted = load_encoder(seeded(tmp_path / "converted", "step3_vl_hf"))
    assert same_weights(published, converted)


@needs(*STEP_ROTATION)
@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("kind", ["step3_vl", "step3_vl_hf"])
def test_transformers_reads_an_extracted_tower_and_agrees(tmp_path: Path, kind: str) -> None:
    folder = extract_encoder(seeded(tmp_path / "whole", kind), tmp_path / "tower")
    encoder = load_encoder(folder, dtype=torch.float32)
    model, info = Step3p7VisionModel.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    pixels = torch.randn(2, 3, 84, 84, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(pixels).last_hidden_state.flatten(0, 1)
        ours = encoder.paths["tiles"](pixels, [[2, 6, 6]]).pooler_output
        assert distance(ours, encoder.vit_large_projector(theirs)) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_number_of_heads_is_not_hidden_by_the_permutation(
    tmp_path: Path, kind: str
) -> None:
    folder = seeded(tmp_path, kind)
    heads = "num_attention_heads" if kind == "step3" else "heads"
    edit_config(folder, lambda config: config["vision_config"].update({heads: 3}))
    with pytest.raises(CheckpointError, match="hidden_size=64 must be a multiple of num_heads=3"):
        load_encoder(folder)


# --- configs -------------------------------------------------------------------------------------


def test_the_names_of_transformers_say_the_same_as_stepfuns() -> None:
    published = {"width": 64, "layers": 2, "heads": 4, "mlp_ratio": 1.5, "ls_init_value": 0.1}
    converted = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "mlp_ratio": 1.5,
        "intermediate_size": 3072,  # which transformers ignores, too
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    }
    found = [
        Step3VLConfig.from_hf({"vision_config": vision, "text_config": {"hidden_size": 48}})
        for vision in (published, converted)
    ]
    assert found[0] == found[1]
    assert (found[0].intermediate_size, found[0].out_hidden_size) == (96, 48)


def test_a_ratio_that_was_cut_off_still_gives_the_published_width() -> None:
    config = Step3VLConfig.from_hf({"vision_config": {"width": 1536, "mlp_ratio": 5.8333}})
    assert config.intermediate_size == 8960


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("vision", {"use_cls_token": True}),
        ("vision", {"ues_cls_token": True}),
        ("vision", {"use_abs_posemb": False}),
        ("vision", {"use_ln_pre": False}),
        ("vision", {"use_ln_post": True}),
        ("vision", {"use_rope2d": False}),
        ("vision", {"hidden_act": "gelu"}),
        ("vision", {"output_dim": 1024}),
        ("vision", {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}),
        ("whole", {"understand_projector_stride": 1}),
    ],
    ids=str,
)
def test_an_architecture_that_is_not_implemented_is_refused(part: str, value: Any) -> None:
    config = {"vision_config": value} if part == "vision" else {"vision_config": {}, **value}
    with pytest.raises(ValueError, match="is not implemented: must be"):
        Step3VLConfig.from_hf(config)


def test_the_stride_that_makes_other_tokens_is_refused_for_step3() -> None:
    with pytest.raises(ValueError, match="understand_projector_stride=1 is not implemented"):
        Step3Config.from_hf({"understand_projector_stride": 1})


def test_step3_reads_widths_and_bias_from_its_tensors(tmp_path: Path) -> None:
    """A published config may repeat class defaults that its checkpoint does not have."""
    folder = seeded(tmp_path, "step3")
    expected = load_encoder(folder)

    def repeat_defaults(config: dict[str, Any]) -> None:
        config["vision_config"].update(intermediate_size=3072, output_hidden_size=4096)
        config["projector_bias"] = True

    edit_config(folder, repeat_defaults)
    encoder = load_encoder(folder)
    assert encoder.config == expected.config
    assert same_weights(encoder, expected)
    bias = torch.ones(96, dtype=torch.bfloat16)
    edit_tensors(folder, lambda tensors: tensors.update({"vit_large_projector.bias": bias}))
    assert load_encoder(folder).config.projector_bias


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_a_config_leaves_out_are_read_from_the_tensors(
    tmp_path: Path, kind: str
) -> None:
    folder = seeded(tmp_path, kind)
    expected = load_encoder(folder)
    heads = "num_attention_heads" if kind == "step3" else "heads"

    def leave_out(config: dict[str, Any]) -> None:
        vision = config["vision_config"]
        config["vision_config"] = {key: vision[key] for key in ("model_type", heads)}
        del config["text_config"]

    edit_config(folder, leave_out)
    assert load_encoder(folder).config == expected.config


def test_a_tower_of_unknown_type_is_recognised_by_its_tensors(tmp_path: Path) -> None:
    folder = seeded(tmp_path, "step3_vl")

    def rename(config: dict[str, Any]) -> None:
        config["model_type"] = config["vision_config"]["model_type"] = "step9"

    edit_config(folder, rename)
    with pytest.raises(CheckpointError, match=r"fit the Step3-VL tower: pass family='step3_vl'"):
        load_encoder(folder)
    assert type(load_encoder(folder, family="step3_vl")) is Step3VLEncoder


def test_a_missing_projector_is_an_error(tmp_path: Path) -> None:
    folder = seeded(tmp_path, "step3_vl")
    edit_tensors(folder, lambda tensors: tensors.pop("vit_large_projector.weight"))
    with pytest.raises(CheckpointError, match=r"missing \(1\): vit_large_projector.weight"):
        load_encoder(folder)


def test_an_upstream_reference_is_missing_for_step3_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from vitgraph.cli import main

    assert main(["list", "stepfun-ai/*"]) == 0
    assert "\nStep3: not verified against an upstream implementation.\n" in capsys.readouterr().out
    assert main(["list", "qwen/*"]) == 0
    assert "not verified" not in capsys.readouterr().out
