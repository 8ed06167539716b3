"""Weights that were saved by a wrapper or a converter are recognised, and the error says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.commands.command_line import Cli
from tests.support.hub.checkpoints import INDEX, edit_tensors, read_json
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder


@pytest.mark.parametrize(
    ("prefix", "advice"),
    [
        ("base_model.model.", "merge the adapter"),
        ("_orig_mod.", "strip `_orig_mod.`"),
        ("module.", "strip `module.`"),
    ],
)
def test_names_of_a_wrapped_model_are_recognised(qwen3: Path, prefix: str, advice: str) -> None:
    edit_tensors(qwen3, lambda t: [t.update({prefix + name: t.pop(name)}) for name in list(t)])
    with pytest.raises(CheckpointError, match=advice):
        load_encoder(qwen3)


def test_layers_wrapped_for_an_adapter_are_recognised(qwen3: Path) -> None:
    name = "model.visual.blocks.0.attn.qkv"
    edit_tensors(qwen3, lambda t: t.update({f"{name}.base_layer.weight": t.pop(f"{name}.weight")}))
    with pytest.raises(CheckpointError, match="merge the adapter"):
        load_encoder(qwen3)


def test_empty_tensors_of_zero_3_are_recognised(qwen3: Path) -> None:
    def empty(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = torch.zeros(0)

    edit_tensors(qwen3, empty)
    with pytest.raises(CheckpointError, match="ZeRO-3"):
        load_encoder(qwen3)


def test_channels_last_as_in_mlx_are_recognised(qwen3: Path) -> None:
    name = "model.visual.patch_embed.proj.weight"
    edit_tensors(qwen3, lambda t: t.update({name: t[name].movedim(1, -1)}))
    with pytest.raises(CheckpointError, match="MLX"):
        load_encoder(qwen3)


def test_a_gguf_file_is_named_as_one(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="GGUF"):
        load_encoder(tmp_path / "model.gguf")
    for path in (*qwen3.glob("*.safetensors"), qwen3 / INDEX):
        path.unlink(missing_ok=True)
    (qwen3 / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="only GGUF"):
        load_encoder(qwen3)


def test_a_file_that_the_index_leaves_out_is_named(qwen3: Path) -> None:
    index = read_json(qwen3 / INDEX)
    files = index["weight_map"]
    first = sorted(set(files.values()))[0]
    index["weight_map"] = {name: file for name, file in files.items() if file != first}
    (qwen3 / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"The index leaves out {first}"):
        load_encoder(qwen3)


def test_a_connector_that_no_layout_names_is_said(tmp_path: Path, cli: Cli) -> None:
    folder = write_seeded_checkpoint(tmp_path, "siglip", width=64)
    save_file(
        {"connector.modality_projection.weight": torch.zeros(4, 4)}, folder / "more.safetensors"
    )
    edit_tensors(folder, lambda tensors: None)
    assert inspect_checkpoint(folder).unread == ("connector.modality_projection.weight",)
    assert "unknown connector" in cli("inspect", folder).out
    with pytest.warns(UserWarning, match="are not loaded, the first connector"):
        load_encoder(folder)
