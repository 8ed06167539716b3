"""Small checkpoints with seeded random weights, written exactly as the Hub has the real ones.

For the demo, the notebooks and the tests: the layout, the nested config, the processor files, the
shards with their index and the language model's tensors around the tower are those of the published
repos; only the sizes are small. They go through the real loader, with no exception made for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor

from weights.families import FAMILIES, build_config
from weights.layouts import LAYOUTS, Layout, Place, full_name, to_published

from . import seeded_configs as configs

_OLD_BUDGET = {"min_pixels": 3136, "max_pixels": 12845056}
_NEW_BUDGET = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}}
_QWEN2_FILES = {"preprocessor_config": configs.qwen_images(14, configs.CLIP_STATS, _OLD_BUDGET)}
_QWEN3_FILES = {
    "preprocessor_config": configs.qwen_images(16, configs.HALF_STATS, _NEW_BUDGET),
    "video_preprocessor_config": configs.qwen3_videos(),
}
_OMNI3_FILES = {"preprocessor_config": configs.qwen_images(16, configs.HALF_STATS, _OLD_BUDGET)}
_CHAT_FILES = {"preprocessor_config": configs.internvl_images()}
_HF_FILES = {
    "preprocessor_config": configs.internvl_hf_images(),
    "video_preprocessor_config": configs.internvl_hf_videos(),
}


@dataclass(frozen=True)
class Recipe:
    """How the repos of one family are written."""

    family: str
    layout: str
    prefix: str
    config: Callable[[int, int], dict[str, Any]]
    files: Mapping[str, Any] = field(default_factory=dict)
    language: str = ""
    """Prefix of the language model's layers; empty where the repo is a tower alone."""
    others: tuple[str, ...] = ()
    """More tensors that are none of ours."""


_CHAT_LLM = ("language_model.model.", ("language_model.lm_head.weight",))
_QWEN3_LLM = ("model.language_model.", ("lm_head.weight",))

RECIPES: Mapping[str, Recipe] = {
    "intern_vit": Recipe("intern_vit", "internvl", "", configs.intern_vit, _CHAT_FILES),
    "intern_vit_300m": Recipe(
        "intern_vit", "internvl", "vision_model.", configs.internvl, _CHAT_FILES, *_CHAT_LLM
    ),
    "intern_vit_6b": Recipe(
        "intern_vit", "internvl", "vision_model.", partial(configs.internvl, large=True),
        _CHAT_FILES, *_CHAT_LLM,
    ),
    "intern_vit_hf": Recipe(
        "intern_vit", "internvl-hf", "vision_tower.", configs.internvl_hf, _HF_FILES, *_CHAT_LLM
    ),
    "intern_vit_hf_early": Recipe(
        "intern_vit", "internvl-hf-early", "vision_tower.", configs.internvl_hf, _HF_FILES,
        *_CHAT_LLM,
    ),
    "intern_vit_timm": Recipe("intern_vit", "timm", "", configs.timm),
    "qwen2_vl": Recipe(
        "qwen2_vl", "qwen", "visual.", configs.qwen2_vl, _QWEN2_FILES, "model.", ("lm_head.weight",)
    ),
    "qwen2_5_vl": Recipe(
        "qwen2_5_vl", "qwen", "visual.", configs.qwen2_5_vl, _QWEN2_FILES, "model.",
        ("lm_head.weight",),
    ),
    "qwen2_5_omni": Recipe(
        "qwen2_5_vl", "qwen2.5-omni", "thinker.visual.", configs.qwen2_5_omni, _QWEN2_FILES,
        "thinker.model.",
        ("talker.model.norm.weight", "thinker.audio_tower.conv1.weight", "thinker.lm_head.weight",
         "token2wav.code2wav_dit_model.proj_out.weight"),
    ),
    "qwen3_vl": Recipe(
        "qwen3_vl", "qwen", "model.visual.", configs.qwen3_vl, _QWEN3_FILES, *_QWEN3_LLM
    ),
    "qwen3_vl_moe": Recipe(
        "qwen3_vl", "qwen", "model.visual.", partial(configs.qwen3_vl, moe=True), _QWEN3_FILES,
        "model.language_model.",
        ("lm_head.weight", "model.language_model.layers.1.mlp.experts.gate_up_proj"),
    ),
    "qwen3_omni": Recipe(
        "qwen3_vl", "qwen3-omni", "thinker.visual.", configs.qwen3_omni, _OMNI3_FILES,
        "thinker.model.",
        ("code2wav.decoder.0.conv.weight", "talker.model.norm.weight",
         "thinker.audio_tower.conv2d1.weight", "thinker.lm_head.weight"),
    ),
    "qwen3_5": Recipe(
        "qwen3_vl", "qwen", "model.visual.", configs.qwen3_5, _QWEN3_FILES,
        "model.language_model.", ("lm_head.weight", "mtp.fc.weight"),
    ),
}  # fmt: skip
"""Every kind of checkpoint that can be written, by the name that ``family`` takes."""


def write_seeded_checkpoint(
    folder: str | Path,
    family: str,
    *,
    depth: int = 2,
    width: int = 128,
    seed: int = 0,
    shards: int = 2,
    decoy_shards: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    prefix: str | None = None,
) -> Path:
    """Write a small checkpoint of random weights as the family's repos on the Hub are written.

    The same ``seed`` makes the same tower in every layout of a family. One shard makes a
    ``model.safetensors`` without an index.

    Args:
        folder: made if need be.
        family: one of :data:`RECIPES`.
        depth: blocks of the tower.
        width: of the tower, a multiple of 32.
        seed: of the weights.
        shards: files that the tower and what lies around it are cut into.
        decoy_shards: more files, which hold nothing of the tower.
        dtype: of all tensors.
        prefix: put the tower there instead of where the family has it.

    Returns:
        ``folder``.

    Raises:
        ValueError: an unknown family, a prefix that its layout does not know, an odd width, or no
            shards.
    """
    recipe = find_recipe(family)
    if width % 32:
        raise ValueError(f"width={width}: must be a multiple of 32, the size of a head")
    if shards < 1 or decoy_shards < 0:
        raise ValueError(
            f"shards={shards}, decoy_shards={decoy_shards}: at least 1 file must hold the tower"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = recipe.config(depth, width)
    layout, place = _layout(recipe, prefix)
    if decoy_shards and not place.prefix:
        raise ValueError(
            f"decoy_shards={decoy_shards}: a tower without a prefix is alone in its repo"
        )
    tower = publish(layout, place, seeded_tower(recipe.family, config, seed, dtype))
    around = tower if not place.prefix else _surround(recipe, tower, dtype)
    files = _shard(around, shards, _extra(recipe, decoy_shards, dtype))
    _write_files(folder, files)
    for name, content in {"config": config, **recipe.files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2))
    return folder


def find_recipe(family: str) -> Recipe:
    """The recipe named ``family``.

    Raises:
        ValueError: there is none.
    """
    if family not in RECIPES:
        raise ValueError(f"family {family!r}: must be one of {', '.join(RECIPES)}")
    return RECIPES[family]


def seeded_tower(
    family: str, config: Mapping[str, Any], seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Random weights of the tower (and projector) that ``config`` describes, by our names.

    Each tensor's numbers hang on its name and the seed alone. Linears keep the scale of what they
    are given and norms are near one, so that the features of a photograph show its structure.
    """
    chat = "vision_config" in config and family == "intern_vit"
    known = {"mlp1.3.weight": (configs.TEXT_WIDTH, configs.TEXT_WIDTH)} if chat else {}
    built = build_config(FAMILIES[family], config, known, "seeded")
    encoder = FAMILIES[family].on_meta(built)
    norms = {name for name, module in encoder.named_modules() if "Norm" in type(module).__name__}
    return {
        name: _random(name, tensor, name.rsplit(".", 1)[0] in norms, seed).to(dtype)
        for name, tensor in encoder.state_dict().items()
    }


def _random(name: str, like: Tensor, norm: bool, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(crc32(name.encode()) ^ seed)
    noise = torch.randn(like.shape, generator=generator)
    if norm and name.endswith("weight"):
        return 1 + 0.05 * noise
    if name.endswith((".ls1", ".ls2")):
        return 0.1 + 0.01 * noise
    if like.ndim < 2 or "pos" in name or "class" in name:
        return 0.02 * noise
    return noise * like[0].numel() ** -0.5


def publish(layout: Layout, place: Place, tower: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors by our names the names and the cuts of a published layout."""
    published: dict[str, Tensor] = {}
    for ours, tensor in tower.items():
        names = to_published(layout, ours)
        for name, rows in zip(names, tensor.chunk(len(names)), strict=True):
            published[full_name(layout, place, name)] = rows.contiguous()
    return published


def _layout(recipe: Recipe, prefix: str | None) -> tuple[Layout, Place]:
    wanted = recipe.prefix if prefix is None else prefix
    layout = next(
        layout
        for layout in LAYOUTS
        if (layout.family, layout.name) == (recipe.family, recipe.layout)
    )
    for place in layout.places:
        if place.prefix == wanted:
            return layout, place
    known = ", ".join(repr(place.prefix) for place in layout.places)
    raise ValueError(f"prefix={prefix!r}: layout {layout.name} has {known}")


def _surround(recipe: Recipe, tower: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tower with tensors of the language model before it, inside it and after it.

    InternVL's projector comes last, as published, far from the tower. A tower without a prefix is
    alone in its repo.
    """
    names = list(tower)
    projector = [name for name in names if "mlp1." in name or "multi_modal_projector." in name]
    body = [name for name in names if name not in projector]
    half = len(body) // 2
    before = _decoys([f"{recipe.language}embed_tokens.weight"], dtype)
    between = _decoys(_language_layer(recipe.language, 0), dtype)
    after = _decoys([*_language_layer(recipe.language, 1), *recipe.others], dtype)
    return {
        **before,
        **{name: tower[name] for name in body[:half]},
        **between,
        **{name: tower[name] for name in body[half:]},
        **after,
        **{name: tower[name] for name in projector},
    }


def _language_layer(prefix: str, number: int) -> list[str]:
    layer = f"{prefix}layers.{number}."
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm")
    return [f"{layer}{part}.weight" for part in parts]


def _decoys(names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    width = configs.TEXT_WIDTH
    return {name: torch.full((width, width), float("nan"), dtype=dtype) for name in names}


def _extra(recipe: Recipe, count: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    prefix = recipe.language or "language_model.model."
    return [_decoys(_language_layer(prefix, 2 + number), dtype) for number in range(count)]


def _shard(
    tensors: dict[str, Tensor], count: int, extra: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    names = list(tensors)
    cuts = [len(names) * number // count for number in range(count + 1)]
    parts = [{name: tensors[name] for name in names[a:b]} for a, b in pairwise(cuts)]
    return parts + extra


def _write_files(folder: Path, files: list[dict[str, Tensor]]) -> None:
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors", {"format": "pt"})
        return
    placed: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        placed.update(dict.fromkeys(tensors, name))
    total = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
