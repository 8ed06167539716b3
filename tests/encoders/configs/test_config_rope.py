"""The base of rotary positions in a vision config: every spelling that transformers follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from encoders import Step3VLConfig
from tests.oracles import (
    BY_NAME,
    NO_LIFT,
    Config,
    LiftFloat32,
    build_encoder,
    build_pair,
    distances,
    draw_pixels,
    edited,
)
from tests.support.hub.checkpoints import edit_config
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

GRIDS = [[1, 8, 12], [2, 4, 8]]
FLOAT32, FLOAT64 = 1e-5, 1e-10

SPELLINGS: dict[str, Config] = {
    "rope_theta": {"rope_theta": 100.0},
    "an integer": {"rope_theta": 100},
    "rope_parameters": {"rope_parameters": {"rope_theta": 100.0}},
    "with a type": {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}},
    "with the type of old files": {"rope_parameters": {"type": "default", "rope_theta": 100.0}},
    "both": {"rope_parameters": {"rope_theta": 100.0}, "rope_theta": 5.0},
    "a type alone": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 100.0},
    "rope_scaling": {"rope_scaling": {"rope_theta": 100.0}, "rope_theta": 5.0},
    "both objects": {
        "rope_scaling": {"rope_theta": 100.0},
        "rope_parameters": {"rope_theta": 5.0},
    },
    "an empty object": {"rope_parameters": {}, "rope_scaling": None, "rope_theta": 100.0},
}
ROTARY = [
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen2_5_omni",
    "exaone4_5",
    "qwen3_vl",
    "qwen3_omni",
    "qwen3_5",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ROTARY)
def test_every_spelling_of_theta_is_followed(name: str, spelling: str) -> None:
    family = BY_NAME[name]
    config = family.config_class.from_hf(edited(family.config, **SPELLINGS[spelling]))
    assert config.rope_theta == 100.0
    assert family.config_class.from_hf(family.config).rope_theta == 10000.0


@pytest.mark.parametrize("spelling", ["rope_theta", "rope_parameters", "both", "rope_scaling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_towers_with_another_theta_match_transformers(
    name: str, dtype: torch.dtype, spelling: str
) -> None:
    family, changes = BY_NAME[name], SPELLINGS[spelling]
    lift = LiftFloat32() if dtype == torch.float64 else NO_LIFT
    limit = FLOAT64 if dtype == torch.float64 else FLOAT32
    ours, theirs = build_pair(family, {**family.tiny, **changes}, dtype, lift)
    pixels = draw_pixels(ours, GRIDS, dtype=dtype)
    with lift:
        truth = family.output(theirs, pixels, torch.tensor(GRIDS))
    assert max(distances(ours(pixels, GRIDS), truth).values()) <= limit
    usual = build_encoder(family, family.tiny, dtype)
    assert max(distances(usual(pixels, GRIDS), truth).values()) > 1e-2


@pytest.mark.parametrize("name", [*ROTARY, "step3_vl"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn' is not impl"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type='mrope' is not implemented"),
        ({"rope_parameters": [10000.0]}, r"rope_parameters=\[10000.0\]: must be an object"),
        ({"rope_parameters": False}, "rope_parameters=False: must be an object"),
        ({"rope_scaling": []}, r"rope_scaling=\[\]: must be an object"),
        ({"rope_theta": 0}, "rope_theta=0: must be a number from 1 to"),
        ({"rope_theta": True}, "rope_theta=True: must be a number from 1 to"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4': must be a number from 1 to"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta=nan: must be a number"),
        ({"rope_parameters": {"rope_theta": 1e300}}, r"rope_theta=1e\+300: must be a number"),
        ({"head_dim": 20}, "head_dim=20 is not implemented"),
    ],
)
def test_rotary_positions_of_another_kind_are_refused(
    name: str, changes: Config, message: str
) -> None:
    family = BY_NAME[name]
    with pytest.raises(ValueError, match=message):
        family.config_class.from_hf(edited(family.config, **changes))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_another_theta_is_refused_for_step3_vl(spelling: str) -> None:
    family = BY_NAME["step3_vl"]
    with pytest.raises(ValueError, match=r"rope_theta=100.0 is not implemented: must be 10000.0"):
        Step3VLConfig.from_hf(edited(family.config, **SPELLINGS[spelling]))


@pytest.mark.parametrize("recipe", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_checkpoint_keeps_its_theta_when_it_is_saved_again(recipe: str, tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "repo", recipe, width=64)
    edit_config(folder, lambda config: config["vision_config"].update(SPELLINGS["rope_parameters"]))
    encoder = load_encoder(folder, progress=False)
    encoder.save_pretrained(tmp_path / "saved")
    for loaded in (encoder, load_encoder(tmp_path / "saved", progress=False)):
        assert loaded.config.rope_theta == 100.0
