"""InternViT: InternVL checkpoints as OpenGVLab, transformers, timm and Baidu publish them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from encoders import InternViT, InternViTConfig

from ..layouts import Layout, Place
from .family import (
    Family,
    Fields,
    PublishedModel,
    Shapes,
    Sizes,
    SmallCheckpoint,
    count_blocks,
    read_sizes,
)

# --- layouts and processor files -----------------------------------------------------------------

_HF_PLACES = (Place("model.", "vision_tower."), Place("", "vision_tower."), Place("", ""))
_HF_RENAMES = {
    "embeddings.cls_token": "embeddings.class_embedding",
    "embeddings.position_embeddings": "embeddings.position_embedding",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
    "encoder.layer.N.layernorm_before": "layers.N.norm1",
    "encoder.layer.N.layernorm_after": "layers.N.norm2",
    "encoder.layer.N.lambda_1": "layers.N.ls1",
    "encoder.layer.N.lambda_2": "layers.N.ls2",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}
_COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_STATS: dict[str, Any] = {**_COLOURS, "resample": 3}
_HF_SIZE = {"size": {"height": 448, "width": 448}, **_STATS}
_HF_IMAGES = {"crop_to_patches": True, "min_patches": 1, "max_patches": 12, **_HF_SIZE}
_HF_VIDEOS = {"video_processor_type": "InternVLVideoProcessor", "initial_shift": True, **_HF_SIZE}
_HF_FILES = {
    "preprocessor_config": {"image_processor_type": "GotOcr2ImageProcessorFast", **_HF_IMAGES},
    "video_preprocessor_config": _HF_VIDEOS,
}
_CLIP = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 448, **_STATS}
_HF_ATTENTION = "encoder.layer.N.attention."
_LAYOUTS = (
    Layout(  # original code: OpenGVLab/InternVL*, and OpenGVLab/InternViT-* without a prefix
        name="internvl",
        places=(Place("", "vision_model."), Place("", "")),
        marks=("embeddings.class_embedding", "encoder.layers."),
        projector=("mlp1.",),
        renames={"encoder.layers.N": "layers.N"},
        processor_files={"preprocessor_config": _CLIP},  # config.json describes the tiling
    ),
    Layout(  # early conversions to transformers; the marks of the next layout match these too
        name="internvl-hf-early",
        places=_HF_PLACES,
        marks=("encoder.layer.0.attention.attention.",),
        projector=("multi_modal_projector.",),
        joins={
            "layers.N.attn.qkv": tuple(
                f"{_HF_ATTENTION}attention.{part}" for part in ("query", "key", "value")
            )
        },
        renames={
            **_HF_RENAMES,
            "encoder.layer.N.attention.output.dense": "layers.N.attn.proj",
            "encoder.layer.N.intermediate.dense": "layers.N.mlp.fc1",
            "encoder.layer.N.output.dense": "layers.N.mlp.fc2",
        },
        processor_files=_HF_FILES,
    ),
    Layout(  # transformers: OpenGVLab/InternVL3-*-hf, OpenGVLab/InternVL3_5-*-HF
        name="internvl-hf",
        places=_HF_PLACES,
        marks=("embeddings.cls_token", "encoder.layer."),
        projector=("multi_modal_projector.",),
        joins={
            "layers.N.attn.qkv": tuple(f"{_HF_ATTENTION}{part}_proj" for part in ("q", "k", "v"))
        },
        renames={
            **_HF_RENAMES,
            "encoder.layer.N.attention.projection_layer": "layers.N.attn.proj",
            "encoder.layer.N.attention.q_norm": "layers.N.attn.q_norm",
            "encoder.layer.N.attention.k_norm": "layers.N.attn.k_norm",
            "encoder.layer.N.mlp": "layers.N.mlp",
        },
        processor_files=_HF_FILES,
    ),
    Layout(  # timm: timm/vit_intern300m_patch14_448.*
        name="timm",
        places=(Place("", ""),),
        marks=("cls_token", "blocks."),
        renames={
            "cls_token": "embeddings.class_embedding",
            "pos_embed": "embeddings.position_embedding",
            "patch_embed.proj": "embeddings.patch_embedding",
            "blocks.N.ls1.gamma": "layers.N.ls1",
            "blocks.N.ls2.gamma": "layers.N.ls2",
            "blocks.N": "layers.N",
        },
        ignored=("attn_pool", "head"),
    ),
)

# --- config ------------------------------------------------------------------------------------


_SIZES: Sizes = {
    ("embeddings.class_embedding", -1): ("hidden_size",),
    ("embeddings.patch_embedding.weight", -1): ("patch_size",),
    ("embeddings.position_embedding", 1): ("rows",),
    ("layers.0.mlp.fc1.weight", 0): ("intermediate_size",),
}


def _fields(shapes: Shapes) -> Fields:
    fields = read_sizes(shapes, _SIZES)
    rows, patch = fields.pop(("rows",), None), fields.get(("patch_size",))
    if rows is not None and patch is not None:
        fields["image_size",] = round((rows - 1) ** 0.5) * patch
    if depth := count_blocks(shapes, "layers."):
        fields["num_hidden_layers",] = depth
        fields["qkv_bias", "attention_bias"] = "layers.0.attn.qkv.bias" in shapes
        fields["qk_normalization", "use_qk_norm"] = "layers.0.attn.q_norm.weight" in shapes
        fields["norm_type",] = "layer_norm" if "layers.0.norm1.bias" in shapes else "rms_norm"
    return fields


def _read_config(config: Mapping[str, Any], shapes: Shapes | None) -> InternViTConfig:
    """Read a config; the encoder has a projector exactly if the checkpoint has its tensors.

    The projector's width is the language model's if the config states it, else the tensors'.
    """
    if shapes is None:
        return InternViTConfig.from_hf(config)
    width = (shapes.get("mlp1.3.weight") or (None,))[0]
    parts = (config.get("llm_config"), config.get("text_config"))
    language = next((part for part in parts if isinstance(part, Mapping)), {})
    if "vision_config" in config and language.get("hidden_size") is None:
        config = {**config, "llm_config": {"hidden_size": width or 1}}
    built = InternViTConfig.from_hf(config)
    if not any(name.startswith("mlp1.") for name in shapes):
        return replace(built, out_hidden_size=None)
    return built if built.out_hidden_size else replace(built, out_hidden_size=width)


def _timm_section(arguments: Mapping[str, Any]) -> dict[str, Any]:
    width = arguments.get("embed_dim", 1024)
    return (
        {"hidden_size": width, "intermediate_size": 4 * width, "patch_size": 14}
        | {"num_hidden_layers": arguments.get("depth", 24), "norm_type": "layer_norm"}
        | {"num_attention_heads": arguments.get("num_heads", 16), "qkv_bias": True}
        | {"image_size": arguments.get("img_size", 448), "qk_normalization": False}
    )


# --- published checkpoints ---------------------------------------------------------------------

_TIMM = "vit_intern300m_patch14_448"
_300M: dict[str, Any] = (
    {"model_type": "intern_vit_6b", "hidden_size": 1024, "num_hidden_layers": 24}
    | {"num_attention_heads": 16, "intermediate_size": 4096, "hidden_act": "gelu"}
    | {"qkv_bias": True, "qk_normalization": False}
    | {"norm_type": "layer_norm", "layer_norm_eps": 1e-06}
    | {"image_size": 448, "patch_size": 14, "num_channels": 3}
)
_6B: dict[str, Any] = (
    {**_300M, "hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25}
    | {"intermediate_size": 12800, "qkv_bias": False, "qk_normalization": True}
    | {"norm_type": "rms_norm"}
)
_HF: dict[str, Any] = (
    {name: value for name, value in _300M.items() if not name.startswith("qk")}
    | {"model_type": "internvl_vision", "attention_bias": True, "use_qk_norm": False}
    | {"image_size": [448, 448], "patch_size": [14, 14], "use_mean_pooling": True}
    | {"use_absolute_position_embeddings": True, "use_mask_token": False}
)
_CHAT: dict[str, Any] = (
    {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"]}
    | {"downsample_ratio": 0.5, "ps_version": "v2", "select_layer": -1, "force_image_size": 448}
    | {"dynamic_image_size": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12}
    | {"use_thumbnail": True}
)
_CHAT_HF: dict[str, Any] = (
    {"model_type": "internvl", "architectures": ["InternVLForConditionalGeneration"]}
    | {"downsample_ratio": 0.5, "vision_feature_layer": -1, "projector_hidden_act": "gelu"}
    | {"vision_feature_select_strategy": "default"}
)
_WITH_300M = {
    "InternVL2": {"1B": 896, "2B": 2048, "4B": 3072, "8B": 4096},
    "InternVL2_5": {"1B": 896, "2B": 2048, "4B": 2048, "8B": 4096},
    "InternVL3": {"1B": 896, "2B": 1536, "8B": 3584, "9B": 4096, "14B": 5120},
    "InternVL3_5": {
        "1B": 1024,
        "2B": 2048,
        "4B": 2560,
        "8B": 4096,
        "14B": 5120,
        "GPT-OSS-20B-A4B-Preview": 2880,
        "30B-A3B": 2048,
    },
}
"""Series -> size -> width of the language model, for the models with the 300M tower."""
_WITH_6B = {
    "InternVL2": {"26B": 6144, "40B": 7168, "Llama3-76B": 8192},
    "InternVL2_5": {"26B": 6144, "38B": 5120, "78B": 8192},
    "InternVL3": {"38B": 5120, "78B": 8192},
    "InternVL3_5": {"38B": 5120, "241B-A28B": 4096},
}
_CONVERTED = {
    "InternVL3-{}-hf": {"1B": 896, "2B": 1536, "8B": 3584, "14B": 5120},
    "InternVL3_5-{}-HF": {"1B": 1024, "2B": 2048, "4B": 2560, "8B": 4096, "14B": 5120},
}


def _tower(repo_id: str, layout: str, config: dict[str, Any]) -> PublishedModel:
    parameters = 5_536_496_000 if config.get("hidden_size") == 3200 else 304_012_288
    return PublishedModel(repo_id, "intern_vit", layout, "", parameters, 0, config)


def _model(name: str, vision: dict[str, Any], width: int) -> PublishedModel:
    converted, tower = vision is _HF, vision["hidden_size"]
    # The projector is a norm over 4 patches, a linear to the language model's width and a square
    # linear.
    projector = 8 * tower + 4 * tower * width + width + width**2 + width
    text = {"text_config" if converted else "llm_config": {"hidden_size": width}}
    return replace(
        _tower(f"OpenGVLab/{name}", "internvl-hf" if converted else "internvl", vision),
        prefix="vision_tower." if converted else "vision_model.",
        projector_parameters=projector,
        config={**(_CHAT_HF if converted else _CHAT), **text, "vision_config": vision},
    )


_TOWERS = {
    **dict.fromkeys(("300M-448px", "300M-448px-V2_5"), _300M),
    **dict.fromkeys(("6B-448px-V1-2", "6B-448px-V1-5", "6B-448px-V2_5"), _6B),
}
_CLASS = {"architectures": ["InternVisionModel"]}
_TIMM_INPUT = {"input_size": [3, 448, 448], "fixed_input_size": True}
_TIMM_CONFIGS = {
    tag: {"architecture": _TIMM, "pretrained_cfg": {"tag": tag, **_TIMM_INPUT}}
    for tag in ("ogvl_dist", "ogvl_2pt5")
}
_PUBLISHED = (
    *(_tower(f"OpenGVLab/InternViT-{n}", "internvl", v | _CLASS) for n, v in _TOWERS.items()),
    *(_tower(f"timm/{_TIMM}.{tag}", "timm", config) for tag, config in _TIMM_CONFIGS.items()),
    *(
        _model(f"{series}-{size}", vision, width)
        for series in _WITH_300M
        for vision, sizes in ((_300M, _WITH_300M[series]), (_6B, _WITH_6B[series]))
        for size, width in sizes.items()
    ),
    *(
        _model(series.format(size), _HF, width)
        for series, sizes in _CONVERTED.items()
        for size, width in sizes.items()
    ),
)

_QIANFAN_OCR = replace(
    _model("Qianfan-OCR", _300M, 2560),
    repo_id="baidu/Qianfan-OCR",
    config={
        **_CHAT,
        "model_type": "qianfan_ocr",
        "architectures": ["QianfanOCRForConditionalGeneration"],
        "text_config": {"hidden_size": 2560},
        "vision_config": {**_300M, "model_type": "qianfan_ocr_vision"},
    },
)

INTERN_VIT = Family(
    name="intern_vit",
    title="InternViT",
    encoder=InternViT,
    config=InternViTConfig,
    model_types=(
        "intern_vit_6b",
        "internvl_vision",
        "internvl_chat",
        "internvl",
        "interns1_vision",
        "interns1",
        "qianfan_ocr_vision",
        "qianfan_ocr",
    ),
    signs=(
        ("encoder.layers.0.ls1", "embeddings.class_embedding"),
        ("encoder.layer.0.lambda_1", "embeddings.cls_token"),
    ),
    layouts=_LAYOUTS,
    fields=_fields,
    published=(*_PUBLISHED, _QIANFAN_OCR),
    small={
        "intern_vit": SmallCheckpoint("OpenGVLab/InternViT-300M-448px"),
        "intern_vit_300m": SmallCheckpoint("OpenGVLab/InternVL2_5-8B", "InternViT-300M"),
        "intern_vit_6b": SmallCheckpoint("OpenGVLab/InternVL2_5-38B", "InternViT-6B"),
        "intern_vit_hf": SmallCheckpoint("OpenGVLab/InternVL3-8B-hf"),
        "intern_vit_hf_early": SmallCheckpoint(
            "OpenGVLab/InternVL3-8B-hf", layout="internvl-hf-early"
        ),
        "qianfan_ocr": SmallCheckpoint("baidu/Qianfan-OCR"),
        "intern_vit_timm": SmallCheckpoint(f"timm/{_TIMM}.ogvl_2pt5"),
    },
    video="one tile per frame",
    replays={"image": "yes, by tile", "video": "yes, by tile"},
    timm={_TIMM: _timm_section},
    read_config=_read_config,
)
