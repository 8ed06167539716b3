"""The tensor names in DINOv2 and DINOv3 towers of transformers, timm and Meta's own code.

Source of the names: ``Dinov2Model``, ``Dinov2WithRegistersModel`` and ``DINOv3ViTModel`` of
transformers 5.24.0, timm 1.0.31, and facebookresearch/dinov2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt

from encoders import Dinov2Config, Dinov2Encoder, Dinov3Config, Dinov3Encoder
from encoders.hf_config import read_size

from ..layouts import Layout, Prefix
from ..published import family_facts
from ..strict_json import JsonDict, JsonObject
from .clip import timm_processor
from .family import Family, Fields, Shapes, TransformersClass, block_count, length

_BLOCK = "encoder.layer.N"
_HF = Layout(  # facebook/dinov2-*, facebook/dinov2-with-registers-*
    name="dinov2",
    prefixes=(Prefix("", ""), Prefix("", "dinov2."), Prefix("", "dinov2_with_registers.")),
    marks=("embeddings.cls_token", "encoder.layer."),
    joins={
        "blocks.N.attn.qkv": tuple(
            f"{_BLOCK}.attention.attention.{part}" for part in ("query", "key", "value")
        )
    },
    renames={
        "embeddings.cls_token": "cls_token",
        "embeddings.mask_token": "mask_token",
        "embeddings.register_tokens": "register_tokens",
        "embeddings.position_embeddings": "pos_embed.weight",
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        f"{_BLOCK}.norm1": "blocks.N.norm1",
        f"{_BLOCK}.attention.output.dense": "blocks.N.attn.proj",
        f"{_BLOCK}.layer_scale1.lambda1": "blocks.N.ls1",
        f"{_BLOCK}.norm2": "blocks.N.norm2",
        f"{_BLOCK}.mlp": "blocks.N.mlp",
        f"{_BLOCK}.layer_scale2.lambda1": "blocks.N.ls2",
        "layernorm": "norm",
    },
    reshapes={"pos_embed.weight": "n d -> one n d"},
    processor_files=family_facts("dinov2").processors["dinov2"],
)
_HF_GATED = replace(  # the giant sizes
    _HF,
    name="dinov2-gated",
    marks=("encoder.layer.0.mlp.weights_in.",),
    renames={
        **{name: ours for name, ours in _HF.renames.items() if name != f"{_BLOCK}.mlp"},
        f"{_BLOCK}.mlp.weights_in": "blocks.N.mlp.fc1",
        f"{_BLOCK}.mlp.weights_out": "blocks.N.mlp.fc2",
    },
)
_TIMM = Layout(  # timm/vit_*_patch14_dinov2.lvd142m, timm/vit_*_patch14_reg4_dinov2.lvd142m
    name="timm",
    prefixes=(Prefix("", ""),),
    marks=("cls_token", "blocks."),
    renames={
        "reg_token": "register_tokens",
        "pos_embed": "pos_embed.weight",
        "blocks.N.ls1.gamma": "blocks.N.ls1",
        "blocks.N.ls2.gamma": "blocks.N.ls2",
    },
    reshapes=_HF.reshapes,
)
_META = replace(  # dinov2_vit*14_*pretrain.pth of facebookresearch/dinov2, as safetensors
    _TIMM,
    name="meta",
    marks=("mask_token",),
    renames={name: ours for name, ours in _TIMM.renames.items() if name != "reg_token"},
)
_META_GATED = replace(
    _META,
    name="meta-gated",
    marks=("blocks.0.mlp.w12.",),
    renames={
        **_META.renames,
        "blocks.N.mlp.w12": "blocks.N.mlp.fc1",
        "blocks.N.mlp.w3": "blocks.N.mlp.fc2",
    },
)

_TABLE, _PATCH = "pos_embed.weight", "patch_embed.proj.weight"


def _has_class_position(shapes: Shapes) -> bool:
    """Return whether the table of positions has one entry more than a square number."""
    return isqrt(shapes[_TABLE][0]) ** 2 != shapes[_TABLE][0]


def _is_gated(shapes: Shapes) -> bool:
    """Return whether the first layer of an MLP has twice the rows that the second reads."""
    inner, read = shapes["blocks.0.mlp.fc1.weight"][0], shapes["blocks.0.mlp.fc2.weight"][1]
    return inner == 2 * read


_CONFIG_FIELDS: Fields = {  # the number of heads cannot be inferred from shapes
    ("hidden_size",): length(_PATCH, 0),
    ("num_hidden_layers",): block_count("blocks."),
    ("patch_size",): length(_PATCH, 3),
    ("image_size",): lambda shapes: isqrt(shapes[_TABLE][0]) * shapes[_PATCH][3],
    ("num_register_tokens",): lambda shapes: shapes.get("register_tokens", (1, 0, 0))[1],
    ("use_swiglu_ffn",): _is_gated,
    ("use_mask_token",): lambda shapes: "mask_token" in shapes,
    ("class_position",): _has_class_position,
}
_SIZES = {"small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
"""Width, number of blocks and of heads of each size in timm, the giant's aside."""


def _timm_section(size: str, registers: int) -> Callable[[JsonObject], JsonDict]:
    """Return the function that makes the config of a size of timm from its ``model_args``."""
    width, depth, heads = _SIZES.get(size, (1536, 40, 24))

    def read(arguments: JsonObject) -> JsonDict:
        return {
            "hidden_size": arguments.get("embed_dim", width),
            "num_hidden_layers": arguments.get("depth", depth),
            "num_attention_heads": arguments.get("num_heads", heads),
            "image_size": arguments.get("img_size", 518),
            "patch_size": 14,
            "num_register_tokens": registers,
            "use_swiglu_ffn": size == "giant",
            "use_mask_token": False,
            "class_position": not registers,
        }

    return read


DINOV2 = Family(
    name="dinov2",
    encoder=Dinov2Encoder,
    config=Dinov2Config,
    model_types=("dinov2", "dinov2_with_registers"),
    signs=(
        ("encoder.layer.0.layer_scale1.lambda1", "embeddings.position_embeddings"),
        ("blocks.0.ls1.gamma", "mask_token"),
    ),
    # marks of _TIMM match all tensors of _META, and those of _HF and _META the gated ones
    layouts=(_HF_GATED, _HF, _META_GATED, _META, _TIMM),
    classes={
        **dict.fromkeys(
            ("dinov2", "dinov2-gated"), TransformersClass("dinov2", "Dinov2Model", "dinov2")
        ),
        "dinov2_with_registers": TransformersClass(
            "dinov2_with_registers", "Dinov2WithRegistersModel", "dinov2_with_registers"
        ),
    },
    fields=_CONFIG_FIELDS,
    timm={
        f"vit_{size}_patch14_{kind}": _timm_section(size, registers)
        for kind, registers in (("dinov2", 0), ("reg4_dinov2", 4))
        for size in (*_SIZES, "giant")
    },
    processor_of=timm_processor,
)

_V3_BLOCK = "layer.N"
_V3_HF = Layout(  # facebook/dinov3-vit*-pretrain-*
    name="dinov3",
    prefixes=(Prefix("", ""), Prefix("", "dinov3_vit.")),
    marks=("embeddings.cls_token", "layer."),
    joins={
        "blocks.N.attn.qkv.weight": tuple(
            f"{_V3_BLOCK}.attention.{part}_proj.weight" for part in "qkv"
        )
    },
    renames={
        "embeddings.cls_token": "cls_token",
        "embeddings.mask_token": "mask_token",
        "embeddings.register_tokens": "register_tokens",
        "embeddings.patch_embeddings": "patch_embed.proj",
        f"{_V3_BLOCK}.norm1": "blocks.N.norm1",
        f"{_V3_BLOCK}.attention.q_proj.bias": "blocks.N.attn.qkv.q_bias",
        f"{_V3_BLOCK}.attention.v_proj.bias": "blocks.N.attn.qkv.v_bias",
        f"{_V3_BLOCK}.attention.o_proj": "blocks.N.attn.proj",
        f"{_V3_BLOCK}.layer_scale1.lambda1": "blocks.N.ls1",
        f"{_V3_BLOCK}.norm2": "blocks.N.norm2",
        f"{_V3_BLOCK}.mlp.up_proj": "blocks.N.mlp.fc1",
        f"{_V3_BLOCK}.mlp.down_proj": "blocks.N.mlp.fc2",
        f"{_V3_BLOCK}.layer_scale2.lambda1": "blocks.N.ls2",
    },
    processor_files=family_facts("dinov3").processors["dinov3"],
)
_V3_HF_GATED = replace(  # S+, H+, 7B
    _V3_HF,
    name="dinov3-gated",
    marks=("layer.0.mlp.gate_proj.",),
    joins={
        **_V3_HF.joins,
        "blocks.N.mlp.fc1": (f"{_V3_BLOCK}.mlp.gate_proj", f"{_V3_BLOCK}.mlp.up_proj"),
    },
    renames={
        name: ours for name, ours in _V3_HF.renames.items() if name != f"{_V3_BLOCK}.mlp.up_proj"
    },
)
_V3_TIMM = Layout(  # timm/vit_*_patch16_dinov3*, with or without _qkvb
    name="timm",
    prefixes=(Prefix("", ""),),
    marks=("cls_token", "blocks."),
    renames={
        "reg_token": "register_tokens",
        "blocks.N.gamma_1": "blocks.N.ls1",
        "blocks.N.gamma_2": "blocks.N.ls2",
        "blocks.N.attn.q_bias": "blocks.N.attn.qkv.q_bias",
        "blocks.N.attn.v_bias": "blocks.N.attn.qkv.v_bias",
    },
)
_V3_TIMM_GATED = replace(
    _V3_TIMM,
    name="timm-gated",
    marks=("blocks.0.mlp.fc1_g.",),
    joins={"blocks.N.mlp.fc1": ("blocks.N.mlp.fc1_g", "blocks.N.mlp.fc1_x")},
)

_V3_BIAS = "blocks.0.attn.qkv.q_bias"
_V3_FIELDS: Fields = {  # the number of heads cannot be inferred from shapes
    ("hidden_size",): length(_PATCH, 0),
    ("intermediate_size",): length("blocks.0.mlp.fc2.weight", 1),
    ("num_hidden_layers",): block_count("blocks."),
    ("patch_size",): length(_PATCH, 3),
    ("num_register_tokens",): _CONFIG_FIELDS[("num_register_tokens",)],
    ("use_gated_mlp",): _is_gated,
    ("query_bias",): lambda shapes: _V3_BIAS in shapes,
    ("value_bias",): lambda shapes: _V3_BIAS in shapes,
    ("use_mask_token",): _CONFIG_FIELDS[("use_mask_token",)],
}
_V3_SIZES = {
    "small": (384, 1536, 12, 6),
    "small_plus": (384, 1536, 12, 6),
    "base": (768, 3072, 12, 12),
    "large": (1024, 4096, 24, 16),
    "huge_plus": (1280, 5120, 32, 20),
    "7b": (4096, 8192, 40, 32),
}
"""Width, inner width of MLPs, and number of blocks and of heads of each size in timm."""


def _v3_timm_section(size: str, bias: bool) -> Callable[[JsonObject], JsonDict]:
    """Return the function that makes the config of a size of timm from its ``model_args``."""
    width, inner, depth, heads = _V3_SIZES[size]
    gated = size in ("small_plus", "huge_plus", "7b")

    def read(arguments: JsonObject) -> JsonDict:
        own = read_size(arguments, "embed_dim", default=width)
        return {
            "hidden_size": own,
            "intermediate_size": inner // width * own,
            "num_hidden_layers": arguments.get("depth", depth),
            "num_attention_heads": arguments.get("num_heads", heads),
            "num_register_tokens": 4,
            "use_gated_mlp": gated,
            "hidden_act": "silu" if gated else "gelu",
            "query_bias": bias,
            "value_bias": bias,
            "use_mask_token": False,
        }

    return read


DINOV3 = Family(
    name="dinov3",
    encoder=Dinov3Encoder,
    config=Dinov3Config,
    model_types=("dinov3_vit",),
    signs=(
        ("layer.0.layer_scale1.lambda1", "embeddings.patch_embeddings.weight"),
        ("blocks.0.gamma_1", "reg_token"),
    ),
    # marks of _V3_HF and _V3_TIMM match the tensors of the gated ones, too
    layouts=(_V3_HF_GATED, _V3_HF, _V3_TIMM_GATED, _V3_TIMM),
    classes=dict.fromkeys(
        ("dinov3", "dinov3-gated"), TransformersClass("dinov3_vit", "DINOv3ViTModel", "dinov3_vit")
    ),
    fields=_V3_FIELDS,
    refusals={"dinov3_convnext": "it is a ConvNeXt, not a vision transformer"},
    timm={
        f"vit_{size}_patch16_dinov3{suffix}": _v3_timm_section(size, bool(suffix))
        for suffix in ("", "_qkvb")
        for size in _V3_SIZES
    },
    processor_of=timm_processor,
)
