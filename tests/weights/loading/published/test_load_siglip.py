"""Checkpoints of SigLIP, NaFlex, Gemma 3 and PaliGemma: sparse configs, decoys, strict errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder

KINDS = ("siglip", "siglip2", "gemma3", "paligemma")
TOWER = {
    "siglip": "vision_model.",
    "siglip2": "vision_model.",
    "gemma3": "vision_tower.vision_model.",
    "paligemma": "vision_tower.vision_model.",
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    return write_seeded_checkpoint(tmp_path / kind, kind, width=64)


def test_the_text_half_is_neither_read_nor_fetched(
    folder: Path, kind: str, hub: HubServer, cache: Path
) -> None:
    hub.push(REPO, folder)
    fetched = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(fetched, load_encoder(folder))
    assert all(torch.isfinite(value).all() for value in fetched.state_dict().values())


@pytest.mark.parametrize("extra", ["embeddings.class_embedding", "head.probe2", "text.weight"])
def test_a_stranger_under_the_prefix_is_an_error(folder: Path, kind: str, extra: str) -> None:
    edit_tensors(folder, lambda t: t.update({TOWER[kind] + extra: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=rf"unexpected \(1\): .*{extra}"):
        load_encoder(folder)


def test_a_missing_tensor_is_an_error(folder: Path, kind: str) -> None:
    name = f"{TOWER[kind]}encoder.layers.1.self_attn.k_proj.bias"
    edit_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=rf"missing \(1\): {name}"):
        load_encoder(folder)


def test_a_sparse_config_is_filled_from_shapes_except_the_heads(folder: Path, kind: str) -> None:
    whole = load_encoder(folder)
    kept = {"model_type", "num_attention_heads"} | ({"image_size"} if kind != "siglip2" else set())

    def thin(config: dict[str, Any]) -> None:
        section = config["vision_config"]
        config["vision_config"] = {key: section[key] for key in kept if key in section}

    edit_config(folder, thin)
    found = load_encoder(folder)
    assert same_weights(found, whole)
    assert found.config == whole.config
    edit_config(folder, lambda config: config["vision_config"].pop("num_attention_heads"))
    with pytest.raises(CheckpointError, match="config has no num_attention_heads"):
        load_encoder(folder)


@pytest.mark.parametrize(
    "prefix", ["vision_tower.", "model.vision_tower.", "model.vision_tower.vision_model."]
)
def test_gemma_as_transformers_saves_it_loads(tmp_path: Path, prefix: str) -> None:
    folder = write_seeded_checkpoint(tmp_path / "old", "gemma3", width=64)
    new = write_seeded_checkpoint(tmp_path / "new", "gemma3", width=64, prefix=prefix)
    assert same_weights(load_encoder(new), load_encoder(folder))


def test_colpali_has_the_model_of_paligemma_in_a_section(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "paligemma", "paligemma", width=64)
    inner = write_seeded_checkpoint(
        tmp_path / "colpali", "paligemma", width=64, prefix="vlm.vision_tower."
    )
    whole = load_encoder(folder)

    def enclose(config: dict[str, Any]) -> None:
        model = {**config}
        config.clear()
        config.update(model_type="colpali", vlm_config=model)

    edit_config(inner, enclose)
    assert same_weights(load_encoder(inner), whole)
    edit_config(inner, lambda config: config["vlm_config"].pop("projection_dim"))
    found = load_encoder(inner)
    assert found.config == whole.config
    found.save_pretrained(tmp_path / "saved")
    assert same_weights(load_encoder(tmp_path / "saved"), whole)


def test_a_tower_without_a_head_has_none(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "siglip2", "siglip2", width=64)

    def behead(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".head." in name and "text" not in name]:
            del tensors[name]

    edit_tensors(folder, behead)
    assert load_encoder(folder).pooling_head is None
    lone = write_seeded_checkpoint(tmp_path / "lone", "siglip2", width=64, prefix="", shards=1)
    edit_tensors(lone, lambda tensors: [tensors.pop(n) for n in [*tensors] if "head." in n])
    edit_config(lone, lambda config: config.update(config.pop("vision_config")))
    assert load_encoder(lone).pooling_head is None
    edit_config(folder, lambda config: config["vision_config"].update(vision_use_head=True))
    with pytest.raises(CheckpointError, match=r"missing \(\d+\): vision_model.head"):
        load_encoder(folder)


def test_another_model_around_the_same_tower_is_refused(tmp_path: Path) -> None:
    """Aya Vision has a projector of its own."""
    folder = write_seeded_checkpoint(tmp_path / "gemma3", "gemma3", width=64)
    edit_config(folder, lambda config: config.update(model_type="aya_vision"))

    def reproject(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("multi_modal_projector.")]:
            tensors[f"multi_modal_projector.linear_{len(tensors)}.weight"] = tensors.pop(name)

    edit_tensors(folder, reproject)
    with pytest.raises(CheckpointError, match="'siglip_vision_model', with tensors of no known"):
        inspect_checkpoint(folder)


def test_an_activation_that_is_not_implemented_is_refused(folder: Path) -> None:
    edit_config(folder, lambda config: config["vision_config"].update(hidden_act="gelu"))
    with pytest.raises(CheckpointError, match="hidden_act='gelu' is not implemented"):
        load_encoder(folder)
