"""DeepSeek's checkpoints: values of their configs and processor files that decide something."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from encoders import DeepseekVL2Config
from encoders.deepseek.deepseek_vl2 import Projector
from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from tests.support.towers.deepseek import tiny_config
from vitgraph.seeded import TEXT_WIDTH, write_seeded_checkpoint
from weights import FAMILIES, CheckpointError, load_encoder

PARAMS = ("vision_config", "params")


def changed(name: str, way: tuple[str, ...], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the tiny config of a family with other values in one section."""
    config = deepcopy(tiny_config(name))
    section: Any = config
    for key in way:
        section = section[key]
    section.update(fields)
    return config


@pytest.mark.parametrize(
    ("name", "way", "fields"),
    [
        ("deepseek_vl", PARAMS, {"select_layer": -2}),
        ("deepseek_vl", PARAMS, {"pixel_mean": [0.5, 0.5, 0.5]}),
        ("deepseek_vl", PARAMS, {"pixel_std": [0.5, 0.5, 0.5]}),
        ("deepseek_vl_hybrid", (*PARAMS, "low_res_cfg"), {"select_layer": -2}),
        ("deepseek_vl_hybrid", (*PARAMS, "low_res_cfg"), {"pixel_mean": [0.1, 0.1, 0.1]}),
        ("deepseek_vl_hybrid", (*PARAMS, "high_res_cfg"), {"pixel_std": [0.1, 0.1, 0.1]}),
        ("deepseek_vl2", ("vision_config",), {"ignore_head": False}),
    ],
    ids=str,
)
def test_a_tower_that_runs_otherwise_is_refused(
    name: str, way: tuple[str, ...], fields: dict[str, Any]
) -> None:
    (field,) = fields
    with pytest.raises(ValueError, match=f"config field {field}=.* is not implemented: must be"):
        FAMILIES[name].config.from_hf(changed(name, way, fields))


def test_janus_pro_is_read_without_the_half_that_makes_images(tmp_path: Path) -> None:
    plain = load_encoder(write_seeded_checkpoint(tmp_path / "plain", "deepseek_vl", width=64))
    folder = write_seeded_checkpoint(tmp_path / "janus", "deepseek_vl", width=64)
    sections = {"gen_aligner_config": {"params": {"n_embed": 8}}, "gen_vision_config": {}}
    edit_config(folder, lambda config: config.update(sections))
    names = ("gen_aligner.layers.0.weight", "gen_vision_model.encoder.conv_in.weight")
    edit_tensors(folder, lambda tensors: tensors.update(dict.fromkeys(names, torch.zeros(8))))
    assert same_weights(load_encoder(folder), plain)


@pytest.mark.parametrize(("depth", "layers"), [(1, 2), (2, 2), (3, 3)])
def test_vl2_projects_with_at_least_two_layers(depth: int, layers: int) -> None:
    """As ``MlpProjector`` of the source does."""
    config = changed("deepseek_vl2", ("projector_config",), {"depth": depth})
    projector = Projector(DeepseekVL2Config.from_hf(config))
    assert sum(isinstance(layer, torch.nn.Linear) for layer in projector.layers) == layers


@pytest.mark.parametrize(
    "fields", [{"use_qk_norm": True}, {"attention_bias": False}, {"depth": 3}], ids=str
)
def test_a_janus_that_runs_otherwise_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = write_seeded_checkpoint(tmp_path, "janus", width=32, depth=1)
    edit_config(folder, lambda config: config["vision_config"].update(fields))
    with pytest.raises(CheckpointError, match=r"is not implemented: must be"):
        load_encoder(folder)


def test_a_section_that_is_no_object_is_refused_or_inferred(tmp_path: Path) -> None:
    ocr = write_seeded_checkpoint(tmp_path / "ocr", "deepseek_ocr", width=32, depth=1)
    edit_config(ocr, lambda c: c["vision_config"]["width"].update({"clip-l-14-224": None}))
    with pytest.raises(CheckpointError, match="must describe 'sam_vit_b' and 'clip-l-14-224'"):
        load_encoder(ocr)
    vl2 = write_seeded_checkpoint(tmp_path / "vl2", "deepseek_vl2", width=32, depth=1)
    edit_config(vl2, lambda c: c.update(projector_config=True))
    assert load_encoder(vl2).out_features == TEXT_WIDTH


def test_vl2_cuts_images_to_the_candidates_of_its_processor(tmp_path: Path) -> None:
    """Its processor reads no config.json."""
    folder = write_seeded_checkpoint(tmp_path, "deepseek_vl2", width=32, depth=1)
    path = folder / "processor_config.json"
    files = json.loads(path.read_text())
    path.write_text(json.dumps({**files, "candidate_resolutions": [[384, 384], [768, 384]]}))
    images = [torch.zeros(3, height, 2000, dtype=torch.uint8) for height in (1000, 2000)]
    assert load_encoder(folder).preprocess(images).tiles == [(2, 1, True), (1, 1, True)]
