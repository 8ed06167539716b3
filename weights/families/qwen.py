"""Towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, as Qwen and others publish them.

Qwen2.5-Omni and EXAONE-4.5 have Qwen2.5-VL's tower, too; Qwen3-Omni, Qwen3.5, 3.6 and 3.8,
Qwen-Drive, North-Micro-Vision, Cosmos3 and timm's ``qwen3_vit_*`` have Qwen3-VL's. Sources of the
model types and tensor names: copies of the configs in public code (QwenLM/Qwen-Drive-1.0 at
ac4d230, tests of TensorRT-LLM), the classes of transformers 5.23.0 and its conversion of Cosmos3's
names, and ``qwen3_vit.py`` of timm 1.0.31.
"""

from __future__ import annotations

from dataclasses import replace

from encoders import (
    Qwen2_5VLConfig,
    Qwen2_5VLEncoder,
    Qwen2VLConfig,
    Qwen2VLEncoder,
    Qwen3VLConfig,
    Qwen3VLEncoder,
)
from encoders.hf_config import read_ratio, read_size

from ..layouts import Layout, Prefix
from ..published import family_facts
from ..strict_json import JsonDict, JsonObject
from .family import Family, Fields, Shapes, TransformersClass, block_count, length, with_vision

_QWEN2 = Layout(
    name="qwen",
    prefixes=(
        Prefix("thinker.", "visual."),
        Prefix("vlm.model.", "visual."),
        Prefix("vlm.", "visual."),
        Prefix("model.language_model.", "visual."),
        Prefix("model.", "visual."),
        Prefix("", "visual."),
        Prefix("", "vision_tower."),  # xlangai/OpenCUA-*
        Prefix("", ""),
    ),
    marks=("blocks.",),
    ignored=("rotary_pos_emb.inv_freq", "blocks.N.attn.rotary_emb.inv_freq", "attn_pool"),
    processor_files=family_facts("qwen2_vl").processors["qwen2"],
)
_QWEN3 = replace(_QWEN2, processor_files=family_facts("qwen3_vl").processors["qwen3"])
_COSMOS3 = (
    replace(  # nvidia/Cosmos3-*: tensors of tower, language model and generator without prefixes
        _QWEN3,
        name="cosmos3",
        prefixes=(Prefix("", ""),),
        marks=("layers.0.",),
        ignored=(
            *("layers", "embed_tokens", "norm", "lm_head", "norm_moe_gen", "time_embedder"),
            *(
                f"{kind}_{end}"
                for kind in ("proj", "audio_proj", "action_proj")
                for end in ("in", "out")
            ),
            *("audio_modality_embed", "action_modality_embed"),
        ),
    )
)
_OMNI_2_5 = replace(  # Omni checkpoints have separate weights of queries, keys and values
    _QWEN2,
    name="qwen2.5-omni",
    marks=("blocks.0.attn.q.", "blocks.0.attn.k.", "blocks.0.attn.v."),
    joins={"blocks.N.attn.qkv": ("blocks.N.attn.q", "blocks.N.attn.k", "blocks.N.attn.v")},
)
_OMNI_3 = replace(  # Omni checkpoints have other names for the layers of the mergers
    _QWEN2,
    name="qwen3-omni",
    marks=("merger.ln_q.", "merger.mlp.", "merger_list."),
    renames={
        "merger.ln_q": "merger.norm",
        "merger.mlp.0": "merger.linear_fc1",
        "merger.mlp.2": "merger.linear_fc2",
        "merger_list.N.ln_q": "deepstack_merger_list.N.norm",
        "merger_list.N.mlp.0": "deepstack_merger_list.N.linear_fc1",
        "merger_list.N.mlp.2": "deepstack_merger_list.N.linear_fc2",
    },
    processor_files=family_facts("qwen3_vl").processors["qwen3-omni"],
)
_TIMM_LAYOUT = Layout(  # timm/qwen3_vit_*_enc.*; timm's classifiers have the prefix "encoder."
    name="qwen3-timm",
    prefixes=(Prefix("encoder.", ""), Prefix("", "")),
    marks=("blocks.0.mlp.fc1.",),
    renames={
        "pos_embed": "pos_embed.weight",
        "blocks.N.mlp.fc1": "blocks.N.mlp.linear_fc1",
        "blocks.N.mlp.fc2": "blocks.N.mlp.linear_fc2",
        "merger.fc1": "merger.linear_fc1",
        "merger.fc2": "merger.linear_fc2",
    },
    reshapes={
        "pos_embed.weight": "n d -> one n d",
        "patch_embed.proj.weight": "d c t h w -> d c h w",
    },
    images_only=family_facts("qwen3_vl").images_only["qwen3-timm"],
)


def _no_deepstack(shapes: Shapes) -> list[int]:
    """Return an empty list of blocks that feed DeepStack mergers, if the tower has no such merger.

    If it has some, a LookupError is raised, because no tensor says which blocks feed them.
    """
    if any(name.startswith("deepstack_merger_list.") for name in shapes):
        raise LookupError("tensors do not say which blocks feed the mergers")
    return []


_PATCH = "patch_embed.proj.weight"
_SHARED: Fields = {
    ("depth", "num_hidden_layers"): block_count("blocks."),
    ("temporal_patch_size",): length(_PATCH, 2),
    ("patch_size", "spatial_patch_size"): length(_PATCH, 4),
}
_QWEN2_FIELDS: Fields = {
    **_SHARED,
    ("embed_dim",): length(_PATCH, 0),
    ("hidden_size",): length("merger.mlp.2.weight", 0),
    ("mlp_ratio",): lambda shapes: shapes["blocks.0.mlp.fc1.weight"][0] / shapes[_PATCH][0],
}
_QWEN2_5_FIELDS: Fields = {
    **_SHARED,
    ("hidden_size",): length(_PATCH, 0),
    ("intermediate_size",): length("blocks.0.mlp.gate_proj.weight", 0),
    ("out_hidden_size",): length("merger.mlp.2.weight", 0),
}
_QWEN3_FIELDS: Fields = {
    **_SHARED,
    ("hidden_size",): length(_PATCH, 0),
    ("intermediate_size",): length("blocks.0.mlp.linear_fc1.weight", 0),
    ("out_hidden_size",): length("merger.linear_fc2.weight", 0),
    ("num_position_embeddings",): length("pos_embed.weight", 0),
    ("deepstack_visual_indexes",): _no_deepstack,
}

_TIMM_SIZES = {  # size in timm's model name -> width, depth, heads, ratio of MLP width to width
    "88m": (768, 12, 12, 4.0),
    "306m": (1024, 24, 16, 4.0),
    "416m": (1152, 27, 16, 4304 / 1152),
}


def _timm_section(size: str, arguments: JsonObject) -> JsonDict:
    """Return the tower's config from ``arguments``, the ``model_args`` of a timm config.

    Sizes that they leave out are those of timm's model of this ``size``, such as "88m".
    """
    width, depth, heads, ratio = _TIMM_SIZES[size]
    width = read_size(arguments, "embed_dim", default=width)
    return {
        "hidden_size": width,
        "depth": arguments.get("depth", depth),
        "num_heads": arguments.get("num_heads", heads),
        "intermediate_size": int(width * read_ratio(arguments, "mlp_ratio", default=ratio)),
        "out_hidden_size": arguments.get("out_features"),
        "patch_size": 16,
        "temporal_patch_size": 1,
        "deepstack_visual_indexes": [],
    }


_TIMM = {
    f"qwen3_vit_{size}{kind}": lambda arguments, size=size: _timm_section(size, arguments)
    for size in _TIMM_SIZES
    for kind in ("_enc", "_merge")
}


def _class(module: str, name: str, *, auto: bool = True) -> TransformersClass:
    return TransformersClass(module, name, f"{module}_vision", auto)


QWEN2_VL = Family(
    name="qwen2_vl",
    encoder=Qwen2VLEncoder,
    config=Qwen2VLConfig,
    model_types=(*with_vision("qwen2_vl"), "colqwen2"),
    signs=(("blocks.0.mlp.fc1.weight", "merger.ln_q.weight"),),
    layouts=(_QWEN2,),
    classes={"qwen": _class("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", auto=False)},
    fields=_QWEN2_FIELDS,
)
QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    encoder=Qwen2_5VLEncoder,
    config=Qwen2_5VLConfig,
    model_types=(
        *with_vision("qwen2_5_vl", "exaone4_5"),
        *("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen2_5_omni_vision_encoder"),
    ),
    signs=(("blocks.0.mlp.gate_proj.weight", "merger.ln_q.weight"),),
    layouts=(_OMNI_2_5, _QWEN2),
    classes={
        "qwen": _class("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
        "qwen2.5-omni": TransformersClass(
            "qwen2_5_omni", "Qwen2_5OmniVisionEncoder", "qwen2_5_omni_vision_encoder", auto=False
        ),
        "exaone4_5": _class("exaone4_5", "Exaone4_5_VisionModel"),
    },
    fields=_QWEN2_5_FIELDS,
)
QWEN3_VL = Family(
    name="qwen3_vl",
    encoder=Qwen3VLEncoder,
    config=Qwen3VLConfig,
    model_types=(
        *with_vision("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
        *with_vision("cohere_compass", "intern_s2_preview", "interns2_preview", "interns2_mobius"),
        *("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_vision_encoder"),
        "cosmos3_omni",
    ),
    signs=(("blocks.0.mlp.linear_fc1.weight", "pos_embed.weight"),),
    layouts=(_COSMOS3, _TIMM_LAYOUT, _OMNI_3, _QWEN3),
    classes={
        "qwen": _class("qwen3_vl", "Qwen3VLVisionModel"),
        "cosmos3": _class("qwen3_vl", "Qwen3VLVisionModel"),
        "qwen3-omni": TransformersClass(
            "qwen3_omni_moe",
            "Qwen3OmniMoeVisionEncoder",
            "qwen3_omni_moe_vision_encoder",
            auto=False,
        ),
        "qwen3_vl_moe": _class("qwen3_vl_moe", "Qwen3VLMoeVisionModel"),
        "qwen3_5": _class("qwen3_5", "Qwen3_5VisionModel"),
        "qwen3_5_moe": _class("qwen3_5_moe", "Qwen3_5MoeVisionModel"),
        "qwen4_exp": _class("qwen4_exp", "Qwen4ExpVisionModel"),
        "cohere_compass": _class("cohere_compass", "CohereCompassVisionModel"),
    },
    fields=_QWEN3_FIELDS,
    timm=_TIMM,
    refusals=dict.fromkeys(
        ("bailing_moe_v3_vl", "qwen3_moe_vit"),
        "its merger has only a norm, and a projector of other names follows outside the tower",
    ),
)
