"""Adapters of peft take effect in an accelerated tower, and are merged as peft merges them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from encoders import Encoder
from tests.oracles import KINDS, distances
from tests.support.accelerated.cases import (
    assert_close,
    assert_fused,
    fresh,
    needs_interpreter,
    needs_triton,
    run,
)
from tests.support.hub.checkpoints import Written
from weights import load_encoder

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]


class Model(nn.Module):
    """A model whose tower has the names of a published checkpoint."""

    def __init__(self, tower: Encoder, prefix: str) -> None:
        super().__init__()
        module: nn.Module = self
        *outer, last = prefix.split(".")
        for name in outer:
            module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        module.add_module(last, tower)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["qkv", "linear_fc1"]},
        {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 5},
        {
            "target_modules": ["qkv", "proj"],
            "rank_pattern": {"blocks.0.attn.qkv": 3, r"^model\.visual\.blocks\.1\.attn\.qkv": 2},
            "alpha_pattern": {r"attn\.proj": 20, "proj": 1},
        },
        {"target_modules": ["qkv"], "fan_in_fan_out": True, "bias": "all"},
        {"target_modules": ["qkv"], "modules_to_save": ["merger"], "bias": "lora_only"},
        {"target_modules": ["qkv"], "init_lora_weights": "gaussian", "bias": "none"},
    ],
)
def test_a_lora_adapter_is_merged_as_peft_merges_it(
    written: Written, tmp_path: Path, settings: dict[str, Any]
) -> None:
    from peft import LoraConfig, get_peft_model

    folder = shutil.copytree(written("qwen3_vl"), tmp_path / "whole")
    prefix = "model.visual" if "rank_pattern" in settings else "visual"
    base = Model(load_encoder(folder, dtype="float32"), prefix)
    model = get_peft_model(base, LoraConfig(**settings))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(str(tmp_path / "adapter"))
    for path in (tmp_path / "adapter").glob("adapter_*"):
        shutil.copy(path, folder)
    merged = model.merge_and_unload().get_submodule(prefix).state_dict()
    plain = load_encoder(written("qwen3_vl"), dtype="float32").state_dict()
    changed = [name for name in merged if not torch.equal(merged[name], plain[name])]
    assert changed
    state = load_encoder(folder, dtype="float32").state_dict()
    for name, value in merged.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)


@needs_triton
@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", KINDS)
def test_peft_adapters_take_effect(name: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    encoder, before = fresh(name), run(fresh(name), name)
    layers = [key for key, layer in encoder.blocks.named_modules() if type(layer) is nn.Linear]
    targets = sorted({key.split(".")[-1] for key in layers})
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, encoder)
    encoder.requires_grad_(False)
    for key, weight in encoder.named_parameters():  # peft draws them far larger than trained ones
        if "lora_B" in key:
            weight.mul_(0.1)
    fast, truth = encoder.accelerated(), run(encoder, name)
    assert_close(run(fast, name), truth)
    assert_fused(fast, len(layers))
    assert max(distances(truth, before).values()) > 1e-3
