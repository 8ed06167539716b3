"""Small ``config.json`` and processor files, built as on the Hub: nested, with the inert keys."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

CLIP_STATS: Json = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
IMAGENET_STATS: Json = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF_STATS: Json = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

TEXT_WIDTH = 96
"""Width of the language models that are not there; the towers project to it."""

_TEXT: Json = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": TEXT_WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 2 * TEXT_WIDTH,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 32,
}
_QWEN_TOKENS: Json = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def _heads(width: int) -> int:
    return max(width // 32, 1)


def _intern_vision(depth: int, width: int, *, large: bool) -> Json:
    return {
        "_name_or_path": "",
        "architectures": ["InternVisionModel"],
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_intern_vit.InternVisionConfig",
            "AutoModel": "modeling_intern_vit.InternVisionModel",
        },
        "drop_path_rate": 0.1,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": width,
        "image_size": 448,
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 4 * width,
        "layer_norm_eps": 1e-06,
        "model_type": "intern_vit_6b",
        "norm_type": "rms_norm" if large else "layer_norm",
        "num_attention_heads": _heads(width),
        "num_channels": 3,
        "num_hidden_layers": depth,
        "output_attentions": False,
        "output_hidden_states": False,
        "patch_size": 14,
        "qk_normalization": large,
        "qkv_bias": not large,
        "torch_dtype": "bfloat16",
        "use_bfloat16": True,
        "use_flash_attn": True,
    }


def intern_vit(depth: int, width: int) -> Json:
    """OpenGVLab/InternViT-300M-448px: the tower's config is all there is."""
    return _intern_vision(depth, width, large=False)


def internvl(depth: int, width: int, *, large: bool = False) -> Json:
    """OpenGVLab/InternVL2_5-8B and, ``large``, InternVL2_5-38B: remote code, ``internvl_chat``."""
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
            "AutoModel": "modeling_internvl_chat.InternVLChatModel",
        },
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 448,
        "llm_config": {**_TEXT, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
        "model_type": "internvl_chat",
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "torch_dtype": "bfloat16",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": _intern_vision(depth, width, large=large),
    }


def internvl_hf(depth: int, width: int) -> Json:
    """OpenGVLab/InternVL3-8B-hf: transformers' own classes."""
    vision = {
        "architectures": ["InternVisionModel"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": width,
        "image_size": [448, 448],
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 4 * width,
        "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": _heads(width),
        "num_channels": 3,
        "num_hidden_layers": depth,
        "patch_size": [14, 14],
        "projection_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    }
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 151667,
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": {**_TEXT, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "torch_dtype": "bfloat16",
        "vision_config": vision,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def timm(depth: int, width: int) -> Json:
    """timm/vit_intern300m_patch14_448.*; what departs from the name is in ``model_args``."""
    return {
        "architecture": "vit_intern300m_patch14_448",
        "num_classes": 0,
        "num_features": width,
        "global_pool": "token",
        "model_args": {
            "depth": depth,
            "embed_dim": width,
            "num_heads": _heads(width),
            "img_size": 448,
        },
        "pretrained_cfg": {
            "tag": "ogvl_2pt5",
            "custom_load": False,
            "input_size": [3, 448, 448],
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": IMAGENET_STATS["image_mean"],
            "std": IMAGENET_STATS["image_std"],
            "num_classes": 0,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def qwen2_vl(depth: int, width: int) -> Json:
    """Qwen/Qwen2-VL-7B-Instruct: the language model's fields lie at the top."""
    vision = {
        "depth": depth,
        "embed_dim": width,
        "mlp_ratio": 4,
        "num_heads": _heads(width),
        "in_chans": 3,
        "hidden_size": TEXT_WIDTH,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    }
    return _qwen("qwen2_vl", "Qwen2VLForConditionalGeneration", vision) | _TEXT


def qwen2_5_vl(depth: int, width: int) -> Json:
    """Qwen/Qwen2.5-VL-7B-Instruct."""
    vision = _qwen2_5_vision(depth, width, 2)
    return _qwen("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", vision) | _TEXT


def qwen2_5_omni(depth: int, width: int) -> Json:
    """Qwen/Qwen2.5-Omni-7B: the tower is inside the thinker."""
    vision = _qwen2_5_vision(depth, width, 25)
    vision.update(model_type="qwen2_5_omni_vision_encoder", embed_dim=width, init_std=0.02)
    return _omni("qwen2_5_omni", "Qwen2_5OmniModel", vision)


def _qwen2_5_vision(depth: int, width: int, tokens_per_second: int) -> Json:
    return {
        "depth": depth,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": 3 * width - 4,
        "num_heads": _heads(width),
        "in_chans": 3,
        "out_hidden_size": TEXT_WIDTH,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": list(range(1, depth, 2)),
        "tokens_per_second": tokens_per_second,
        "temporal_patch_size": 2,
    }


def qwen3_vl(depth: int, width: int, *, moe: bool = False) -> Json:
    """Qwen/Qwen3-VL-8B-Instruct and, ``moe``, Qwen/Qwen3-VL-30B-A3B-Instruct."""
    kind = "qwen3_vl_moe" if moe else "qwen3_vl"
    architecture = f"Qwen3VL{'Moe' if moe else ''}ForConditionalGeneration"
    vision = _qwen3_vision(kind, depth, width, _taps(depth))
    experts = (
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32} if moe else {}
    )
    text = {**_TEXT, **experts, "model_type": f"{kind}_text"}
    return _qwen(kind, architecture, vision) | {"text_config": text}


def qwen3_omni(depth: int, width: int) -> Json:
    """Qwen/Qwen3-Omni-30B-A3B-Instruct."""
    vision = _qwen3_vision("qwen3_omni_moe_vision_encoder", depth, width, _taps(depth))
    vision.update(apply_vit_abs_pos_embed=True, image_size=768, tokens_per_second=2)
    return _omni("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", vision)


def qwen3_5(depth: int, width: int) -> Json:
    """Qwen/Qwen3.5-27B: no DeepStack."""
    vision = _qwen3_vision("qwen3_5", depth, width, [])
    text = {
        **_TEXT,
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
    }
    return _qwen("qwen3_5", "Qwen3_5ForConditionalGeneration", vision) | {"text_config": text}


def _taps(depth: int) -> list[int]:
    return sorted({max(depth * part // 4 - 1, 0) for part in (1, 2, 3)})


def _qwen3_vision(model_type: str, depth: int, width: int, deepstack: list[int]) -> Json:
    return {
        "deepstack_visual_indexes": deepstack,
        "depth": depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": width,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4 * width,
        "model_type": model_type,
        "num_heads": _heads(width),
        "num_position_embeddings": 2304,
        "out_hidden_size": TEXT_WIDTH,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _qwen(model_type: str, architecture: str, vision: Json) -> Json:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **_QWEN_TOKENS,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0",
        "vision_config": vision,
    }


def _omni(model_type: str, architecture: str, vision: Json) -> Json:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "enable_audio_output": True,
        "talker_config": {"model_type": f"{model_type}_talker", "hidden_size": TEXT_WIDTH},
        "thinker_config": {
            "audio_config": {"model_type": f"{model_type}_audio_encoder", "d_model": TEXT_WIDTH},
            "model_type": f"{model_type}_thinker",
            "text_config": {**_TEXT, "model_type": f"{model_type}_text"},
            "vision_config": vision,
        },
        "torch_dtype": "bfloat16",
    }


def qwen_images(patch: int, stats: Json, budget: Json) -> Json:
    """``preprocessor_config.json`` of a Qwen repo."""
    return {
        **budget,
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **stats,
        "image_processor_type": "Qwen2VLImageProcessor",
    }


def qwen3_videos() -> Json:
    """``video_preprocessor_config.json`` of Qwen3-VL and 3.5."""
    size = {"size": {"longest_edge": 25165824, "shortest_edge": 4096}}
    processor = qwen_images(16, HALF_STATS, size)
    del processor["image_processor_type"]
    return processor | {"video_processor_type": "Qwen3VLVideoProcessor"}


def internvl_images() -> Json:
    """``preprocessor_config.json`` of an InternVL chat repo, which does not describe the tiling."""
    return {
        "crop_size": 448,
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor",
        **IMAGENET_STATS,
        "resample": 3,
        "size": 448,
    }


def internvl_hf_images() -> Json:
    """``preprocessor_config.json`` of an InternVL -hf repo."""
    return {
        "crop_to_patches": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        **IMAGENET_STATS,
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "max_patches": 12,
        "min_patches": 1,
        "processor_class": "InternVLProcessor",
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": 448, "width": 448},
    }


def internvl_hf_videos() -> Json:
    """``video_preprocessor_config.json`` of an InternVL -hf repo: frames are not tiled."""
    kept = ("do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "resample", "size")
    images = internvl_hf_images()
    return {
        **{name: images[name] for name in kept},
        **IMAGENET_STATS,
        "initial_shift": True,
        "video_processor_type": "InternVLVideoProcessor",
    }
