"""Towers of Pixtral, Mistral-Small-3.1 and 3.2, Ministral-3 and LightOnOCR, in transformers' names.

Sources: the classes and the conversion of Mistral's own names in transformers 5.23.0, and
``lightonocr.py`` of vLLM 0.33.0.
"""

from __future__ import annotations

import math
from dataclasses import replace

from encoders import PixtralConfig, PixtralEncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, Fields, Shapes, TransformersClass, block_count, length

_BLOCK = "transformer.layers.N"
_BLOCKS = {
    f"{_BLOCK}.attention_norm": "blocks.N.norm1",
    f"{_BLOCK}.attention.o_proj": "blocks.N.attn.proj",
    f"{_BLOCK}.ffn_norm": "blocks.N.norm2",
    f"{_BLOCK}.feed_forward": "blocks.N.mlp",
}
_PIXTRAL_LAYOUT = Layout(
    name="pixtral",
    prefixes=(Prefix("model.", "vision_tower."), Prefix("", "vision_tower."), Prefix("", "")),
    marks=("patch_conv.", f"{_BLOCK.replace('N', '0')}.attention.q_proj."),
    projector=("multi_modal_projector.",),
    joins={"blocks.N.attn.qkv": tuple(f"{_BLOCK}.attention.{part}_proj" for part in "qkv")},
    renames={
        "patch_conv": "patch_embed.proj",
        **_BLOCKS,
        "multi_modal_projector.patch_merger.merging_layer": "projector.merging_layer",
        "multi_modal_projector": "projector",
    },
    processor_files=family_facts("pixtral").processors["pixtral"],
)
_LIGHTON = replace(
    _PIXTRAL_LAYOUT,
    name="lighton-ocr",
    prefixes=(Prefix("model.", "vision_encoder."), Prefix("", "vision_encoder."), Prefix("", "")),
    projector=("vision_projection.",),
    needed=("vision_projection.",),
    renames={
        "patch_conv": "patch_embed.proj",
        **_BLOCKS,
        "vision_projection.patch_merger.merging_layer": "projector.merging_layer",
        "vision_projection": "projector",
    },
)
_NATIVE = Layout(  # Mistral's own code rotates neighbouring columns of queries and keys in pairs
    name="mistral",
    prefixes=(Prefix("", "vision_encoder."), Prefix("", "vision_tower."), Prefix("", "")),
    marks=("transformer.layers.0.attention.wq.",),
    refusal=(
        "holds Mistral's own names (wq, w1, vision_language_adapter), as consolidated.safetensors "
        "does: load the file with transformers' names, model.safetensors or its index, or convert "
        "the weights if there is none, as for Mistral-Large-4"
    ),
)


def _merge_size(shapes: Shapes) -> int:
    rows, columns = shapes["projector.merging_layer.weight"]
    return math.isqrt(columns // rows)


_PATCH = "patch_embed.proj.weight"
_CONFIG_FIELDS: Fields = {
    ("num_hidden_layers",): block_count("blocks."),
    ("hidden_size",): length(_PATCH, 0),
    ("patch_size",): length(_PATCH, 3),
    ("intermediate_size",): length("blocks.0.mlp.gate_proj.weight", 0),
}
_OUTER_FIELDS: Fields = {
    ("text_config.hidden_size",): length("projector.linear_2.weight", 0),
    ("multimodal_projector_bias",): lambda shapes: "projector.linear_2.bias" in shapes,
    ("spatial_merge_size",): _merge_size,
}

_CLASS = TransformersClass("pixtral", "PixtralVisionModel", "pixtral")
PIXTRAL = Family(
    name="pixtral",
    encoder=PixtralEncoder,
    config=PixtralConfig,
    model_types=("pixtral", "mistral3", "lighton_ocr"),
    signs=(("patch_conv.weight", "ln_pre.weight"),),
    layouts=(_NATIVE, _LIGHTON, _PIXTRAL_LAYOUT),
    classes={"pixtral": _CLASS, "lighton-ocr": _CLASS},
    fields=_CONFIG_FIELDS,
    outer_fields=_OUTER_FIELDS,
)
