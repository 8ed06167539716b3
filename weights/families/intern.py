"""The tensor names in InternViT towers of OpenGVLab, transformers, timm and Baidu."""

from __future__ import annotations

from dataclasses import replace

from encoders import InternViT, InternViTConfig
from encoders.hf_config import read_size

from ..layouts import Layout, Prefix
from ..published import family_facts
from ..strict_json import JsonDict, JsonObject
from .family import (
    Family,
    Fields,
    Shapes,
    TransformersClass,
    block_count,
    length,
    square,
    with_vision,
)

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
_HF_ATTENTION = "encoder.layer.N.attention"
_INTERNVL = Layout(  # original code: OpenGVLab/InternVL* and, unprefixed, OpenGVLab/InternViT-*
    name="internvl",
    prefixes=(Prefix("", "vision_model."), Prefix("", "")),
    marks=("embeddings.class_embedding", "encoder.layers."),
    projector=("mlp1.",),
    renames={"encoder.layers.N": "layers.N"},
    processor_files=family_facts("intern_vit").processors["internvl"],
)
_HF = Layout(  # transformers: OpenGVLab/InternVL3-*-hf, OpenGVLab/InternVL3_5-*-HF
    name="internvl-hf",
    prefixes=(Prefix("model.", "vision_tower."), Prefix("", "vision_tower."), Prefix("", "")),
    marks=("embeddings.cls_token", "encoder.layer."),
    projector=("multi_modal_projector.",),
    joins={"layers.N.attn.qkv": tuple(f"{_HF_ATTENTION}.{part}_proj" for part in "qkv")},
    renames={
        **_HF_RENAMES,
        f"{_HF_ATTENTION}.projection_layer": "layers.N.attn.proj",
        f"{_HF_ATTENTION}.q_norm": "layers.N.attn.q_norm",
        f"{_HF_ATTENTION}.k_norm": "layers.N.attn.k_norm",
        "encoder.layer.N.mlp": "layers.N.mlp",
    },
    processor_files=family_facts("intern_vit").processors["internvl-hf"],
)
_QKV = tuple(f"{_HF_ATTENTION}.attention.{part}" for part in ("query", "key", "value"))
_HF_EARLY = replace(  # named as transformers' ViT: attention.attention.query
    _HF,
    name="internvl-hf-early",
    marks=("encoder.layer.0.attention.attention.",),
    joins={"layers.N.attn.qkv": _QKV},
    renames={
        **_HF_RENAMES,
        f"{_HF_ATTENTION}.output.dense": "layers.N.attn.proj",
        "encoder.layer.N.intermediate.dense": "layers.N.mlp.fc1",
        "encoder.layer.N.output.dense": "layers.N.mlp.fc2",
    },
)
_QIANFAN = replace(  # the names of the modules of transformers 5.24, as ``state_dict`` has them
    _HF,
    name="qianfan-transformers",
    marks=("layers.0.attention.q_proj.",),
    joins={
        module: tuple(name.replace("encoder.layer.", "layers.") for name in parts)
        for module, parts in _HF.joins.items()
    },
    renames={
        name.replace("encoder.layer.", "layers."): encoder_name
        for name, encoder_name in _HF.renames.items()
    },
)
_TIMM = Layout(  # timm/vit_intern300m_patch14_448.*
    name="timm",
    prefixes=(Prefix("", ""),),
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
)

_POSITIONS, _PATCH = "embeddings.position_embedding", "embeddings.patch_embedding.weight"
_CONFIG_FIELDS: Fields = {
    ("hidden_size",): length("embeddings.class_embedding", -1),
    ("patch_size",): length(_PATCH, -1),
    ("image_size",): square(_POSITIONS, 1, _PATCH, extra=1),
    ("intermediate_size",): length("layers.0.mlp.fc1.weight", 0),
    ("num_hidden_layers",): block_count("layers."),
    ("qkv_bias", "attention_bias"): lambda shapes: "layers.0.attn.qkv.bias" in shapes,
    ("qk_normalization", "use_qk_norm"): lambda shapes: "layers.0.attn.q_norm.weight" in shapes,
    ("norm_type",): lambda shapes: "layer_norm" if "layers.0.norm1.bias" in shapes else "rms_norm",
}
# Width of the projector's output; without a projector a dummy 1, which ``_parse_config`` drops.
_OUTER_FIELDS: Fields = {
    ("llm_config.hidden_size", "text_config.hidden_size"): (
        lambda shapes: shapes.get("mlp1.3.weight", (1,))[0]
    )
}


def _parse_config(config: JsonObject, shapes: Shapes) -> InternViTConfig:
    """Return the encoder's config, with a projector exactly if the checkpoint has its tensors.

    The projector's output width may be missing in ``config``; ``shapes`` then determine it.
    """
    built = InternViTConfig.from_hf(config)
    projected = any(name.startswith("mlp1.") for name in shapes)
    width = built.out_hidden_size or (shapes.get("mlp1.3.weight") or (None,))[0]
    return replace(built, out_hidden_size=width if projected else None)


def _timm_section(arguments: JsonObject) -> JsonDict:
    width = read_size(arguments, "embed_dim", default=1024)
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": arguments.get("depth", 24),
        "num_attention_heads": arguments.get("num_heads", 16),
        "image_size": arguments.get("img_size", 448),
        "patch_size": 14,
        "norm_type": "layer_norm",
        "qkv_bias": True,
        "qk_normalization": False,
    }


INTERN_VIT = Family(
    name="intern_vit",
    encoder=InternViT,
    config=InternViTConfig,
    model_types=(
        *("intern_vit_6b", "internvl_chat"),
        *with_vision("internvl", "interns1", "qianfan_ocr"),
    ),
    signs=(
        ("encoder.layers.0.ls1", "embeddings.class_embedding"),
        ("encoder.layer.0.lambda_1", "embeddings.cls_token"),
    ),
    # _HF's marks match the tensors of _HF_EARLY and _QIANFAN, too
    layouts=(_INTERNVL, _HF_EARLY, _QIANFAN, _HF, _TIMM),
    classes={
        "internvl-hf": TransformersClass("internvl", "InternVLVisionModel", "internvl_vision"),
        "qianfan-transformers": TransformersClass(
            "qianfan_ocr", "QianfanOCRVisionModel", "qianfan_ocr_vision"
        ),
    },
    fields=_CONFIG_FIELDS,
    outer_fields=_OUTER_FIELDS,
    refusals={
        "NVLM_D": "its projector has no biases and takes its inner width from the language model, "
        "which is not implemented",
        "h2ovl_chat": "its images are cut into tiles twice, by a rule of its own (MSAC), which is "
        "not implemented",
    },
    timm={"vit_intern300m_patch14_448": _timm_section},
    parse_config=_parse_config,
)
