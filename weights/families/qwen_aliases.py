"""Checkpoints of other publishers, and of other Qwen models, that hold a Qwen-VL tower.

Sources: the configs of Qwen3.8, Qwen-Drive, North-Micro-Vision and EXAONE-4.5 as public code
copies them (QwenLM/Qwen-Drive-1.0 at ac4d230, tests of TensorRT-LLM), the classes of transformers
5.23.0, and ``qwen3_vit.py`` of timm 1.0.31.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layouts import Layout, Place
from .family import PublishedModel

# --- timm ----------------------------------------------------------------------------------------

TIMM_LAYOUT = Layout(  # timm/qwen3_vit_*_enc.*; timm's classifiers have the prefix "encoder."
    name="qwen3-timm",
    places=(Place("encoder.", ""), Place("", "")),
    marks=("blocks.0.mlp.fc1.",),
    renames={
        "pos_embed": "pos_embed.weight",
        "blocks.N.mlp.fc1": "blocks.N.mlp.linear_fc1",
        "blocks.N.mlp.fc2": "blocks.N.mlp.linear_fc2",
        "merger.fc1": "merger.linear_fc1",
        "merger.fc2": "merger.linear_fc2",
    },
    views={
        "pos_embed.weight": "n d -> one n d",
        "patch_embed.proj.weight": "d c t h w -> d c h w",
    },
    images_only=(
        "timm's copy of this tower encodes images alone, without DeepStack features: it has one "
        "patch kernel, the sum of the kernels of two frames, and no DeepStack mergers; load the "
        "original Qwen repo for videos"
    ),
)

_TIMM_SIZES = {  # timm's name -> width, depth, heads, MLP over width
    "88m": (768, 12, 12, 4.0),
    "306m": (1024, 24, 16, 4.0),
    "416m": (1152, 27, 16, 4304 / 1152),
}


def _timm_section(size: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tower's config; the tensors say what ``arguments`` leaves out."""
    width, depth, heads, ratio = _TIMM_SIZES[size]
    width = arguments.get("embed_dim", width)
    section = {
        "hidden_size": width,
        "depth": arguments.get("depth", depth),
        "num_heads": arguments.get("num_heads", heads),
        "intermediate_size": int(width * arguments.get("mlp_ratio", ratio)),
        "patch_size": 16,
        "temporal_patch_size": 1,
        "deepstack_visual_indexes": [],
    }
    out = arguments.get("out_features")
    return section if out is None else {**section, "out_hidden_size": out}


TIMM = {
    f"qwen3_vit_{size}{kind}": lambda arguments, size=size: _timm_section(size, arguments)
    for size in _TIMM_SIZES
    for kind in ("_enc", "_merge")
}
"""Timm architecture -> function from its ``model_args`` to the tower's config."""


def _timm(size: str, tag: str, parameters: int, width: int) -> PublishedModel:
    name = f"qwen3_vit_{size}_enc"
    config = {  # timm looks up out_features by the tag, the loader in the tensors
        "architecture": name,
        "model_args": {"out_features": width},
        "pretrained_cfg": {"tag": tag, "input_size": [3, 768, 768], "fixed_input_size": False},
    }
    repo = f"timm/{name}.{tag}"
    return PublishedModel(repo, "qwen3_vl", TIMM_LAYOUT.name, "", parameters, 0, config)


# --- published checkpoints -----------------------------------------------------------------------

_DRIVE: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "out_hidden_size": 2560,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
_COMPASS: dict[str, Any] = {
    **_DRIVE,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [8, 16, 24],
}
_EXAONE: dict[str, Any] = {
    "depth": 28,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "out_hidden_size": 5120,
    "hidden_act": "silu",
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [6, 13, 20, 27],
    "tokens_per_second": 2,
}


def _vision(kind: str, fields: dict[str, Any], model: str) -> dict[str, Any]:
    return {"model_type": model, "vision_config": {"model_type": kind, **fields}}


LIKE_QWEN2_5_VL = (
    PublishedModel(
        "LGAI-EXAONE/EXAONE-4.5-33B", "qwen2_5_vl", "qwen", "model.visual.", 1_286_482_944, 0,
        _vision("exaone4_5_vision", _EXAONE, "exaone4_5"),
    ),
)  # fmt: skip
LIKE_QWEN3_VL = (
    PublishedModel(
        "Qwen/Qwen-Drive-1.0-4B", "qwen3_vl", "qwen", "vlm.model.visual.", 333_514_240, 0,
        {"model_type": "qwen_drive", "vlm_config": _vision("qwen3_5", _DRIVE, "qwen3_5")},
    ),
    PublishedModel(
        "CohereLabs/North-Micro-Vision-Instruct", "qwen3_vl", "qwen", "model.visual.",
        538_631_408, 0, _vision("cohere_compass_vision", _COMPASS, "cohere_compass"),
    ),
    _timm("88m", "qwen3_5_0_8b", 100_003_072, 1024),
    _timm("306m", "qwen3_5_2b", 330_630_144, 2048),
    _timm("306m", "qwen3_5_4b", 332_727_808, 2560),
    _timm("306m", "qwen3_vl_4b", 332_727_808, 2560),
    _timm("306m", "qwen_drive_1_0_4b", 332_727_808, 2560),
    _timm("416m", "qwen3_5_9b", 455_125_744, 4096),
    _timm("416m", "qwen3_5_27b", 459_845_360, 5120),
    _timm("416m", "qwen3_8_27b", 459_845_360, 5120),
    _timm("416m", "qwen3_8_flash_next", 448_046_320, 2560),
    _timm("416m", "qwen3_vl_8b", 455_125_744, 4096),
    _timm("416m", "qwen3_vl_32b", 459_845_360, 5120),
    _timm("416m", "qwen3_vl_30b_a3b", 445_686_512, 2048),
    _timm("416m", "qwen3_vl_235b_a22b", 455_125_744, 4096),
)  # fmt: skip
