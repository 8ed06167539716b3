"""The published checkpoints that load: repo id, layout, tower size, and what their config says.

Sizes and parameter counts are those of the published configs; a test builds each tower and counts.
Where a config could not be read first hand, its sizes follow from the language model's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PublishedModel:
    """One published checkpoint, as far as its vision tower goes."""

    repo_id: str
    family: str
    layout: str
    prefix: str
    parameters: int
    """Of the tower, merger included."""
    projector_parameters: int
    """Of InternVL's ``mlp1``, which lies outside the tower; 0 elsewhere."""
    config: Mapping[str, Any]
    """``config.json``, cut down to what describes the tower."""
    images: bool = True
    video: bool = True


_INTERN_300M: dict[str, Any] = {
    "model_type": "intern_vit_6b",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "qkv_bias": True,
    "qk_normalization": False,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-06,
    "hidden_act": "gelu",
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
}
_INTERN_6B: dict[str, Any] = {
    **_INTERN_300M,
    "hidden_size": 3200,
    "num_hidden_layers": 45,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "qkv_bias": False,
    "qk_normalization": True,
    "norm_type": "rms_norm",
}
_INTERN_HF: dict[str, Any] = {
    "model_type": "internvl_vision",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "attention_bias": True,
    "use_qk_norm": False,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-06,
    "hidden_act": "gelu",
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "num_channels": 3,
    "use_absolute_position_embeddings": True,
    "use_mask_token": False,
    "use_mean_pooling": True,
}
_300M, _6B = 304_012_288, 5_536_496_000


def _internvit(name: str, vision: Mapping[str, Any], parameters: int) -> PublishedModel:
    config = {**vision, "architectures": ["InternVisionModel"]}
    return PublishedModel(f"OpenGVLab/{name}", "intern_vit", "internvl", "", parameters, 0, config)


def _internvl(name: str, large: bool, width: int) -> PublishedModel:
    config = {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "select_layer": -1,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 12,
        "force_image_size": 448,
        "llm_config": {"hidden_size": width},
        "vision_config": _INTERN_6B if large else _INTERN_300M,
    }
    return PublishedModel(
        f"OpenGVLab/{name}", "intern_vit", "internvl", "vision_model.",
        _6B if large else _300M, _projector(3200 if large else 1024, width), config,
    )  # fmt: skip


def _internvl_hf(name: str, width: int) -> PublishedModel:
    config = {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "text_config": {"hidden_size": width},
        "vision_config": _INTERN_HF,
    }
    return PublishedModel(
        f"OpenGVLab/{name}", "intern_vit", "internvl-hf", "vision_tower.",
        _300M, _projector(1024, width), config,
    )  # fmt: skip


def _projector(tower: int, width: int) -> int:
    """Norm over 4 patches, a linear to the language model's width, a square linear."""
    return 8 * tower + 4 * tower * width + width + width**2 + width


def _timm(tag: str) -> PublishedModel:
    config = {"architecture": "vit_intern300m_patch14_448", "pretrained_cfg": {"tag": tag}}
    repo = f"timm/vit_intern300m_patch14_448.{tag}"
    return PublishedModel(repo, "intern_vit", "timm", "", _300M, 0, config)


def _qwen2_vl(size: str, width: int, parameters: int) -> PublishedModel:
    vision = {
        "model_type": "qwen2_vl",
        "hidden_size": width,
        "in_chans": 3,
        "spatial_patch_size": 14,
    }
    config = {"model_type": "qwen2_vl", "hidden_size": width, "vision_config": vision}
    return PublishedModel(
        f"Qwen/Qwen2-VL-{size}-Instruct", "qwen2_vl", "qwen", "visual.", parameters, 0, config
    )


def _qwen2_5(
    repo: str, model_type: str, mlp: int, width: int, parameters: int, layout: str = "qwen"
) -> PublishedModel:
    omni = model_type == "qwen2_5_omni"
    vision = {
        "model_type": "qwen2_5_omni_vision_encoder" if omni else "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": mlp,
        "num_heads": 16,
        "out_hidden_size": width,
        "hidden_act": "silu",
        "in_chans": 3,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 25 if omni else 2,
    }
    return PublishedModel(
        f"Qwen/{repo}", "qwen2_5_vl", layout, "thinker.visual." if omni else "visual.",
        parameters, 0, _wrap(model_type, vision),
    )  # fmt: skip


def _qwen3(
    repo: str,
    model_type: str,
    tower: tuple[int, int, int, int],
    width: int,
    parameters: int,
    deepstack: tuple[int, ...] = (),
    layout: str = "qwen",
) -> PublishedModel:
    depth, hidden, heads, mlp = tower
    omni = model_type == "qwen3_omni_moe"
    vision = {
        "model_type": "qwen3_omni_moe_vision_encoder" if omni else model_type,
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_heads": heads,
        "out_hidden_size": width,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": list(deepstack),
    }
    return PublishedModel(
        f"Qwen/{repo}", "qwen3_vl", layout, "thinker.visual." if omni else "model.visual.",
        parameters, 0, _wrap(model_type, vision),
    )  # fmt: skip


def _wrap(model_type: str, vision: Mapping[str, Any]) -> dict[str, Any]:
    if "omni" in model_type:
        return {"model_type": model_type, "thinker_config": {"vision_config": vision}}
    return {"model_type": model_type, "vision_config": vision}


_SMALL, _LARGE = (24, 1024, 16, 4096), (27, 1152, 16, 4304)
_SMALL_TAPS, _LARGE_TAPS = (5, 11, 17), (8, 16, 24)

PUBLISHED: tuple[PublishedModel, ...] = (
    _internvit("InternViT-300M-448px", _INTERN_300M, _300M),
    _internvit("InternViT-300M-448px-V2_5", _INTERN_300M, _300M),
    _internvit("InternViT-6B-448px-V1-2", _INTERN_6B, _6B),
    _internvit("InternViT-6B-448px-V1-5", _INTERN_6B, _6B),
    _internvit("InternViT-6B-448px-V2_5", _INTERN_6B, _6B),
    _timm("ogvl_dist"),
    _timm("ogvl_2pt5"),
    *(_internvl(f"InternVL2-{size}", False, width)
      for size, width in (("1B", 896), ("2B", 2048), ("4B", 3072), ("8B", 4096))),
    *(_internvl(f"InternVL2-{size}", True, width)
      for size, width in (("26B", 6144), ("40B", 7168), ("Llama3-76B", 8192))),
    *(_internvl(f"InternVL2_5-{size}", False, width)
      for size, width in (("1B", 896), ("2B", 2048), ("4B", 2048), ("8B", 4096))),
    *(_internvl(f"InternVL2_5-{size}", True, width)
      for size, width in (("26B", 6144), ("38B", 5120), ("78B", 8192))),
    *(_internvl(f"InternVL3-{size}", False, width)
      for size, width in (("1B", 896), ("2B", 1536), ("8B", 3584), ("9B", 4096), ("14B", 5120))),
    *(_internvl(f"InternVL3-{size}", True, width)
      for size, width in (("38B", 5120), ("78B", 8192))),
    *(_internvl(f"InternVL3_5-{size}", False, width)
      for size, width in (("1B", 1024), ("2B", 2048), ("4B", 2560), ("8B", 4096), ("14B", 5120),
                          ("GPT-OSS-20B-A4B-Preview", 2880), ("30B-A3B", 2048))),
    *(_internvl(f"InternVL3_5-{size}", True, width)
      for size, width in (("38B", 5120), ("241B-A28B", 4096))),
    *(_internvl_hf(f"InternVL3-{size}-hf", width)
      for size, width in (("1B", 896), ("2B", 1536), ("8B", 3584), ("14B", 5120))),
    *(_internvl_hf(f"InternVL3_5-{size}-HF", width)
      for size, width in (("1B", 1024), ("2B", 2048), ("4B", 2560), ("8B", 4096), ("14B", 5120))),
    _qwen2_vl("2B", 1536, 665_271_296),
    _qwen2_vl("7B", 3584, 675_759_104),
    _qwen2_vl("72B", 8192, 699_356_672),
    _qwen2_5("Qwen2.5-VL-3B-Instruct", "qwen2_5_vl", 3420, 2048, 668_684_288),
    _qwen2_5("Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", 3420, 3584, 676_550_144),
    _qwen2_5("Qwen2.5-VL-32B-Instruct", "qwen2_5_vl", 3456, 5120, 688_841_984),
    _qwen2_5("Qwen2.5-VL-72B-Instruct", "qwen2_5_vl", 3456, 8192, 704_573_696),
    _qwen2_5("Qwen2.5-Omni-7B", "qwen2_5_omni", 3420, 3584, 676_550_144, "qwen2.5-omni"),
    _qwen2_5("Qwen2.5-Omni-3B", "qwen2_5_omni", 3420, 2048, 668_684_288, "qwen2.5-omni"),
    _qwen3("Qwen3-VL-2B-Instruct", "qwen3_vl", _SMALL, 2048, 406_957_056, _SMALL_TAPS),
    _qwen3("Qwen3-VL-4B-Instruct", "qwen3_vl", _SMALL, 2560, 415_347_712, _SMALL_TAPS),
    _qwen3("Qwen3-VL-8B-Instruct", "qwen3_vl", _LARGE, 4096, 576_388_336, _LARGE_TAPS),
    _qwen3("Qwen3-VL-32B-Instruct", "qwen3_vl", _LARGE, 5120, 595_266_800, _LARGE_TAPS),
    _qwen3("Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_moe", _LARGE, 2048, 538_631_408, _LARGE_TAPS),
    _qwen3("Qwen3-VL-235B-A22B-Instruct", "qwen3_vl_moe", _LARGE, 4096, 576_388_336, _LARGE_TAPS),
    _qwen3("Qwen3-Omni-30B-A3B-Instruct", "qwen3_omni_moe", _LARGE, 2048, 538_631_408, _LARGE_TAPS,
           "qwen3-omni"),
    _qwen3("Qwen3.5-0.8B", "qwen3_5", (12, 768, 12, 3072), 1024, 100_592_896),
    _qwen3("Qwen3.5-2B", "qwen3_5", _SMALL, 2048, 331_416_576),
    _qwen3("Qwen3.5-4B", "qwen3_5", _SMALL, 2560, 333_514_240),
    _qwen3("Qwen3.5-9B", "qwen3_5", _LARGE, 4096, 456_010_480),
    _qwen3("Qwen3.5-27B", "qwen3_5", _LARGE, 5120, 460_730_096),
    _qwen3("Qwen3.5-35B-A3B", "qwen3_5_moe", _LARGE, 2048, 446_571_248),
    _qwen3("Qwen3.5-122B-A10B", "qwen3_5_moe", _LARGE, 3072, 451_290_864),
    _qwen3("Qwen3.5-397B-A17B", "qwen3_5_moe", _LARGE, 4096, 456_010_480),
    _qwen3("Qwen3.6-27B", "qwen3_5", _LARGE, 5120, 460_730_096),
    _qwen3("Qwen3.6-35B-A3B", "qwen3_5_moe", _LARGE, 2048, 446_571_248),
)  # fmt: skip
"""Every checkpoint that is known to fit, by series."""
