"""The published layouts of DeepSeek-VL, VL2, V4 and V4.1, Janus, DeepSeek-OCR, OCR-2."""

from __future__ import annotations

from dataclasses import replace

from encoders import (
    DeepseekOCR2Config,
    DeepseekOCR2Encoder,
    DeepseekOCRConfig,
    DeepseekOCREncoder,
    DeepseekV4Config,
    DeepseekV4Encoder,
    DeepseekVL2Config,
    DeepseekVL2Encoder,
    DeepseekVLConfig,
    DeepseekVLEncoder,
    DeepseekVLHybridConfig,
    DeepseekVLHybridEncoder,
)

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, TransformersClass, block_count, length, with_vision
from .siglip import QKV, siglip_names

# DeepSeek-VL

_VL_LAYOUT = Layout(
    name="deepseek-vl",
    prefixes=(Prefix("", "vision_model.vision_tower."), Prefix("", "")),
    marks=("pos_embed",),
    projector=("aligner.",),
    renames={
        "pos_embed": "vision.pos_embed",
        "patch_embed": "vision.patch_embed",
        "blocks.N": "vision.blocks.N",
        "norm": "vision.norm",
    },
    ignored=("attn_pool",),  # DeepSeek-VL does not use SigLIP's pooling head
    processor_files=family_facts("deepseek_vl").processors["deepseek-vl"],
)
_LOW, _HIGH = "vision_tower_low.vision_tower", "vision_tower_high.vision_tower"
_HYBRID_LAYOUT = Layout(
    name="deepseek-vl-hybrid",
    prefixes=(Prefix("", "vision_model."), Prefix("", "")),
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
    # The class ``HybridVisionTower`` of DeepSeek-VL has two norms that its forward does not call.
    ignored=(f"{_LOW}.attn_pool", "high_layer_norm", "low_layer_norm"),
    processor_files=family_facts("deepseek_vl_hybrid").processors["deepseek-vl-hybrid"],
)

# Converted to transformers: deepseek-community/deepseek-vl-*
_HF_SIGLIP = siglip_names("vision.", "patch_embed.proj")
_VL_HF_LAYOUT = Layout(
    name="deepseek-vl-hf",
    prefixes=(  # transformers 4 writes "vision_model." twice, transformers 5 once
        Prefix("model.", "vision_model.vision_model."),
        Prefix("model.", "vision_model."),
        Prefix("", "vision_model.vision_model."),
        Prefix("", "vision_model."),
        Prefix("", ""),
    ),
    marks=("embeddings.patch_embedding.",),
    projector=("aligner.",),
    joins={"vision.blocks.N.attn.qkv": QKV},
    renames={
        **_HF_SIGLIP,
        "aligner.linear1": "aligner.layers.0",
        "aligner.linear2": "aligner.layers.2",
    },
    reshapes={"vision.pos_embed": "one n d -> n d"},
    ignored=("head",),  # DeepSeek-VL does not use SigLIP's pooling head
    processor_files=family_facts("deepseek_vl").processors["deepseek-vl-hf"],
)
_JANUS_LAYOUT = replace(  # deepseek-community/Janus-*
    _VL_HF_LAYOUT,
    name="janus-hf",
    prefixes=(Prefix("model.", "vision_model."), Prefix("", "vision_model."), Prefix("", "")),
    marks=("encoder.layers.0.self_attn.projection_layer.",),
    renames={
        **{name.replace(".out_proj", ".projection_layer"): x for name, x in _HF_SIGLIP.items()},
        "aligner.fc1": "aligner.layers.0",
        "aligner.hidden_layers.0": "aligner.layers.2",
    },
    processor_files=family_facts("deepseek_vl").processors["janus-hf"],
)
_HF_SAM = "high_res_vision_model.vision_encoder"
_HF_NECK = ("conv1", "layer_norm1", "conv2", "layer_norm2")
_HYBRID_HF_LAYOUT = replace(  # SAM lies outside the tower's prefix, so it counts as projector
    _VL_HF_LAYOUT,
    name="deepseek-vl-hybrid-hf",
    projector=("high_res_vision_", "aligner."),
    joins={"low.vision.blocks.N.attn.qkv": QKV},
    renames={
        **{name: f"low.{encoder_name}" for name, encoder_name in _HF_SIGLIP.items()},
        f"{_HF_SAM}.patch_embed.projection": "high.sam.patch_embed.proj",
        f"{_HF_SAM}.layers.N.layer_norm1": "high.sam.blocks.N.norm1",
        f"{_HF_SAM}.layers.N.layer_norm2": "high.sam.blocks.N.norm2",
        f"{_HF_SAM}.layers.N.mlp.lin1": "high.sam.blocks.N.mlp.fc1",
        f"{_HF_SAM}.layers.N.mlp.lin2": "high.sam.blocks.N.mlp.fc2",
        f"{_HF_SAM}.layers.N": "high.sam.blocks.N",
        **{f"{_HF_SAM}.neck.{name}": f"high.sam.neck.{n}" for n, name in enumerate(_HF_NECK)},
        _HF_SAM: "high.sam",
        **{f"high_res_vision_neck.{name}": f"high.neck_hd.{n}" for n, name in enumerate(_HF_NECK)},
        "high_res_vision_proj.conv1": "high.downsamples.0",
        "high_res_vision_proj.conv2": "high.downsamples.1",
        "high_res_vision_alpha": "high.hd_alpha_downsamples",
        "aligner.vision_proj": "low.aligner",
        "aligner.high_res_vision_proj": "high.aligner",
        "aligner.proj": "aligner",
    },
    reshapes={"low.vision.pos_embed": "one n d -> n d"},
    processor_files=family_facts("deepseek_vl_hybrid").processors["deepseek-vl-hybrid-hf"],
)

DEEPSEEK_VL = Family(
    name="deepseek_vl",
    encoder=DeepseekVLEncoder,
    config=DeepseekVLConfig,
    model_types=(
        *("vision", "multi_modality", "siglip_vision_model", "deepseek_vl"),
        *("janus", "janus_vision_model"),
    ),
    signs=(
        ("pos_embed", "aligner.layers.0.weight"),
        ("aligner.linear1.weight", "aligner.linear2.weight"),
        ("self_attn.projection_layer.weight", "aligner.hidden_layers.0.weight"),
    ),
    layouts=(_VL_LAYOUT, _JANUS_LAYOUT, _VL_HF_LAYOUT),
    classes={
        "deepseek-vl-hf": TransformersClass("siglip", "SiglipVisionModel", "siglip_vision_model"),
        "janus-hf": TransformersClass(
            "janus", "JanusVisionModel", "janus_vision_model", auto=False
        ),
    },
)
DEEPSEEK_VL_HYBRID = Family(
    name="deepseek_vl_hybrid",
    encoder=DeepseekVLHybridEncoder,
    config=DeepseekVLHybridConfig,
    model_types=("vision", "multi_modality", "siglip_vision_model", "deepseek_vl_hybrid"),
    signs=(
        ("neck_hd.0.weight", "aligner.high_up_proj.weight"),
        ("high_res_vision_neck.conv1.weight", "aligner.high_res_vision_proj.weight"),
    ),
    layouts=(_HYBRID_LAYOUT, _HYBRID_HF_LAYOUT),
)

# DeepSeek-VL2

_VL2_LAYOUT = replace(
    _VL_LAYOUT,
    name="deepseek-vl2",
    prefixes=(Prefix("", "vision."), Prefix("", "")),
    projector=("projector.", "image_newline", "view_seperator"),
    processor_files=family_facts("deepseek_vl2").processors["deepseek-vl2"],
)
DEEPSEEK_VL2 = Family(
    name="deepseek_vl2",
    encoder=DeepseekVL2Encoder,
    config=DeepseekVL2Config,
    model_types=("vision", "deepseek_vl_v2"),
    signs=(("projector.layers.2.weight", "view_seperator"),),
    layouts=(_VL2_LAYOUT,),
    outer_fields={("projector_config.n_embed",): length("projector.layers.2.weight", 0)},
)

# DeepSeek-OCR

_CLIP_POSITIONS = "vision_model.embeddings.position_embedding"
_CLIP_LAYER = "vision_model.transformer.layers.N"
_SAM_NAMES = {
    "pos_embed": "sam_model.pos_embed",
    "patch_embed": "sam_model.patch_embed",
    "blocks.N.mlp.lin1": "sam_model.blocks.N.mlp.fc1",
    "blocks.N.mlp.lin2": "sam_model.blocks.N.mlp.fc2",
    "blocks.N": "sam_model.blocks.N",
    "neck": "sam_model.neck",
    "net_2": "sam_model.net_2",
    "net_3": "sam_model.net_3",
}
_OCR_LAYOUT = Layout(
    name="deepseek-ocr",
    prefixes=(Prefix("model.", "sam_model."), Prefix("", "")),
    marks=("net_2.",),
    projector=("vision_model.", "projector.", "image_newline", "view_seperator"),
    renames={
        **_SAM_NAMES,
        f"{_CLIP_POSITIONS}.weight": _CLIP_POSITIONS,
        f"{_CLIP_LAYER}.layer_norm1": "vision_model.blocks.N.norm1",
        f"{_CLIP_LAYER}.layer_norm2": "vision_model.blocks.N.norm2",
        f"{_CLIP_LAYER}.self_attn.qkv_proj": "vision_model.blocks.N.attn.qkv",
        f"{_CLIP_LAYER}.self_attn.out_proj": "vision_model.blocks.N.attn.proj",
        _CLIP_LAYER: "vision_model.blocks.N",
    },
    # In clip_sdpa.py of DeepSeek-OCR, SAM's features take the place of CLIP's patch embeddings.
    ignored=("vision_model.embeddings.patch_embedding", "vision_model.embeddings.position_ids"),
    processor_files=family_facts("deepseek_ocr").processors["deepseek-ocr"],
)
DEEPSEEK_OCR = Family(
    name="deepseek_ocr",
    encoder=DeepseekOCREncoder,
    config=DeepseekOCRConfig,
    model_types=("vision", "deepseek_vl_v2", "unlimited-ocr", "unlimited_ocr"),
    signs=(("net_3.weight", "vision_model.pre_layrnorm.weight"),),
    layouts=(_OCR_LAYOUT,),
)

# DeepSeek-OCR-2

_STACK = "qwen2_model.model.model"
_OCR2_LAYOUT = Layout(
    name="deepseek-ocr2",
    prefixes=_OCR_LAYOUT.prefixes,
    marks=("net_2.",),
    projector=("qwen2_model.", "projector.", "view_seperator"),
    renames={
        **_SAM_NAMES,
        f"{_STACK}.layers.N.input_layernorm": "blocks.N.norm1",
        f"{_STACK}.layers.N.post_attention_layernorm": "blocks.N.norm2",
        f"{_STACK}.layers.N.self_attn": "blocks.N.attn",
        f"{_STACK}.layers.N": "blocks.N",
        f"{_STACK}.norm": "norm",
        "qwen2_model.query_768": "query_768",
        "qwen2_model.query_1024": "query_1024",
    },
    ignored=(f"{_STACK}.embed_tokens",),  # the blocks read cells and queries, no words
    processor_files=family_facts("deepseek_ocr2").processors["deepseek-ocr2"],
)
DEEPSEEK_OCR2 = Family(
    name="deepseek_ocr2",
    encoder=DeepseekOCR2Encoder,
    config=DeepseekOCR2Config,
    model_types=("vision", "deepseek_vl_v2", *with_vision("deepseek_ocr2")),
    signs=(("net_3.weight", "query_768.weight"),),
    layouts=(_OCR2_LAYOUT,),
)

# DeepSeek-V4 and V4.1, whose language models have names without a prefix

_V4_LAYOUT = Layout(
    name="deepseek-v4",
    prefixes=(Prefix("", "vision."), Prefix("", "")),
    marks=("patch_embed.proj.", "blocks.0.attn.wqkv."),
    projector=("aligner.", "image_start", "image_newline", "image_end", "image_pad"),
    renames={
        "patch_embed.proj": "patch_embed",
        "blocks.N.attn.wqkv": "blocks.N.attn.qkv",
        "blocks.N.attn.wo": "blocks.N.attn.proj",
        "blocks.N.mlp.w1": "blocks.N.mlp.gate_up",
        "blocks.N.mlp.w2": "blocks.N.mlp.down",
        "aligner.w1": "aligner.fc1",
        "aligner.w2": "aligner.fc2",
    },
)
DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    encoder=DeepseekV4Encoder,
    config=DeepseekV4Config,
    model_types=with_vision("deepseek_v4", "deepseek_v41"),
    signs=(("attn.wqkv.weight", "image_newline"),),
    layouts=(_V4_LAYOUT,),
    fields={("num_hidden_layers",): block_count("blocks.")},
    outer_fields={("text_config.hidden_size",): length("aligner.fc2.weight", 0)},
)
