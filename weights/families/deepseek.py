"""DeepSeek-VL, DeepSeek-VL2 and DeepSeek-OCR, as deepseek-ai publishes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from encoders import (
    DeepseekOCRConfig,
    DeepseekOCREncoder,
    DeepseekVL2Config,
    DeepseekVL2Encoder,
    DeepseekVLConfig,
    DeepseekVLEncoder,
    DeepseekVLHybridConfig,
    DeepseekVLHybridEncoder,
)

from ..layouts import Layout, Place
from .family import Family, Fields, PublishedModel, Shapes, SmallCheckpoint

_CLIP: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_ONE_VIEW = {"image": "yes, by view", "video": "no videos"}
_BY_PATH = {"image": "yes, each path by view", "video": "no videos"}


def _no_fields(shapes: Shapes) -> Fields:
    """Return nothing: published configs state every size, or name a model that has it."""
    return {}


def _vlm_processor(side: int, normalize: bool, stats: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "preprocessor_config": {
            "image_processor_type": "VLMImageProcessor",
            "processor_class": "VLChatProcessor",
            "image_size": side,
            "min_size": 14,
            "rescale_factor": 1 / 255,
            "do_normalize": normalize,
            **stats,
        }
    }


def _v2_processor(patch: int, ratio: int, candidates: list[list[int]]) -> dict[str, Any]:
    return {
        "processor_config": {
            "processor_class": "DeepseekVLV2Processor",
            "candidate_resolutions": candidates,
            "patch_size": patch,
            "downsample_ratio": ratio,
            "normalize": True,
            **_HALF,
        }
    }


# --- DeepSeek-VL ---------------------------------------------------------------------------------

_VL_LAYOUT = Layout(
    name="deepseek-vl",
    places=(Place("", "vision_model.vision_tower."), Place("", "")),
    marks=("pos_embed",),
    projector=("aligner.",),
    renames={
        "pos_embed": "vision.pos_embed",
        "patch_embed": "vision.patch_embed",
        "blocks.N": "vision.blocks.N",
        "norm": "vision.norm",
    },
    ignored=("attn_pool",),  # pools to one vector, which the model does not use
    processor_files=_vlm_processor(384, True, _HALF),
)
_LOW, _HIGH = "vision_tower_low.vision_tower", "vision_tower_high.vision_tower"
_HYBRID_LAYOUT = Layout(
    name="deepseek-vl-hybrid",
    places=(Place("", "vision_model."), Place("", "")),
    marks=("vision_tower_high.",),
    projector=("aligner.",),
    renames={
        _LOW: "low.vision",
        f"{_HIGH}.neck_hd": "high.neck_hd",
        f"{_HIGH}.downsamples": "high.downsamples",
        f"{_HIGH}.hd_alpha_downsamples": "high.hd_alpha_downsamples",
        f"{_HIGH}.blocks.N.mlp.lin1": "high.sam.blocks.N.mlp.fc1",
        f"{_HIGH}.blocks.N.mlp.lin2": "high.sam.blocks.N.mlp.fc2",
        _HIGH: "high.sam",
        "aligner.low_up_proj": "low.aligner",
        "aligner.high_up_proj": "high.aligner",
        "aligner.layers.1": "aligner",
    },
    # HybridVisionTower makes two norms that its forward does not call.
    ignored=(f"{_LOW}.attn_pool", "high_layer_norm", "low_layer_norm"),
    processor_files=_vlm_processor(1024, False, _CLIP),
)

_SIGLIP: dict[str, Any] = {
    "model_name": "siglip_large_patch16_384",
    "image_size": 384,
    "select_feature": "same",
    "select_layer": -1,
}
_SAM: dict[str, Any] = {
    "model_name": "sam_b_downsample",
    "image_size": 1024,
    "output_dim": 1024,
    "pixel_mean": _CLIP["image_mean"],
    "pixel_std": _CLIP["image_std"],
    "select_feature": "same",
    "select_layer": -1,
}


def _vl_config(tower: str, projector: str, params: dict[str, Any], width: int) -> dict[str, Any]:
    return {
        "model_type": "multi_modality",
        "architectures": ["MultiModalityCausalLM"],
        "vision_config": {"cls": tower, "model_type": "vision", "params": params},
        "aligner_config": {
            "cls": "MlpProjector",
            "model_type": "aligner",
            "params": {
                "depth": 2,
                "input_dim": 1024,
                "n_embed": width,
                "projector_type": projector,
            },
        },
        "language_config": {"model_type": "llama", "vocab_size": 102400},
    }


_VL = _vl_config("CLIPVisionTower", "mlp_gelu", _SIGLIP, 2048)
_HYBRID = _vl_config(
    "HybridVisionTower",
    "low_high_hybrid_split_mlp_gelu",
    {
        "concat_type": "tuple",
        "freeze_high": True,
        "freeze_low": True,
        "high_res_cfg": _SAM,
        "low_res_cfg": {
            **_SIGLIP,
            "output_dim": 1024,
            "pixel_mean": _HALF["image_mean"],
            "pixel_std": _HALF["image_std"],
        },
    },
    4096,
)

DEEPSEEK_VL = Family(
    name="deepseek_vl",
    title="DeepSeek-VL",
    encoder=DeepseekVLEncoder,
    config=DeepseekVLConfig,
    model_types=("vision", "multi_modality"),
    signs=(("pos_embed", "aligner.layers.0.weight"),),
    layouts=(_VL_LAYOUT,),
    fields=_no_fields,
    published=tuple(
        PublishedModel(
            f"deepseek-ai/deepseek-vl-1.3b-{kind}",
            "deepseek_vl",
            _VL_LAYOUT.name,
            "vision_model.vision_tower.",
            309_984_256,
            0,
            _VL,
        )
        for kind in ("base", "chat")
    ),
    small={"deepseek_vl": SmallCheckpoint("deepseek-ai/deepseek-vl-1.3b-chat", "DeepSeek-VL")},
    video="no",
    replays=_ONE_VIEW,
)
DEEPSEEK_VL_HYBRID = Family(
    name="deepseek_vl_hybrid",
    title="DeepSeek-VL (SAM and SigLIP)",
    encoder=DeepseekVLHybridEncoder,
    config=DeepseekVLHybridConfig,
    model_types=("vision", "multi_modality"),
    signs=(("neck_hd.0.weight", "aligner.high_up_proj.weight"),),
    layouts=(_HYBRID_LAYOUT,),
    fields=_no_fields,
    published=tuple(
        PublishedModel(
            f"deepseek-ai/deepseek-vl-7b-{kind}",
            "deepseek_vl_hybrid",
            _HYBRID_LAYOUT.name,
            "vision_model.",
            421_025_025,
            0,
            _HYBRID,
        )
        for kind in ("base", "chat")
    ),
    small={
        "deepseek_vl_hybrid": SmallCheckpoint("deepseek-ai/deepseek-vl-7b-chat", "DeepSeek-VL-7B")
    },
    video="no",
    replays=_BY_PATH,
)

# --- DeepSeek-VL2 --------------------------------------------------------------------------------

_VL2_LAYOUT = Layout(
    name="deepseek-vl2",
    places=(Place("", "vision."), Place("", "")),
    marks=("pos_embed",),
    projector=("projector.", "image_newline", "view_seperator"),
    renames=_VL_LAYOUT.renames,
    ignored=("attn_pool",),
    processor_files=_v2_processor(
        14,
        2,
        [
            [384 * m, 384 * n]
            for area in range(1, 10)
            for m in range(1, 10)
            for n in range(1, 10)
            if m * n == area
        ],
    ),
)


def _vl2_config(width: int) -> dict[str, Any]:
    candidates = _VL2_LAYOUT.processor_files["processor_config"]["candidate_resolutions"]
    return {
        "model_type": "deepseek_vl_v2",
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "candidate_resolutions": candidates,
        "global_view_pos": "head",
        "tile_tag": "2D",
        "vision_config": {
            "model_type": "vision",
            "model_name": "siglip_so400m_patch14_384",
            "layers": 27,
            "mlp_ratio": 3.7362,
            "patch_size": 14,
            "width": 1152,
        },
        "projector_config": {"model_type": "mlp_projector", "n_embed": width},
        "language_config": {"model_type": "deepseek_v2", "hidden_size": width},
    }


def _read_vl2(config: Mapping[str, Any], shapes: Shapes | None) -> DeepseekVL2Config:
    """Read a config; the projector's width is the config's, else the tensors'."""
    projector = config.get("projector_config") or {}
    rows = (shapes or {}).get("projector.layers.2.weight")
    if rows and projector.get("n_embed") is None:
        config = {**config, "projector_config": {**projector, "n_embed": rows[0]}}
    return DeepseekVL2Config.from_hf(config)


DEEPSEEK_VL2 = Family(
    name="deepseek_vl2",
    title="DeepSeek-VL2",
    encoder=DeepseekVL2Encoder,
    config=DeepseekVL2Config,
    model_types=("vision", "deepseek_vl_v2"),
    signs=(("projector.layers.2.weight", "view_seperator"),),
    layouts=(_VL2_LAYOUT,),
    fields=_no_fields,
    published=tuple(
        PublishedModel(
            f"deepseek-ai/deepseek-vl2{size}",
            "deepseek_vl2",
            _VL2_LAYOUT.name,
            "vision.",
            412_987_248 + 4612 * width + width**2,
            0,
            _vl2_config(width),
        )
        for size, width in (("-tiny", 1280), ("-small", 2048), ("", 2560))
    ),
    small={"deepseek_vl2": SmallCheckpoint("deepseek-ai/deepseek-vl2-tiny", "DeepSeek-VL2")},
    video="no",
    replays=_BY_PATH,
    verified=False,
    read_config=_read_vl2,
)

# --- DeepSeek-OCR --------------------------------------------------------------------------------

_CLIP_LAYER = "vision_model.transformer.layers.N"
_OCR_LAYOUT = Layout(
    name="deepseek-ocr",
    places=(Place("model.", "sam_model."), Place("", "")),
    marks=("net_2.",),
    projector=("vision_model.", "projector.", "image_newline", "view_seperator"),
    renames={
        "pos_embed": "sam_model.pos_embed",
        "patch_embed": "sam_model.patch_embed",
        "blocks.N.mlp.lin1": "sam_model.blocks.N.mlp.fc1",
        "blocks.N.mlp.lin2": "sam_model.blocks.N.mlp.fc2",
        "blocks.N": "sam_model.blocks.N",
        "neck": "sam_model.neck",
        "net_2": "sam_model.net_2",
        "net_3": "sam_model.net_3",
        "vision_model.embeddings.position_embedding.weight": (
            "vision_model.embeddings.position_embedding"
        ),
        f"{_CLIP_LAYER}.layer_norm1": "vision_model.blocks.N.norm1",
        f"{_CLIP_LAYER}.layer_norm2": "vision_model.blocks.N.norm2",
        f"{_CLIP_LAYER}.self_attn.qkv_proj": "vision_model.blocks.N.attn.qkv",
        f"{_CLIP_LAYER}.self_attn.out_proj": "vision_model.blocks.N.attn.proj",
        _CLIP_LAYER: "vision_model.blocks.N",
    },
    # SAM's features take the place of CLIP's patches.
    ignored=("vision_model.embeddings.patch_embedding", "vision_model.embeddings.position_ids"),
    processor_files=_v2_processor(16, 4, [[1024, 1024]]),
)
_OCR: dict[str, Any] = {
    "model_type": "deepseek_vl_v2",
    "architectures": ["DeepseekOCRForCausalLM"],
    "candidate_resolutions": [[1024, 1024]],
    "global_view_pos": "head",
    "tile_tag": "2D",
    "vision_config": {
        "model_type": "vision",
        "model_name": "deeplip_b_l",
        "image_size": 1024,
        "mlp_ratio": 3.7362,
        "width": {
            "clip-l-14-224": {
                "heads": 16,
                "image_size": 224,
                "layers": 24,
                "patch_size": 14,
                "width": 1024,
            },
            "sam_vit_b": {
                "downsample_channels": [512, 1024],
                "global_attn_indexes": [2, 5, 8, 11],
                "heads": 12,
                "layers": 12,
                "width": 768,
            },
        },
    },
    "projector_config": {
        "model_type": "mlp_projector",
        "input_dim": 2048,
        "n_embed": 1280,
        "projector_type": "linear",
    },
    "language_config": {"model_type": "deepseek_v2", "hidden_size": 1280},
}

DEEPSEEK_OCR = Family(
    name="deepseek_ocr",
    title="DeepSeek-OCR",
    encoder=DeepseekOCREncoder,
    config=DeepseekOCRConfig,
    model_types=("vision", "deepseek_vl_v2"),
    signs=(("net_3.weight", "vision_model.pre_layrnorm.weight"),),
    layouts=(_OCR_LAYOUT,),
    fields=_no_fields,
    published=(
        PublishedModel(
            "deepseek-ai/DeepSeek-OCR",
            "deepseek_ocr",
            _OCR_LAYOUT.name,
            "model.sam_model.",
            400_770_048,
            0,
            _OCR,
        ),
    ),
    small={"deepseek_ocr": SmallCheckpoint("deepseek-ai/DeepSeek-OCR", "DeepSeek-OCR")},
    video="no",
    replays=_BY_PATH,
)
