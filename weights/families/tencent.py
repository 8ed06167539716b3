"""HunyuanOCR, as Tencent publishes it and transformers saves it.

Source of the names: ``HunYuanVLForConditionalGeneration`` of transformers 5.23.0 and its conversion
mapping, which reads the published names.
"""

from __future__ import annotations

from dataclasses import replace

from encoders import HunyuanVLConfig, HunyuanVLEncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, TransformersClass, block_count, length, square, with_vision

_LAYER, _BLOCK = "layers.N", "blocks.N"
_SHARED = {
    "embeddings.patch_embedding": "patch_embed.proj",
    "embeddings.position_embedding": "pos_embed",
    f"{_LAYER}.self_attn.o_proj": f"{_BLOCK}.attn.proj",
}
_LAYOUT = Layout(
    name="hunyuan-vl",
    prefixes=(
        Prefix("", "vit."),  # tencent/HunyuanOCR
        Prefix("model.", "vit."),
        Prefix("model.", "vision_tower."),
        Prefix("", ""),
    ),
    marks=("perceive.",),
    joins={f"{_BLOCK}.attn.qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv")},
    renames={
        **_SHARED,
        f"{_LAYER}.input_layernorm": f"{_BLOCK}.norm1",
        f"{_LAYER}.post_attention_layernorm": f"{_BLOCK}.norm2",
        f"{_LAYER}.mlp.dense_h_to_4h": f"{_BLOCK}.mlp.fc1",
        f"{_LAYER}.mlp.dense_4h_to_h": f"{_BLOCK}.mlp.fc2",
        "perceive.proj.0": "merger.proj_conv",
        "perceive.proj.2": "merger.proj_out",
        "perceive": "merger",
    },
    ignored=("perceive.image_sep",),  # no forward reads it
    processor_files=family_facts("hunyuan_vl").processors["hunyuan-vl"],
)
_RAW = replace(  # the names of the modules of transformers 5.24, as ``state_dict`` has them
    _LAYOUT,
    name="hunyuan-vl-transformers",
    prefixes=(Prefix("model.", "vision_tower."), Prefix("", "vision_tower."), Prefix("", "")),
    marks=("patch_merger.",),
    renames={
        **_SHARED,
        f"{_LAYER}.layer_norm1": f"{_BLOCK}.norm1",
        f"{_LAYER}.layer_norm2": f"{_BLOCK}.norm2",
        f"{_LAYER}.mlp": f"{_BLOCK}.mlp",
        "patch_merger": "merger",
    },
    ignored=("patch_merger.image_sep",),
)
_PATCH = "patch_embed.proj.weight"
HUNYUAN_VL = Family(
    name="hunyuan_vl",
    encoder=HunyuanVLEncoder,
    config=HunyuanVLConfig,
    model_types=with_vision("hunyuan_vl"),
    signs=(
        ("perceive.image_newline", "perceive.image_begin"),
        ("patch_merger.image_newline", "patch_merger.image_begin"),
    ),
    layouts=(_RAW, _LAYOUT),
    classes={
        _RAW.name: TransformersClass(
            "hunyuan_vl", "HunYuanVLVisionTransformer", "hunyuan_vl_vision"
        ),
    },
    fields={  # the number of heads cannot be inferred from shapes
        ("hidden_size",): length(_PATCH, 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("patch_size",): length(_PATCH, 3),
        ("max_image_size",): square("pos_embed.weight", 0, _PATCH, extra=1),
    },
    outer_fields={
        ("text_config.hidden_size", "hidden_size"): length("merger.mlp.weight", 0),
    },
    refusals=dict.fromkeys(
        ("hy_v4_vl", "hy_v4_vl_vision"),
        "its positions lie elsewhere, and its merger has only newlines",
    ),
)
