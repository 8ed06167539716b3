"""The vision halves of models whose language model does not run on a CPU: the features of vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.engines.models import IDS, write_tokenizer
from vitgraph.seeded import write_seeded_checkpoint

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engines, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


class Half(NamedTuple):
    """A model class of vLLM, and what makes its language model."""

    architecture: str
    module: str
    language: str = "init_vllm_registered_model"
    """The name in ``module`` of what makes the language model."""
    frames: int = 2
    """The frames in a row of packed patches."""
    config: dict[str, Any] = {}
    """Fields that the config has besides those of the tower."""


_FLAT = {
    "auto_map": {"AutoConfig": "configuration.Config"},
    "pixel_hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 4096,
}
CONFIG_CODE = """
from transformers import PretrainedConfig


class Config(PretrainedConfig):
    model_type = "ernie4_5_moe_vl"

    def __init__(self, vision_config=None, **kwargs):
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        super().__init__(**kwargs)
"""
"""The class of the config of ERNIE-4.5-VL, which the repo brings along as well."""
HALVES = {
    "glm5_next": Half("Glm5NextForConditionalGeneration", "vllm.models.glm5next.common.model"),
    "qwen4_exp": Half(
        "Qwen4ExpForConditionalGeneration",
        "vllm.models.qwen4_exp.nvidia.model",
        "Qwen4ExpForCausalLM",
    ),
    "ernie4_5_vl": Half(
        "Ernie4_5_VLMoeForConditionalGeneration",
        "vllm.model_executor.models.ernie45_vl",
        "Ernie4_5_VLMoeForCausalLM",
        frames=1,
        config=_FLAT,
    ),
}
"""The small checkpoint of a model -> its class in vLLM."""
IMAGES, CLIPS = [(1, 4, 6), (1, 2, 4)], [(4, 4, 4)]
BOUND = 1e-5
"""Bound for the relative L2 difference of the features of an image or clip."""


def write_half(folder: Path, kind: str) -> list[str]:
    """Write the checkpoint of a tower with a batch, and return the names of its tensors."""
    write_seeded_checkpoint(folder, kind, dtype=torch.float32, shards=1)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | HALVES[kind].config))
    (folder / "configuration.py").write_text(CONFIG_CODE)
    write_tokenizer(folder, IDS)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return [name for name in file.keys() if not file.get_tensor(name).isnan().any()]  # noqa: SIM118


def write_batch(file: Path, columns: int) -> None:
    """Write a batch of two images and a clip, packed patches of noise."""
    dice = torch.Generator().manual_seed(0)
    batch: dict[str, Tensor] = {}
    for name, grid_name, grids in (
        ("pixel_values", "image_grid_thw", IMAGES),
        ("pixel_values_videos", "video_grid_thw", CLIPS),
    ):
        rows = sum(t * h * w for t, h, w in grids)
        batch[name] = torch.randn(rows, columns, generator=dice)
        batch[grid_name] = torch.tensor(grids)
    save_file(batch, file)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """The features of each image and clip, by "kind side", vLLM's towers first."""
    folder = tmp_path_factory.mktemp("halves")
    jobs: dict[str, dict[str, Any]] = {}
    for side, options in (("stock", None), ("ours", {"backend": "static", "budgets": [32, 64]})):
        for kind, half in HALVES.items():
            model = folder / f"{kind}-{side}"
            names = write_half(model, kind)
            patch = json.loads((model / "config.json").read_text())["vision_config"]["patch_size"]
            write_batch(model / "batch.safetensors", 3 * half.frames * patch**2)
            jobs[f"{kind} {side}"] = {
                "model": str(model),
                "architecture": half.architecture,
                "language": [half.module, half.language],
                "tensors": names,
                "batch": str(model / "batch.safetensors"),
                "ours": options,
            }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(ROOT / "tests" / "engines" / "halves.py")]
    command += [str(folder / "jobs.json"), str(folder / "answers.json")]
    settings = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VITGRAPH_VLLM": "0"}
    subprocess.run(command, env=os.environ | settings, check=True, timeout=900)
    files = json.loads((folder / "answers.json").read_text())
    return {name: list(load_file(file).values()) for name, file in files.items()}


@pytest.mark.parametrize("kind", HALVES)
def test_features_of_the_vision_half_are_those_of_vllms_tower(
    features: dict[str, list[Tensor]], kind: str
) -> None:
    stock, ours = features[f"{kind} stock"], features[f"{kind} ours"]
    assert len(stock) == len(ours) == len(IMAGES) + len(CLIPS)
    for theirs, found in zip(stock, ours, strict=True):
        assert found.shape == theirs.shape
        assert float((found - theirs).norm() / theirs.norm()) < BOUND
