"""LoRA adapters beside weights are merged by peft's rule, others are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.commands.command_line import Cli
from tests.support.hub.checkpoints import Written, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder

QKV = "model.visual.blocks.0.attn.qkv"
HEAD = "base_model.model."


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Write an adapter of rank 4 beside the weights in ``folder``."""
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["qkv"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def factors(module: str, rows: int, columns: int, rank: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        f"{HEAD}{module}.lora_A.weight": torch.randn(rank, columns, generator=generator),
        f"{HEAD}{module}.lora_B.weight": torch.randn(rows, rank, generator=generator),
    }


def product(tensors: Mapping[str, Tensor]) -> Tensor:
    a, b = tensors.values()
    return b.flatten(1) @ a.flatten(1)


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, Tensor]:
    """The weights of the checkpoint that ``qwen3`` writes, without an adapter."""
    folder = write_seeded_checkpoint(tmp_path / "plain", "qwen3_vl", width=64)
    return dict(load_encoder(folder, dtype="float32").state_dict())


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"lora_alpha": 3}, 0.75),
        ({"use_rslora": True}, 4.0),
        ({"r": 9, "rank_pattern": {"blocks.0.attn.qkv": 4}}, 2.0),
        ({"alpha_pattern": {r"blocks\.\d+\.attn\.qkv": 6, "qkv": 1}}, 1.5),
        ({"alpha_pattern": {"blocks.1.attn.qkv": 6}}, 2.0),
        ({"fan_in_fan_out": True}, 2.0),
    ],
)
def test_an_adapter_is_merged_with_its_scale(
    qwen3: Path, plain: dict[str, Tensor], config: dict[str, Any], scale: float
) -> None:
    tensors = factors(QKV, 192, 64)
    merged = load_encoder(write_adapter(qwen3, tensors, **config), dtype="float32").state_dict()
    name = "blocks.0.attn.qkv.weight"
    torch.testing.assert_close(
        merged[name], plain[name] + product(tensors) * scale, rtol=0, atol=1e-5
    )
    others = [other for other in plain if other != name]
    assert others
    for other in others:
        assert torch.equal(merged[other], plain[other])


def test_a_merged_weight_is_rounded_once(qwen3: Path, plain: dict[str, Tensor]) -> None:
    tensors = factors(QKV, 192, 64)
    merged = load_encoder(write_adapter(qwen3, tensors)).state_dict()["blocks.0.attn.qkv.weight"]
    assert merged.dtype == torch.bfloat16
    exact = plain["blocks.0.attn.qkv.weight"] + product(tensors) * 2
    assert torch.equal(merged, exact.bfloat16())


def test_an_adapter_of_separate_queries_changes_joined_rows(tmp_path: Path) -> None:
    for name in ("plain", "adapted"):
        write_seeded_checkpoint(tmp_path / name, "siglip", width=64)
    module = "vision_model.encoder.layers.1.self_attn.k_proj"
    tensors = factors(module, 64, 64)
    base = load_encoder(tmp_path / "plain", dtype="float32").state_dict()
    merged = load_encoder(write_adapter(tmp_path / "adapted", tensors), dtype="float32")
    change = merged.state_dict()["blocks.1.attn.qkv.weight"] - base["blocks.1.attn.qkv.weight"]
    torch.testing.assert_close(change[64:128], product(tensors) * 2, rtol=0, atol=1e-5)
    assert not change[:64].any()
    assert not change[128:].any()


def test_an_adapter_named_in_another_layout_is_merged(
    qwen3: Path, plain: dict[str, Tensor]
) -> None:
    tensors = factors("visual.blocks.0.attn.qkv", 192, 64)
    merged = load_encoder(write_adapter(qwen3, tensors), dtype="float32").state_dict()
    change = merged["blocks.0.attn.qkv.weight"] - plain["blocks.0.attn.qkv.weight"]
    torch.testing.assert_close(change, product(tensors) * 2, rtol=0, atol=1e-5)


def test_a_saved_module_replaces_the_published_one(qwen3: Path) -> None:
    bias = torch.randn(192)
    write_adapter(qwen3, {f"{HEAD}{QKV}.bias": bias}, modules_to_save=["qkv"])
    assert torch.equal(load_encoder(qwen3).state_dict()["blocks.0.attn.qkv.bias"], bias.bfloat16())


def test_an_adapter_of_the_language_model_changes_nothing(
    qwen3: Path, plain: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    tensors = factors("model.language_model.layers.0.self_attn.q_proj", 32, 32)
    write_adapter(qwen3, tensors, use_dora=True)
    assert "changes no tensor of the vision tower" in inspect_checkpoint(qwen3).adapter
    with caplog.at_level("WARNING", "vitgraph"):
        state = load_encoder(qwen3, dtype="float32").state_dict()
    assert "changes no tensor" in caplog.text
    for name, value in plain.items():
        assert torch.equal(state[name], value)


def test_inspect_says_that_an_adapter_is_merged(qwen3: Path, cli: Cli) -> None:
    write_adapter(qwen3, factors(QKV, 192, 64))
    run = cli("inspect", qwen3)
    assert "adapter_model.safetensors is merged into 1 tensors" in run.out
    assert "adapter_model.safetensors" in inspect_checkpoint(qwen3).shards


@pytest.mark.parametrize("family", ["qwen3_vl", "siglip", "kimi_k25_hf"])
def test_an_extracted_tower_has_the_adapter_merged(
    written: Written, tmp_path: Path, family: str
) -> None:
    folder = shutil.copytree(written(family), tmp_path / "whole")
    published = next(
        (name, value)
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
        if ("q_proj.weight" in name or "qkv.weight" in name or "wqkv.weight" in name)
        and "vis" in name
    )
    module = published[0].removesuffix(".weight")
    rows, columns = published[1].shape
    write_adapter(folder, factors(module, rows, columns))
    merged = load_encoder(folder)
    assert not same_weights(merged, load_encoder(written(family)))
    out = extract_encoder(folder, tmp_path / "out")
    assert not list(out.glob("adapter*"))
    assert same_weights(load_encoder(out), merged)
    assert same_weights(load_encoder(merged.save_pretrained(tmp_path / "saved")), merged)


@pytest.mark.parametrize("way", ["ranges", "shards"])
def test_an_adapter_is_merged_from_the_hub_and_offline(
    hub: HubServer, folder: Path, cache: Path, way: Any
) -> None:
    tensors = factors(QKV, 192, 64)
    write_adapter(folder, tensors, alpha_pattern={f"^{HEAD[11:]}{QKV}": 3, QKV: 5})
    hub.push(REPO, folder)
    whole = load_encoder(folder)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch=way)
    assert same_weights(encoder, whole)
    assert ("adapter_model.safetensors" in hub.files_sent()) == (way == "shards")
    hub.requests.clear()
    again = load_encoder(REPO, cache_dir=cache, progress=False, local_files_only=True)
    assert same_weights(again, whole)
    info = inspect_checkpoint(REPO, cache_dir=cache, local_files_only=True)
    assert "merged" in info.adapter
    assert hub.requests == []


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"field_of_tomorrow": 1}, "field_of_tomorrow=1"),
        ({"r": 8}, "[8, 64]"),
        ({"r": "many"}, "many"),
        ({"alpha_pattern": {"(.*)*x": 1}}, "(.*)*x"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
    ],
)
def test_adapters_of_other_kinds_are_refused_by_name(
    qwen3: Path, config: dict[str, Any], part: str
) -> None:
    write_adapter(qwen3, factors(QKV, 192, 64), **config)
    for load in (load_encoder, inspect_checkpoint):
        with pytest.raises(CheckpointError) as info:
            load(qwen3)
        assert part in str(info.value)


@pytest.mark.parametrize(
    "name",
    [
        f"{HEAD}{QKV}.lora_magnitude_vector",
        f"{HEAD}{QKV}.lora_B.bias",
        f"{HEAD}model.visual.unknown.lora_A.weight",
        f"{QKV}.lora_A.weight",
        f"{HEAD}{QKV}.lora_A.weight",
    ],
)
def test_an_adapter_that_fits_no_place_is_refused(qwen3: Path, name: str) -> None:
    write_adapter(qwen3, {name: torch.zeros(4, 64)})
    with pytest.raises(CheckpointError, match=r"not merged, the first .*visual"):
        load_encoder(qwen3)


def test_an_adapter_without_safetensors_is_refused(qwen3: Path) -> None:
    write_adapter(qwen3, factors(QKV, 192, 64))
    (qwen3 / "adapter_model.safetensors").rename(qwen3 / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        load_encoder(qwen3)


def test_an_adapter_of_nan_is_refused(qwen3: Path) -> None:
    tensors = {name: value * float("nan") for name, value in factors(QKV, 192, 64).items()}
    write_adapter(qwen3, tensors)
    with pytest.raises(CheckpointError, match="not finite"):
        load_encoder(qwen3)
