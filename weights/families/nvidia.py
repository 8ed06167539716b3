"""C-RADIO as NVIDIA, transformers and timm publish it, in Nemotron, and Cosmos3-Edge's tower.

Source of the names: ``RadioModel``, ``NemotronH_Omni_Reasoning_V3`` and ``Cosmos3EdgeModel`` of
transformers 5.23.0 with the names that they read, ``NemotronH_Nano_VL_V2`` of vLLM 0.32.0, and
``VisionTransformer`` and ``NaFlexVit`` of timm 1.0.31.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt

from encoders import (
    Cosmos3EdgeConfig,
    Cosmos3EdgeEncoder,
    CRadioConfig,
    CRadioEncoder,
    NemotronConfig,
    NemotronEncoder,
)

from ..layouts import Layout, Prefix
from ..published import family_facts
from ..strict_json import JsonDict, JsonObject
from .clip import timm_processor
from .family import Family, Fields, Shapes, TransformersClass, block_count, length, with_vision
from .siglip import QKV, siglip_names

_ROOT, _PATCHES = "radio_model.model", "radio_model.model.patch_generator"
_UNSCALED = Layout(  # nvidia/C-RADIOv3-{H,g}, nvidia/C-RADIOv4-*
    name="c_radio",
    prefixes=(Prefix("", ""),),
    marks=(f"{_PATCHES}.",),
    renames={
        f"{_PATCHES}.cls_token.token": "tokens",
        f"{_PATCHES}.pos_embed": "pos_embed.weight",
        f"{_PATCHES}.embedder": "patch_embed",
        f"{_ROOT}.blocks.N": "blocks.N",
    },
    reshapes={"pos_embed.weight": "n d -> one n d"},
    ignored=(
        "radio_model.input_conditioner",  # constants, which the config states
        "radio_model.summary_idxs",
        *("input_conditioner", "summary_idxs"),  # so named if RadioModel read them from its config
        f"{_ROOT}.reg_token",
        f"{_PATCHES}.video_embedder",  # of Nemotron's videos
    ),
    processor_files=family_facts("c_radio").processors["c_radio"],
)
_SCALED = replace(  # nvidia/C-RADIOv3-{B,L}
    _UNSCALED,
    name="c_radio-scaled",
    marks=(f"{_ROOT}.blocks.0.ls1.",),
    renames={
        f"{_ROOT}.blocks.N.ls1.grandma": "blocks.N.ls1",
        f"{_ROOT}.blocks.N.ls2.grandma": "blocks.N.ls2",
        **_UNSCALED.renames,
    },
)
_SAVED = replace(  # as transformers saves it
    _UNSCALED,
    name="c_radio-saved",
    marks=(f"{_ROOT}.blocks.0.layer_scale1.",),
    renames={
        f"{_ROOT}.blocks.N.layer_scale1.lambda1": "blocks.N.ls1",
        f"{_ROOT}.blocks.N.layer_scale2.lambda1": "blocks.N.ls2",
        **_UNSCALED.renames,
    },
)
_LAYER = "encoder.layer.N"
_HF = replace(  # as transformers saves it with save_original_format=False
    _UNSCALED,
    name="radio",
    marks=("embeddings.patch_projection.",),
    joins={"blocks.N.attn.qkv": tuple(f"{_LAYER}.attention.{part}_proj" for part in "qkv")},
    renames={
        "embeddings.position_embedding": "pos_embed.weight",
        "embeddings.cls_register_token": "tokens",
        "embeddings.patch_projection": "patch_embed",
        f"{_LAYER}.attention.o_proj": "blocks.N.attn.proj",
        f"{_LAYER}.layer_scale1.lambda1": "blocks.N.ls1",
        f"{_LAYER}.layer_scale2.lambda1": "blocks.N.ls2",
        _LAYER: "blocks.N",
    },
    ignored=("input_conditioner", "summary_idxs", "embeddings.video_patch_projection"),
)
_TIMM = Layout(  # timm/vit_*_patch16_radio_v*.c_radio
    name="timm",
    prefixes=(Prefix("", ""),),
    marks=("cls_token", "blocks."),
    renames={
        "cls_token": "tokens",
        "reg_token": "other_tokens",
        "pos_embed": "pos_embed.weight",
        "blocks.N.ls1.gamma": "blocks.N.ls1",
        "blocks.N.ls2.gamma": "blocks.N.ls2",
    },
    reshapes=dict.fromkeys(("tokens", "other_tokens", "pos_embed.weight"), "n d -> one n d"),
)
_NAFLEX = replace(  # timm/naflexvit_*_patch16_radio_v*.c_radio
    _TIMM,
    name="timm-naflex",
    marks=("embeds.",),
    renames={
        "embeds.cls_token": "tokens",
        "embeds.reg_token": "other_tokens",
        "embeds.pos_embed": "pos_embed.weight",
        "embeds.proj": "patch_embed",
        **dict(item for item in _TIMM.renames.items() if "blocks" in item[0]),
    },
    reshapes={**_TIMM.reshapes, "pos_embed.weight": "s² d -> one s s d"},
)


def _patch_size(shapes: Shapes) -> int:
    """Return the side of a patch of three channels."""
    kernel = shapes.get("patch_embed.proj.weight")
    return kernel[3] if kernel else isqrt(shapes["patch_embed.weight"][1] // 3)


def _video_frames(shapes: Shapes) -> int:
    """Return the number of frames that Nemotron embeds together: 1 without a weight for them."""
    video = shapes.get("video_embed.weight")
    return video[1] // shapes["patch_embed.weight"][1] if video else 1


_FIELDS: Fields = {  # the numbers of heads and class tokens cannot be inferred from shapes
    ("hidden_size",): length("blocks.0.mlp.fc2.weight", 0),
    ("mlp_ratio",): lambda shapes: (
        shapes["blocks.0.mlp.fc1.weight"][0] / shapes["blocks.0.mlp.fc2.weight"][0]
    ),
    ("num_hidden_layers",): block_count("blocks."),
    ("patch_size",): _patch_size,
    ("max_img_size",): lambda shapes: isqrt(shapes["pos_embed.weight"][0]) * _patch_size(shapes),
    ("layer_scale",): lambda shapes: "blocks.0.ls1" in shapes,
}
_WIDTHS = ("embed_dim", "depth", "num_heads")
_TEACHERS = {
    "v3": (["clip", "siglip2", "dino_v2", "sam"], 8),
    "v4": (["siglip2-g", "dino_v3_7b", "sam3"], 10),
}
"""The teachers of each version, of which the last has no part in the summary, and the number of
rows before the patches."""


def _timm_section(size: str, version: str, naflex: bool) -> Callable[[JsonObject], JsonDict]:
    """Return the function that makes the config of a size of timm from its ``model_args``."""
    (*summarised, last), rows = _TEACHERS[version]
    letter = size if size == "so400m" else "g" if size == "giant" else size[0]
    scaled = version == "v3" and size in ("base", "large")

    def read(arguments: JsonObject) -> JsonDict:
        own = {name: value for name, value in arguments.items() if name in _WIDTHS}
        return {
            "version": f"c-radio_{version}-{letter}",
            "args": {
                "model": f"vit_{size}_patch16_{'v2_' if scaled else ''}224",
                "model_kwargs": own,
                "cls_token_per_teacher": True,
                "teachers": [
                    *({"name": name} for name in summarised),
                    {"name": last, "use_summary": False},
                ],
                "cpe_num_registers": rows - len(summarised) - 1,
            },
            "max_img_size": 2048 if naflex else arguments.get("img_size", 512),
            "tokens_apart": True,
            "patch_bias": True,
            "patch_weight": "channels_last" if naflex else "kernel",
        }

    return read


def _fields_of_class(section: JsonObject) -> JsonDict:
    """Return the fields that ``RadioConfig`` of transformers needs, of a config of NVIDIA."""
    config = CRadioConfig.from_hf(section)
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
        "patch_size": config.patch_size,
        "max_img_size": config.position_side * config.patch_size,
        "num_cls_tokens": config.class_tokens,
        "num_registers": config.registers,
        "summary_idxs": [*config.summary],
    }


_CLASS = TransformersClass(
    "radio",
    "RadioModel",
    "radio",
    make_fields=_fields_of_class,
    # it has no other positions
    reads=lambda section: not CRadioConfig.from_hf(section).align_corners,
)
C_RADIO = Family(
    name="c_radio",
    encoder=CRadioEncoder,
    config=CRadioConfig,
    model_types=("radio",),
    signs=(
        ("patch_generator.embedder.weight", "patch_generator.pos_embed"),
        ("embeddings.patch_projection.weight", "embeddings.cls_register_token"),
    ),
    layouts=(_SCALED, _SAVED, _UNSCALED, _HF, _NAFLEX, _TIMM),
    classes=dict.fromkeys(("c_radio", "c_radio-saved", "radio"), _CLASS),
    fields=_FIELDS,
    timm={
        f"{kind}_{size}_patch16_radio_{version}": _timm_section(size, version, kind != "vit")
        for kind in ("vit", "naflexvit")
        for version, sizes in (
            ("v3", ("base", "large", "huge", "giant")),
            ("v4", ("so400m", "huge")),
        )
        for size in sizes
    },
    processor_of=timm_processor,
    without=("mlp1.1.weight", "multi_modal_projector.linear_1.weight"),
)

_VIDEO = f"{_PATCHES}.video_embedder"
_PROJECTOR = {
    "mlp1.0": "projector.norm",
    "mlp1.1": "projector.linear_1",
    "mlp1.3": "projector.linear_2",
}
_OMNI = replace(  # as published
    _UNSCALED,
    name="nemotron",
    prefixes=(Prefix("", "vision_model."), Prefix("", "")),
    projector=("mlp1.", "vision_projector."),
    renames={
        **_PROJECTOR,
        "vision_projector.vision_final_layernorm": "projector.patch_norm",
        _VIDEO: "video_embed",
        **_UNSCALED.renames,
    },
    ignored=tuple(name for name in _UNSCALED.ignored if name != _VIDEO),
    processor_files=family_facts("nemotron").processors["nemotron"],
)
_OMNI_SAVED = replace(  # as transformers saves it
    _OMNI,
    name="nemotron-saved",
    marks=_SAVED.marks,
    projector=("mlp1.", "vision_final_layernorm."),
    renames={
        **_PROJECTOR,
        "vision_final_layernorm": "projector.patch_norm",
        _VIDEO: "video_embed",
        **_SAVED.renames,
    },
)
_OMNI_HF = replace(  # as transformers saves it with save_original_format=False
    _HF,
    name="nemotron-hf",
    prefixes=_OMNI.prefixes,
    projector=("multi_modal_projector.", "vision_final_layernorm."),
    renames={
        "vision_final_layernorm": "projector.patch_norm",
        "multi_modal_projector.layer_norm": "projector.norm",
        "multi_modal_projector": "projector",
        "embeddings.video_patch_projection": "video_embed",
        **_HF.renames,
    },
    ignored=_HF.ignored[:2],
    processor_files=_OMNI.processor_files,
)


def _joined(section: JsonObject) -> object:
    """Return the number of frames embedded together, as RadioConfig has it: null for one."""
    frames = section.get("video_temporal_patch_size")
    return None if frames == 1 else frames


_OMNI_CLASS = replace(
    _CLASS,
    make_fields=lambda section: {
        **_fields_of_class({**section, "version": "c-radio_v4-h"}),
        "video_temporal_patch_size": _joined(section),
    },
    reads=lambda section: True,
)
NEMOTRON = Family(
    name="nemotron",
    encoder=NemotronEncoder,
    config=NemotronConfig,
    model_types=(
        *("radio", "nemotron_h_omni", "NemotronH_Nano_VL_V2"),
        *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3"),
    ),
    signs=(
        ("mlp1.1.weight", "patch_generator.pos_embed"),
        ("multi_modal_projector.linear_1.weight", "embeddings.cls_register_token"),
    ),
    layouts=(_OMNI_SAVED, _OMNI, _OMNI_HF),
    classes=dict.fromkeys(("nemotron", "nemotron-saved", "nemotron-hf"), _OMNI_CLASS),
    fields={**_FIELDS, ("video_temporal_patch_size",): _video_frames},
    outer_fields={
        ("llm_config.hidden_size", "text_config.hidden_size"): length(
            "projector.linear_2.weight", 0
        ),
        ("projector_hidden_size",): length("projector.linear_1.weight", 0),
        ("final_norm_weights",): lambda shapes: "projector.patch_norm.weight" in shapes,
    },
    refusals={
        "Llama_Nemotron_Nano_VL": "its tower is C-RADIO v2, which it computes by code of its repo",
    },
)

_EDGE_LAYER = "encoder.layers.N"
_EDGE = Layout(
    name="cosmos3-edge",
    prefixes=(Prefix("model.", "visual."), Prefix("", "")),
    marks=("encoder.layers.0.self_attn.q_proj.",),
    projector=("projector.",),
    joins={"blocks.N.attn.qkv": QKV},
    renames={**siglip_names("", "patch_embed"), "projector": "merger"},
    processor_files=family_facts("cosmos3_edge").processors["cosmos3-edge"],
)
_EDGE_SAVED = replace(  # as transformers saves it, with names of the language model's layers
    _EDGE,
    name="cosmos3-edge-saved",
    marks=("encoder.layers.0.self_attn.to_q.",),
    joins={"blocks.N.attn.qkv": tuple(f"{_EDGE_LAYER}.self_attn.to_{part}" for part in "qkv")},
    renames={
        f"{_EDGE_LAYER}.mlp.up_proj": "blocks.N.mlp.fc1",
        f"{_EDGE_LAYER}.mlp.down_proj": "blocks.N.mlp.fc2",
        **dict(item for item in _EDGE.renames.items() if not item[0].endswith(".mlp")),
    },
)
COSMOS3_EDGE = Family(
    name="cosmos3_edge",
    encoder=Cosmos3EdgeEncoder,
    config=Cosmos3EdgeConfig,
    model_types=with_vision("cosmos3_edge"),
    signs=(("projector.linear_fc1.weight", "post_layernorm.weight"),),
    layouts=(_EDGE, _EDGE_SAVED),
    classes={
        "cosmos3-edge": TransformersClass(
            "cosmos3_edge", "Cosmos3EdgeVisionModel", "cosmos3_edge_vision"
        )
    },
    fields={  # the number of heads cannot be inferred from shapes
        ("hidden_size",): length("patch_embed.weight", 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("num_patches",): length("pos_embed", 0),
    },
    outer_fields={
        ("text_config.hidden_size",): length("merger.linear_fc2.weight", 0),
        ("projector_hidden_size",): length("merger.linear_fc1.weight", 0),
    },
)
