"""The vision halves of vLLM's model classes: the features of vLLM's tower and of ours.

Some of the language models do not run on a CPU, and none is needed to compare features.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_published import published
from torch import Tensor

from benchmarks.engines.models import IDS, write_tokenizer
from vitgraph.seeded import seeded_tower, write_seeded_checkpoint
from weights import FAMILIES
from weights.files import vision_section

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
DICE = torch.Generator().manual_seed(0)
WIDTH = 96
"""Width of the towers, a multiple of 6, with which the MLP of Step3-VL is a whole number wide."""


Batch = dict[str, Tensor]
"""The inputs of a batch as ``embed_multimodal`` takes them; see ``halves.nested`` for the names."""


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DICE)


def packed(vision: dict[str, Any], frames: int = 2) -> Batch:
    """Two images and a clip as packed patches of so many frames."""
    batch: Batch = {}
    for name, grid_name, grids in (
        ("pixel_values", "image_grid_thw", IMAGES),
        ("pixel_values_videos", "video_grid_thw", CLIPS),
    ):
        rows = sum(t * h * w for t, h, w in grids)
        batch[name] = noise(rows, 3 * frames * vision.get("patch_size", 14) ** 2)
        batch[grid_name] = torch.tensor(grids)
    return batch


def chunks(vision: dict[str, Any]) -> Batch:
    """Two images and a clip of four frames under one name, which are patches of pixels."""
    grids = torch.tensor([*IMAGES, *CLIPS])
    patch = vision.get("patch_size", 14)
    return {"pixel_values": noise(int(grids.prod(1).sum()), 3, patch, patch), "grid_thws": grids}


def images_alone(vision: dict[str, Any]) -> Batch:
    batch = packed(vision, 1)
    return {name: batch[name] for name in ("pixel_values", "image_grid_thw")}


def views(vision: dict[str, Any]) -> Batch:
    """An image without tiles, and one with three."""
    batch = {"pixel_values": noise(2, 3, 728, 728), "patch_pixel_values": noise(3, 3, 504, 504)}
    return {**batch, "num_patches": torch.tensor([0, 3])}


def crops(vision: dict[str, Any]) -> Batch:
    """An image without tiles, and one with two."""
    batch = {"pixel_values": noise(2, 3, 1024, 1024), "images_crop": noise(2, 3, 768, 768)}
    return {**batch, "images_spatial_crop": torch.tensor([[1, 1], [2, 1]])}


def slices(vision: dict[str, Any]) -> Batch:
    """An image without slices, one with one, and a clip; their patches lie side by side."""
    patch, sizes = vision.get("patch_size", 14), torch.tensor([[8, 4], [4, 8], [4, 8]])
    places = zip(("0.0", "1.0", "1.1"), sizes.tolist(), strict=True)
    batch = {f"pixel_values.{place}": noise(3, patch, h * w * patch) for place, (h, w) in places}
    batch |= {"tgt_sizes.0": sizes[:1], "tgt_sizes.1": sizes[1:].clone()}
    frames = {f"video_pixel_values.0.{n}": noise(3, patch, 16 * patch) for n in range(2)}
    return {**batch, **frames, "video_tgt_sizes.0": torch.tensor([[4, 4], [4, 4]])}


def ragged(vision: dict[str, Any]) -> Batch:
    """Two images of DeepSeek-V4.1 whose last tokens have fewer patches than others."""
    patch, grids = vision.get("patch_size", 14), torch.tensor([[4, 7], [6, 3]])
    tokens = (grids + 2) // 3
    spans = [[0, *([1] * w + [2]) * h, 3] for h, w in tokens.tolist()]
    types = torch.tensor([kind for span in spans for kind in span])
    batch = {"patches": noise(int(grids.prod(1).sum()), 3, patch, patch)}
    return {**batch, "vit_grid": grids, "llm_grid": tokens, "types": types}


def ordered(vision: dict[str, Any]) -> Batch:
    """The same of DeepSeek-V4, with an order of the tokens of each image."""
    batch = ragged(vision)
    del batch["types"]
    orders = [torch.randperm(int(n), generator=DICE) for n in batch["llm_grid"].prod(1)]
    return {**batch, "perm": torch.cat(orders)}


def dynamic(vision: dict[str, Any]) -> Batch:
    """Two images of Nemotron Omni of different sizes, and a clip of three frames."""
    images = {f"pixel_values_flat.{n}": noise(3, *size) for n, size in enumerate(SIZES)}
    counts = {"num_tokens_per_image.list": torch.tensor([6, 4])}
    return {**images, "imgs_sizes.list": torch.tensor(SIZES), **counts, **clip_frames()}


def frames(vision: dict[str, Any]) -> Batch:
    """Two images of Nemotron Nano VL of two tiles and of one, and a clip of three frames."""
    images = {"pixel_values_flat": noise(3, 3, 64, 64)}
    return {**images, "image_num_patches": torch.tensor([2, 1]), **clip_frames()}


def clip_frames() -> Batch:
    return {
        "pixel_values_flat_video": noise(3, 3, 64, 64),
        "video_num_patches": torch.tensor([3]),
        "frames_indices": torch.arange(3),
        "frame_duration_ms": torch.tensor([500]),
    }


def tiles(vision: dict[str, Any]) -> Batch:
    """A small image, a large one with two tiles, and a clip."""
    side = vision["image_size"]
    sizes = torch.tensor([[side, side], [side - 20, 2 * side]])
    batch = {f"pixel_values.{n}": noise(count, 3, side, side) for n, count in enumerate((2, 3))}
    return {**batch, "image_sizes": sizes, "pixel_values_videos": noise(1, 3, 3, side, side)}


def pictures(vision: dict[str, Any]) -> Batch:
    batch = tiles(vision)
    del batch["pixel_values_videos"]
    return batch


def whole(vision: dict[str, Any]) -> Batch:
    return {"pixel_values": noise(2, 3, vision["image_size"], vision["image_size"])}


def windows(vision: dict[str, Any]) -> Batch:
    """Two images of two views and of one, and a clip; windows at edges are not full."""
    patch = vision["image_patch_size"]
    side = vision["image_default_input_size"][0] // patch
    batch: Batch = {}
    for kind, suffix, counts, size in (("image", "", (2, 1), 4), ("video", "_videos", (2,), 9)):
        parts = [torch.randint(-1, n * side**2, (5, size), generator=DICE) for n in counts]
        parts[0][0] = 3
        lengths = torch.tensor([5] * len(counts))  # each entry needs memory of its own
        batch |= {
            f"pixel_values{suffix}": noise(sum(counts), side**2, 3 * patch**2),
            f"{kind}_token_pooling": torch.cat(parts),
            f"{kind}_num_pooled_patches": lengths,
            f"{kind}_num_patches": torch.tensor(counts) * side**2,
            f"{kind}_tokens": torch.full((5 * len(counts),), 5),
            f"num_{kind}_tokens": lengths.clone(),
        }
    return batch


class Half(NamedTuple):
    """A model class of vLLM, and what makes its language model."""

    architecture: str
    module: str
    batch: Callable[[dict[str, Any]], Batch]
    """Makes a batch for the config of a tower."""
    language: str = "init_vllm_registered_model"
    """The name in ``module`` of what makes the language model."""
    config: dict[str, Any] = {}
    """Fields that the config has besides those of the tower."""
    sizes: dict[str, dict[str, Any]] = {}
    """The name in ``module`` of what makes a part of the tower -> sizes that no config has."""
    vision: dict[str, Any] = {}
    """Sizes of the tower that differ from those of the small checkpoint."""
    ours: dict[str, Any] = {"backend": "static", "max_budget": 1024}
    """The options of our tower."""
    small: str = ""
    """The small checkpoint, if it has another name than the half; its tower is made anew, with the
    sizes of ``config``."""
    prefix: tuple[str, str] = ("", "")
    """The start of names of tensors, and what vLLM reads in its place."""
    around: tuple[str, ...] = ()
    """Tensors of the language model without which vLLM loads no weights."""


_CODE = {"auto_map": {"AutoConfig": "configuration.Config"}}
_TEXT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 4096,
}
_DOTS = {**_CODE, **_TEXT, "hidden_size": WIDTH}
_NEMOTRON = {
    **_CODE,
    "text_config": {**_TEXT, "model_type": "nemotron_h", "hidden_size": WIDTH},
    "template": "chatml",
    "image_tag_type": "internvl",
    "vit_hidden_size": WIDTH,
}
_RADIO = {
    "RadioConfig": {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 3}
    | {"intermediate_size": 4 * WIDTH}
}
CONFIG_CODE = """
from transformers import PretrainedConfig


class Config(PretrainedConfig):
    model_type = "MODEL_TYPE"

    def __init__(self, **fields):
        for name in [name for name in fields if name.endswith("_config")]:
            setattr(self, name, PretrainedConfig(**fields.pop(name)))
        super().__init__(**fields)
"""
"""The class of a config, which some repos bring along as well."""
_EAGER = {"backend": "eager"}  # of many large views, padded to budgets, each run takes seconds
_SMALL = {"image_size": 56}
_PINPOINTS = {"image_grid_pinpoints": [[56, 56], [56, 112]]}
_SAM = {"width": WIDTH, "layers": 2, "heads": 3, "global_attn_indexes": [1]}
_SAM |= {"downsample_channels": [512, WIDTH]}
_STACK = {"dim": WIDTH, "layers": 2, "heads": 3, "num_key_value_heads": 1}
_STACK |= {"intermediate_size": 128}
_MODELS = "vllm.model_executor.models"
HALVES = {
    "glm5_next": Half(
        "Glm5NextForConditionalGeneration", "vllm.models.glm5next.common.model", packed
    ),
    "qwen4_exp": Half(
        "Qwen4ExpForConditionalGeneration",
        "vllm.models.qwen4_exp.nvidia.model",
        packed,
        "Qwen4ExpForCausalLM",
    ),
    "ernie4_5_vl": Half(
        "Ernie4_5_VLMoeForConditionalGeneration",
        f"{_MODELS}.ernie45_vl",
        partial(packed, frames=1),
        "Ernie4_5_VLMoeForCausalLM",
        config={**_CODE, **_TEXT, "pixel_hidden_size": WIDTH},
    ),
    "step3_vl": Half(
        "StepVLForConditionalGeneration",
        f"{_MODELS}.step_vl",
        views,
        ours=_EAGER,
        config={**_CODE, "text_config": {**_TEXT, "model_type": "qwen3", "hidden_size": 96}},
    ),
    "minicpm_v": Half(
        "MiniCPMV4_6ForConditionalGeneration",
        f"{_MODELS}.minicpmv4_6",
        slices,
        "Qwen3_5ForCausalLM",
    ),
    "step3": Half("Step3VLForConditionalGeneration", f"{_MODELS}.step3_vl", views, ours=_EAGER),
    "dots_ocr": Half("DotsOCRForCausalLM", f"{_MODELS}.dots_ocr", images_alone, config=_DOTS),
    "deepseek_ocr2": Half(
        "DeepseekOCR2ForCausalLM",
        f"{_MODELS}.deepseek_ocr2",
        crops,
        ours=_EAGER,
        config={
            "projector_config": {"projector_type": "linear", "input_dim": WIDTH}
            | {"model_type": "mlp_projector", "n_embed": WIDTH}
        },
        vision={"image_size": 1024, "width": {"sam_vit_b": _SAM, "qwen2-0-5b": _STACK}},
        sizes={
            "ImageEncoderViT": {"embed_dim": WIDTH, "num_heads": 3, "depth": 2}
            | {"global_attn_indexes": (1,), "last_conv_output": WIDTH},
            "build_qwen2_decoder_as_encoder": {"decoder_layer": 2, "hidden_dimension": WIDTH}
            | {"num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 128},
        },
    ),
    "kimi_k3": Half(
        "KimiK3ForConditionalGeneration",
        "vllm.models.kimi_k3.nvidia.model",
        chunks,
        config={"text_config": {**_TEXT, "model_type": "kimi_linear", "hidden_size": WIDTH}},
    ),
    "llava_onevision": Half(
        "LlavaOnevisionForConditionalGeneration",
        f"{_MODELS}.llava_onevision",
        tiles,
        config=_PINPOINTS,
        vision=_SMALL,
    ),
    "llava_next": Half(
        "LlavaNextForConditionalGeneration",
        f"{_MODELS}.llava_next",
        pictures,
        config=_PINPOINTS,
        vision=_SMALL,
    ),
    "paligemma": Half(
        "PaliGemmaForConditionalGeneration", f"{_MODELS}.paligemma", whole, vision=_SMALL
    ),
    "colpali": Half("ColPaliForRetrieval", f"{_MODELS}.paligemma", whole),
    "modernvbert": Half(
        "ColModernVBertForRetrieval",
        f"{_MODELS}.colmodernvbert",
        whole,
        "ModernBertLayer",
        ours=_EAGER,
        prefix=("model.vision_model.", "model.vision_model.vision_model."),
    ),
    "deepseek_v4": Half(
        "DeepseekV41ForCausalLM",
        "vllm.models.deepseek_v41.nvidia.vl_model",
        ragged,
        "DeepseekV41LLMForCausalLM",
    ),
    "deepseek_v4_flat": Half(
        "DeepseekV4ForConditionalGeneration",
        "vllm.models.deepseek_v4.common.vl_model",
        ordered,
        small="deepseek_v4",
        config={**_TEXT, "model_type": "deepseek_v4", "hidden_size": WIDTH}
        | {"vision_n_layers": 2, "vision_dim": WIDTH, "vision_n_heads": 3}
        | {"vision_inter_dim": 128},
    ),
    "nemotron": Half(
        "NemotronH_Nano_Omni_Reasoning_V3",
        f"{_MODELS}.nano_nemotron_vl",
        dynamic,
        config=_NEMOTRON,
        sizes=_RADIO,
    ),
    "nemotron_nano_vl": Half(
        "NemotronH_Nano_VL_V2",
        f"{_MODELS}.nano_nemotron_vl",
        frames,
        config=_NEMOTRON,
        sizes=_RADIO,
    ),
    "molmo2": Half(
        "Molmo2ForConditionalGeneration",
        f"{_MODELS}.molmo2",
        windows,
        "Molmo2TextModel",
        config={**_CODE, **_TEXT, "text_config": {**_TEXT, "hidden_size": WIDTH}}
        | {"image_patch_id": 5},
        around=("model.transformer.wte.embedding", "model.transformer.wte.new_embedding"),
    ),
}
"""The small checkpoint of a model -> its class in vLLM."""
SIZES = [(64, 96), (128, 32)]
IMAGES, CLIPS = [(1, 4, 6), (1, 2, 4)], [(4, 4, 4)]
BOUND = 1e-5
"""Bound for the relative L2 difference of the features of an image or clip."""


def write_half(folder: Path, kind: str) -> list[str]:
    """Write the checkpoint of a tower with a batch, and return the names of its tensors."""
    half = HALVES[kind]
    write_seeded_checkpoint(folder, half.small or kind, width=WIDTH, dtype=torch.float32, shards=1)
    config = json.loads((folder / "config.json").read_text()) | half.config
    if half.small:
        config = half.config
    if half.vision:
        config["vision_config"] |= half.vision
    if half.small or half.vision:
        write_sizes(folder, half.small or kind, config)
    (folder / "config.json").write_text(json.dumps(config))
    code = CONFIG_CODE.replace("MODEL_TYPE", config["model_type"])
    (folder / "configuration.py").write_text(code)
    write_tokenizer(folder, IDS, {"<image>": 398})
    save_file(half.batch(dict(vision_section(config)[0])), folder / "batch.safetensors")
    if half.around or any(half.prefix):
        tensors = {
            name.replace(*half.prefix): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        tensors |= {name: torch.zeros(1, WIDTH) for name in half.around}
        save_file(tensors, folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", "pt") as file:
        return [name for name in file.keys() if not file.get_tensor(name).isnan().any()]  # noqa: SIM118


def write_sizes(folder: Path, kind: str, config: dict[str, Any]) -> None:
    """Write the tensors of a tower of the sizes of a config in place of the small ones."""
    family = FAMILIES[kind]
    layout = family.layouts[0]
    tower = seeded_tower(family, config, 0, torch.float32)
    save_file(published(layout, layout.prefixes[0], tower), folder / "model.safetensors")


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """The features of each image and clip, by "kind side", vLLM's towers first."""
    return run_halves(tmp_path_factory.mktemp("halves"), [*HALVES])


def run_halves(folder: Path, kinds: Sequence[str]) -> dict[str, list[Tensor]]:
    jobs: dict[str, dict[str, Any]] = {}
    for side in ("stock", "ours"):
        for kind in kinds:
            half, model = HALVES[kind], folder / f"{kind}-{side}"
            if side == "stock":
                names = write_half(model, kind)
            else:  # vLLM takes a model that it has seen as it was
                model.symlink_to(folder / f"{kind}-stock")
                names = jobs[f"{kind} stock"]["tensors"]
            jobs[f"{kind} {side}"] = {
                "model": str(model),
                "architecture": half.architecture,
                "language": [half.module, half.language],
                "sizes": half.sizes,
                "tensors": names,
                "batch": str(model / "batch.safetensors"),
                "ours": half.ours if side == "ours" else None,
            }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(ROOT / "tests" / "engines" / "halves.py")]
    command += [str(folder / "jobs.json"), str(folder / "answers.json")]
    settings = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    settings["VITGRAPH_VLLM"] = "0"
    subprocess.run(command, env=os.environ | settings, check=True, timeout=900)
    files = json.loads((folder / "answers.json").read_text())
    return {name: list(load_file(file).values()) for name, file in files.items()}


@pytest.mark.parametrize("kind", HALVES)
def test_features_of_the_vision_half_are_those_of_vllms_tower(
    features: dict[str, list[Tensor]], kind: str
) -> None:
    stock, ours = features[f"{kind} stock"], features[f"{kind} ours"]
    assert len(stock) == len(ours) > 1
    for theirs, found in zip(stock, ours, strict=True):
        assert found.shape == theirs.shape
        assert float((found - theirs).norm() / theirs.norm()) < BOUND
