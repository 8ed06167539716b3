"""Cosmos3: a tower without a prefix among tensors of other models, in folders of its components."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Cosmos3OmniConfig, Cosmos3OmniForConditionalGeneration

from tests.oracles import distance
from tests.support.hub.checkpoints import INDEX, edit_tensors, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder

VISION = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 48,
    "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "patch_size": 16,
}  # fmt: skip
TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 100,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4},
}  # fmt: skip
TOWER = ("blocks.", "merger.", "deepstack_merger_list.", "patch_embed.", "pos_embed.")
FILES = {
    False: "transformer/diffusion_pytorch_model-00001-of-00001.safetensors",
    True: "vision_encoder/model.safetensors",
}
"""The files of the published repos, by whether they hold the tower."""


@pytest.mark.filterwarnings("ignore:.* no preprocessor_config.json")
def test_what_transformers_saves_loads_and_gives_its_features(tmp_path: Path) -> None:
    config = Cosmos3OmniConfig(vision_config=VISION, text_config=TEXT)
    model = Cosmos3OmniForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, progress=False)
    assert inspect_checkpoint(tmp_path).layout == "cosmos3"
    pixels, grid = torch.randn(24, *encoder.row_shape), torch.tensor([[1, 4, 6]])
    with torch.no_grad():
        wanted = model.model.visual(pixels, grid_thw=grid).pooler_output
    assert distance(encoder(pixels, grid).pooler_output, wanted) <= 1e-5


@pytest.mark.parametrize("fetch", ["ranges", "shards"])
def test_the_tower_is_read_from_the_folder_of_its_component(
    tmp_path: Path, hub: HubServer, cache: Path, fetch: str
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "flat", "cosmos3", width=64, shards=1)
    whole, tensors = load_encoder(folder, progress=False), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    placed = {name: name.startswith(TOWER) for name in tensors}
    for inside, file in FILES.items():
        (folder / file).parent.mkdir()
        save_file({n: x for n, x in tensors.items() if placed[n] is inside}, folder / file)
    places = {name: FILES[inside] for name, inside in placed.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert same_weights(load_encoder(folder, progress=False), whole)
    hub.push(REPO, folder)
    fetched = load_encoder(REPO, cache_dir=cache, progress=False, fetch=fetch)
    assert same_weights(fetched, whole)
    asked = [inside for inside, file in FILES.items() if any(file in path for path in hub.log())]
    assert asked == [True]


def test_a_stranger_at_the_top_is_an_error(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "cosmos3", width=64)
    edit_tensors(folder, lambda t: t.update({"sound_tower.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): sound_tower.weight"):
        load_encoder(folder)
