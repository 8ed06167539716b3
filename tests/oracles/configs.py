"""Published configs: the vision part as on the Hub, inert keys included."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

INTERN_300M: Config = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": {"hidden_size": 896, "model_type": "qwen2"},
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "ps_version": "v2",
    "select_layer": -1,
    "use_thumbnail": True,
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "attention_dropout": 0.0,
        "drop_path_rate": 0.1,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "image_size": 448,
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "model_type": "intern_vit_6b",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "qk_normalization": False,
        "qkv_bias": True,
        "use_flash_attn": True,
    },
}
INTERN_6B: Config = {
    **INTERN_300M,
    "llm_config": {"hidden_size": 5120, "model_type": "qwen2"},
    "vision_config": {
        **INTERN_300M["vision_config"],
        "hidden_size": 3200,
        "intermediate_size": 12800,
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "qk_normalization": True,
        "qkv_bias": False,
    },
}
QWEN2: Config = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}
QWEN2_5: Config = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3: Config = {
    "model_type": "qwen3_vl",
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3_OMNI: Config = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "vision_config": {
            **QWEN3["vision_config"],
            "apply_vit_abs_pos_embed": True,
            "image_size": 768,
            "model_type": "qwen3_omni_moe_vision_encoder",
            "out_hidden_size": 2048,
            "tokens_per_second": 2,
        }
    },
}
QWEN3_5: Config = {
    "model_type": "qwen3_5",
    "vision_config": {
        **QWEN3["vision_config"],
        "deepstack_visual_indexes": [],
        "model_type": "qwen3_5",
        "out_hidden_size": 5120,
    },
}
OMNI2_5: Config = {
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "vision_config": {
            **QWEN2_5["vision_config"],
            "embed_dim": 1280,
            "in_channels": 3,
            "model_type": "qwen2_5_omni_vision_encoder",
        }
    },
}


def vision_of(config: Config) -> Config:
    """The tower's part of a published config."""
    return config.get("thinker_config", config)["vision_config"]


CHAT_KEYS = ("force_image_size", "select_layer", "ps_version")


def edited(config: Config, **changes: Any) -> Config:
    """The same published config with other numbers: in its vision part, but for CHAT_KEYS.

    ``llm_width`` is the width of the language model beside an InternViT.
    """
    if "thinker_config" in config:
        return {**config, "thinker_config": edited(config["thinker_config"], **changes)}
    config = {**config, **{key: changes.pop(key) for key in CHAT_KEYS if key in changes}}
    if "llm_width" in changes:
        config["llm_config"] = {**config["llm_config"], "hidden_size": changes.pop("llm_width")}
    return {**config, "vision_config": {**config["vision_config"], **changes}}
