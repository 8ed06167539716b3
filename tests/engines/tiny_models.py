"""Small checkpoints of random weights that vLLM serves: config, weights, processor, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM

from benchmarks.engines.models import (
    INTERN_CODE,
    INTERN_CONFIG,
    INTERN_TOKENS,
    write_folder,
    write_tokenizer,
)
from encoders import InternViT, InternViTConfig

WIDTH = 128
IDS = {
    "bos_token_id": 300,
    "eos_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
    "image_token_id": 304,
    "video_token_id": 305,
}
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": IDS["bos_token_id"],
    "eos_token_id": IDS["eos_token_id"],
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
ROPE = {"rope_parameters": SECTIONS, "rope_scaling": SECTIONS}
VISION = {"depth": 4, "num_heads": 4, "patch_size": 14, "temporal_patch_size": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "architecture": "Qwen2VLForConditionalGeneration",
        "vision": {**VISION, "embed_dim": 128, "hidden_size": WIDTH, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "architecture": "Qwen2_5_VLForConditionalGeneration",
        "vision": {
            **VISION,
            "hidden_size": 128,
            "intermediate_size": 172,
            "out_hidden_size": WIDTH,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
        },
    },
    "qwen3_vl": {
        "architecture": "Qwen3VLForConditionalGeneration",
        "vision": {
            **VISION,
            "patch_size": 16,
            "hidden_size": 128,
            "intermediate_size": 256,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        "text": {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "rope_parameters": {**SECTIONS, "mrope_interleaved": True},
            "rope_scaling": {**SECTIONS, "mrope_interleaved": True},
        },
    },
}

_DRAWN_VISION = MODELS["qwen3_vl"]["vision"]
_DRAWN_ROPE = {**SECTIONS, "mrope_interleaved": True}
_QUARTER = {**_DRAWN_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
DRAWN: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {
        "architecture": "Qwen3VLMoeForConditionalGeneration",
        "vision": _DRAWN_VISION,
        "text": {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "rope_parameters": _DRAWN_ROPE,
            "rope_scaling": _DRAWN_ROPE,
        },
    },
    "qwen3_5": {
        "architecture": "Qwen3_5ForConditionalGeneration",
        "vision": {**_DRAWN_VISION, "deepstack_visual_indexes": []},
        "text": {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": _QUARTER,
            "rope_scaling": _QUARTER,
        },
    },
}
"""Models whose weights vLLM draws (``load_format="dummy"``), as their checkpoints need no files."""


def write_drawn(folder: Path, family: str) -> Path:
    """Write the folder of one of :data:`DRAWN`, without weights."""
    model = DRAWN[family]
    text = {**TEXT, "model_type": f"{family}_text", **model["text"]}
    vision = {"model_type": family, **model["vision"]}
    return write_folder(folder, model["architecture"], vision, text, IDS, family)


def write_tiny(folder: Path, family: str) -> Path:
    """Write the checkpoint of a family with weights of a fixed seed, in float32."""
    model = MODELS[family]
    text = {**TEXT, **ROPE, "model_type": f"{family}_text", **model.get("text", {})}
    vision = {"model_type": family, **model["vision"]}
    write_folder(folder, model["architecture"], vision, text, IDS, family)
    written = json.loads((folder / "config.json").read_text())
    torch.manual_seed(0)
    drawn = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    for name, weight in drawn.named_parameters():
        if weight.ndim > 1:  # larger than at the start of a training, so that towers matter
            torch.nn.init.normal_(weight, std=0.05 if "visual" in name else 0.1)
    drawn.float().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(written | {"torch_dtype": "float32"}))
    return folder


INTERN_VISION = {
    "model_type": "intern_vit_6b",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "qkv_bias": True,
    "qk_normalization": False,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "initializer_factor": 1.0,
    "num_channels": 3,
}


def write_tiny_internvl(folder: Path) -> Path:
    """Write an InternVL checkpoint of OpenGVLab's form, whose config class comes with it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {**TEXT, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config = {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": f"{INTERN_CONFIG}.InternVLChatConfig"},
        "model_type": "internvl_chat",
        "vision_config": INTERN_VISION,
        "llm_config": text,
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 56,
        "max_dynamic_patch": 4,
        "min_dynamic_patch": 1,
        "use_thumbnail": True,
        "ps_version": "v2",
        "select_layer": -1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / f"{INTERN_CONFIG}.py").write_text(INTERN_CODE)
    write_tokenizer(folder, IDS, dict(zip(INTERN_TOKENS, (306, 307, 308), strict=True)))
    torch.manual_seed(0)
    tower = InternViT(InternViTConfig.from_hf(config))
    language = Qwen2ForCausalLM(Qwen2Config(**text))
    state = {f"language_model.{name}": value for name, value in language.state_dict().items()}
    for name, value in tower.state_dict().items():
        published = name.replace("layers.", "encoder.layers.", 1)
        state[name if name.startswith("mlp1.") else f"vision_model.{published}"] = value
    for name, value in state.items():
        if value.ndim > 1:
            torch.nn.init.normal_(value, std=0.1 if "language" in name else 0.05)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    return folder
