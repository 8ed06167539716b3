"""The towers of ERNIE-4.5-VL and PaddleOCR-VL, as Baidu publishes and transformers saves them.

Sources for ERNIE: ``Ernie4_5_VLMoeForConditionalGeneration`` of transformers 5.23.0 and its
conversion of names; ``ernie45_vl.py`` of vLLM 0.33.0 and the bridge of NVIDIA-NeMo/Megatron-Bridge
(pull request 3263), which read Baidu's names and configs; the configs as ``ernie4_5_moe_vl`` of
mlx-vlm has them.
Source for PaddleOCR-VL: ``PaddleOCRVLForConditionalGeneration`` of transformers 5.23.0 and its
conversion mapping, which renames ``visual`` and ``mlp_AR``.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from encoders import Ernie4_5VLConfig, Ernie4_5VLEncoder, PaddleOCRVLConfig, PaddleOCRVLEncoder
from encoders.hf_config import read_ratio, read_size

from ..layouts import Layout, Prefix
from ..published import family_facts
from ..strict_json import JsonDict, JsonObject
from .family import Family, TransformersClass, block_count, length, square, with_vision
from .siglip import QKV, siglip_names


def _names(resampler: str) -> dict[str, str]:
    """Return, for the resampler's layers, published names -> the encoder's names.

    The published names begin with the prefix ``resampler``.
    """
    merges = {
        f"{resampler}.{merge}.{number}": f"resampler.{merge}.{layer}"
        for merge in ("spatial_linear", "temporal_linear")
        for number, layer in ((0, "fc1"), (2, "fc2"), (3, "ln"))
    }
    return {**merges, resampler: "resampler"}


_ERNIE = Layout(
    name="ernie",
    prefixes=(Prefix("", "vision_model."), Prefix("", "")),
    marks=("blocks.",),
    projector=("model.resampler_model.",),
    needed=("model.resampler_model.",),
    renames=_names("model.resampler_model"),
    processor_files=family_facts("ernie4_5_vl").processors["ernie"],
)
_ERNIE_HF = replace(
    _ERNIE,
    name="ernie-hf",
    prefixes=(Prefix("model.", "vision_model."), Prefix("", "vision_model."), Prefix("", "")),
    projector=("resampler_model.",),
    needed=(),
    renames=_names("resampler_model"),
    processor_files=family_facts("ernie4_5_vl").processors["ernie-hf"],
)
_ERNIE_RAW = replace(  # the names of the modules of transformers 5.24, as ``state_dict`` has them
    _ERNIE_HF,
    name="ernie-transformers",
    prefixes=(Prefix("model.", "vision_tower."), Prefix("", "vision_tower."), Prefix("", "")),
    needed=("resampler_model.spatial_linear.fc1.",),
    renames={"resampler_model": "resampler"},
)


def _mlp_width(section: JsonObject) -> JsonDict:
    """Return the field ``intermediate_size``, the MLPs' width, or an empty dict if a config has it.

    ``section`` is the tower's part of the config. Baidu's have ``mlp_ratio`` instead: the ratio of
    the MLPs' width to the tower's.
    """
    if "intermediate_size" in section:
        return {}
    width = read_size(section, "embed_dim", default=1280)
    return {"intermediate_size": int(width * read_ratio(section, "mlp_ratio", default=4))}


_PATCH = "patch_embed.proj.weight"
_ERNIE_CLASS = TransformersClass(
    "ernie4_5_vl_moe",
    "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    "ernie4_5_vl_moe_vision",
    auto=False,
    make_fields=_mlp_width,
)
ERNIE4_5_VL = Family(
    name="ernie4_5_vl",
    encoder=Ernie4_5VLEncoder,
    config=Ernie4_5VLConfig,
    model_types=(
        *with_vision("ernie4_5_vl_moe"),
        "ernie4_5_moe_vl",
        "DFNRope_vision_transformer",
    ),
    signs=(("patch_embed.proj.weight", "resampler_model.after_norm.weight"),),
    layouts=(_ERNIE, _ERNIE_RAW, _ERNIE_HF),
    classes={"ernie": _ERNIE_CLASS, "ernie-hf": _ERNIE_CLASS, "ernie-transformers": _ERNIE_CLASS},
    fields={  # the number of heads cannot be inferred from shapes
        ("depth", "num_hidden_layers"): block_count("blocks."),
        ("hidden_size", "embed_dim"): length(_PATCH, 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("patch_size", "spatial_patch_size"): lambda shapes: isqrt(shapes[_PATCH][1] // 3),
    },
    outer_fields={
        ("text_config.hidden_size", "hidden_size"): length("resampler.mlp.weight", 0),
    },
)

_PADDLE_TOWER = "vision_model"
_PADDLE_POSITIONS = "embeddings.position_embedding.weight"
_PADDLE_NAMES = {
    f"{_PADDLE_TOWER}.{name}": encoder_name
    for name, encoder_name in siglip_names("", "patch_embed.proj").items()
    if name != _PADDLE_POSITIONS
}
_PADDLE = Layout(
    name="paddleocr-vl",
    prefixes=(Prefix("", "visual."), Prefix("", "")),
    marks=(f"{_PADDLE_TOWER}.embeddings.patch_embedding.",),
    projector=("mlp_AR.",),
    joins={"blocks.N.attn.qkv": tuple(f"{_PADDLE_TOWER}.{name}" for name in QKV)},
    renames={
        f"{_PADDLE_TOWER}.{_PADDLE_POSITIONS}": "pos_embed.weight",
        **_PADDLE_NAMES,
        "mlp_AR": "projector",
    },
    # The published model uses neither SigLIP's pooling head nor the positions for packed images.
    ignored=(
        f"{_PADDLE_TOWER}.embeddings.packing_position_embedding.weight",
        f"{_PADDLE_TOWER}.head.probe",
        f"{_PADDLE_TOWER}.head.attention",
        f"{_PADDLE_TOWER}.head.layernorm",
        f"{_PADDLE_TOWER}.head.mlp",
    ),
    processor_files=family_facts("paddleocr_vl").processors["paddleocr-vl"],
)
_PADDLE_RAW = replace(  # the names of the modules of transformers 5.24, as ``state_dict`` has them
    _PADDLE,
    name="paddleocr-vl-transformers",
    prefixes=(Prefix("model.", "visual."), *_PADDLE.prefixes),
    projector=("projector.",),
    needed=("projector.",),
    renames={f"{_PADDLE_TOWER}.{_PADDLE_POSITIONS}": "pos_embed.weight", **_PADDLE_NAMES},
)
_PADDLE_CLASS = TransformersClass(
    "paddleocr_vl", "PaddleOCRVisionModel", "paddleocr_vl_vision", auto=False
)
PADDLEOCR_VL = Family(
    name="paddleocr_vl",
    encoder=PaddleOCRVLEncoder,
    config=PaddleOCRVLConfig,
    model_types=with_vision("paddleocr_vl"),
    signs=(("mlp_AR.pre_norm.weight", "mlp_AR.linear_1.weight"),),
    layouts=(_PADDLE_RAW, _PADDLE),
    classes={_PADDLE_RAW.name: _PADDLE_CLASS, _PADDLE.name: _PADDLE_CLASS},
    fields={
        ("hidden_size",): length(_PATCH, 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("patch_size",): length(_PATCH, 3),
        ("image_size",): square("pos_embed.weight", 0, _PATCH, extra=0),
    },
)
