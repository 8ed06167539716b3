"""The tower of PaddleOCR-VL, as PaddlePaddle publishes it.

Source of the names: ``PaddleOCRVLForConditionalGeneration`` of transformers 5.23.0 and its
conversion mapping, which renames ``visual`` and ``mlp_AR``.
"""

from __future__ import annotations

from dataclasses import replace

from encoders import PaddleOCRVLConfig, PaddleOCRVLEncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, TransformersClass, block_count, length, square, with_vision
from .siglip import QKV, siglip_names

_TOWER = "vision_model"
_POSITIONS = "embeddings.position_embedding.weight"
_NAMES = {
    f"{_TOWER}.{name}": encoder_name
    for name, encoder_name in siglip_names("", "patch_embed.proj").items()
    if name != _POSITIONS
}
_LAYOUT = Layout(
    name="paddleocr-vl",
    prefixes=(Prefix("", "visual."), Prefix("", "")),
    marks=(f"{_TOWER}.embeddings.patch_embedding.",),
    projector=("mlp_AR.",),
    joins={"blocks.N.attn.qkv": tuple(f"{_TOWER}.{name}" for name in QKV)},
    renames={f"{_TOWER}.{_POSITIONS}": "pos_embed.weight", **_NAMES, "mlp_AR": "projector"},
    # The published model uses neither SigLIP's pooling head nor the positions for packed images.
    ignored=(
        f"{_TOWER}.embeddings.packing_position_embedding.weight",
        f"{_TOWER}.head.probe",
        f"{_TOWER}.head.attention",
        f"{_TOWER}.head.layernorm",
        f"{_TOWER}.head.mlp",
    ),
    processor_files=family_facts("paddleocr_vl").processors["paddleocr-vl"],
)
_RAW = replace(  # the names of the modules of transformers 5.24, as ``state_dict`` has them
    _LAYOUT,
    name="paddleocr-vl-transformers",
    prefixes=(Prefix("model.", "visual."), *_LAYOUT.prefixes),
    projector=("projector.",),
    needed=("projector.",),
    renames={f"{_TOWER}.{_POSITIONS}": "pos_embed.weight", **_NAMES},
)
_PATCH = "patch_embed.proj.weight"
_CLASS = TransformersClass(
    "paddleocr_vl", "PaddleOCRVisionModel", "paddleocr_vl_vision", auto=False
)
PADDLEOCR_VL = Family(
    name="paddleocr_vl",
    encoder=PaddleOCRVLEncoder,
    config=PaddleOCRVLConfig,
    model_types=with_vision("paddleocr_vl"),
    signs=(("mlp_AR.pre_norm.weight", "mlp_AR.linear_1.weight"),),
    layouts=(_RAW, _LAYOUT),
    classes={_RAW.name: _CLASS, _LAYOUT.name: _CLASS},
    fields={
        ("hidden_size",): length(_PATCH, 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("patch_size",): length(_PATCH, 3),
        ("image_size",): square("pos_embed.weight", 0, _PATCH, extra=0),
    },
)
