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
WIDTH = 96
"""Width of the towers, a multiple of 6, with which the MLP of Step3-VL is a whole number wide."""


class Half(NamedTuple):
    """A model class of vLLM, and what makes its language model."""

    architecture: str
    module: str
    language: str = "init_vllm_registered_model"
    """The name in ``module`` of what makes the language model."""
    frames: int = 2
    """The frames in a row of packed patches."""
    views: bool = False
    """Whether images are whole views with tiles of another size, and not packed patches."""
    slices: bool = False
    """Whether a batch has whole images and slices of any size, with the patches side by side."""
    config: dict[str, Any] = {}
    """Fields that the config has besides those of the tower."""


_CODE = {"auto_map": {"AutoConfig": "configuration.Config"}}
_TEXT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 4096,
}
CONFIG_CODE = """
from transformers import PretrainedConfig


class Config(PretrainedConfig):
    model_type = "MODEL_TYPE"

    def __init__(self, vision_config=None, text_config=None, **kwargs):
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        if text_config:
            self.text_config = PretrainedConfig(**text_config)
        super().__init__(**kwargs)
"""
"""The class of a config, which some repos bring along as well."""
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
        config={**_CODE, **_TEXT, "pixel_hidden_size": WIDTH},
    ),
    "step3_vl": Half(
        "StepVLForConditionalGeneration",
        "vllm.model_executor.models.step_vl",
        views=True,
        config={**_CODE, "text_config": {**_TEXT, "model_type": "qwen3", "hidden_size": 96}},
    ),
    "minicpm_v": Half(
        "MiniCPMV4_6ForConditionalGeneration",
        "vllm.model_executor.models.minicpmv4_6",
        "Qwen3_5ForCausalLM",
        slices=True,
    ),
    "step3": Half(
        "Step3VLForConditionalGeneration", "vllm.model_executor.models.step3_vl", views=True
    ),
}
"""The small checkpoint of a model -> its class in vLLM."""
IMAGES, CLIPS = [(1, 4, 6), (1, 2, 4)], [(4, 4, 4)]
BOUND = 1e-5
"""Bound for the relative L2 difference of the features of an image or clip."""


def write_half(folder: Path, kind: str) -> list[str]:
    """Write the checkpoint of a tower with a batch, and return the names of its tensors."""
    write_seeded_checkpoint(folder, kind, width=WIDTH, dtype=torch.float32, shards=1)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | HALVES[kind].config
    file.write_text(json.dumps(config))
    code = CONFIG_CODE.replace("MODEL_TYPE", config["model_type"])
    (folder / "configuration.py").write_text(code)
    write_tokenizer(folder, IDS)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return [name for name in file.keys() if not file.get_tensor(name).isnan().any()]  # noqa: SIM118


def write_batch(file: Path, half: Half, patch: int) -> None:
    """Write a batch of noise: two images and a clip, or images of no tile and of three tiles."""
    dice = torch.Generator().manual_seed(0)
    batch: dict[str, Tensor] = {}
    if half.views:
        for name, count, side in (("pixel_values", 2, 728), ("patch_pixel_values", 3, 504)):
            batch[name] = torch.randn(count, 3, side, side, generator=dice)
        save_file({**batch, "num_patches": torch.tensor([0, 3])}, file)
        return
    if half.slices:
        sizes = torch.tensor([[8, 4], [4, 8], [4, 8]])
        for place, (h, w) in zip(("0.0", "1.0", "1.1"), sizes.tolist(), strict=True):
            batch[f"pixel_values.{place}"] = torch.randn(3, patch, h * w * patch, generator=dice)
        save_file({**batch, "tgt_sizes.0": sizes[:1], "tgt_sizes.1": sizes[1:].clone()}, file)
        return
    for name, grid_name, grids in (
        ("pixel_values", "image_grid_thw", IMAGES),
        ("pixel_values_videos", "video_grid_thw", CLIPS),
    ):
        rows = sum(t * h * w for t, h, w in grids)
        batch[name] = torch.randn(rows, 3 * half.frames * patch**2, generator=dice)
        batch[grid_name] = torch.tensor(grids)
    save_file(batch, file)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """The features of each image and clip, by "kind side", vLLM's towers first."""
    folder = tmp_path_factory.mktemp("halves")
    jobs: dict[str, dict[str, Any]] = {}
    for side, options in (("stock", None), ("ours", {"backend": "static", "max_budget": 512})):
        for kind, half in HALVES.items():
            model = folder / f"{kind}-{side}"
            names = write_half(model, kind)
            patch = json.loads((model / "config.json").read_text())["vision_config"].get(
                "patch_size", 14
            )
            write_batch(model / "batch.safetensors", half, patch)
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
    of_images_alone = HALVES[kind].views or HALVES[kind].slices
    assert len(stock) == len(ours) == (2 if of_images_alone else len(IMAGES) + len(CLIPS))
    for theirs, found in zip(stock, ours, strict=True):
        assert found.shape == theirs.shape
        assert float((found - theirs).norm() / theirs.norm()) < BOUND
