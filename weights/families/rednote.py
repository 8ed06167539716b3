"""dots.ocr and dots.mocr, as rednote publishes them.

Source of the names: ``dots_ocr.py`` of vLLM 0.32.0, which reads both layouts.
"""

from __future__ import annotations

from dataclasses import replace

from encoders import DotsOCRConfig, DotsOCREncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, Fields, block_count, length

_NAMES = {
    "patch_embed.patchifier.proj": "patch_embed.proj",
    "patch_embed.patchifier.norm": "norm_pre",
    "post_trunk_norm": "norm",
}
_DOTS = Layout(
    name="dots-ocr",
    prefixes=(Prefix("", "vision_tower."), Prefix("", "")),
    marks=("patch_embed.patchifier.", "blocks.0.attn.qkv."),
    renames=_NAMES,
    processor_files=family_facts("dots_ocr").processors["dots-ocr"],
)
_OTHER_NAMES = replace(
    _DOTS,
    name="dots-ocr-qkv-proj",
    marks=("blocks.0.attn.qkv_proj.",),
    renames={
        **_NAMES,
        "blocks.N.attn.qkv_proj": "blocks.N.attn.qkv",
        "blocks.N.attn.out_proj": "blocks.N.attn.proj",
    },
)

_PATCH = "patch_embed.proj.weight"
_FIELDS: Fields = {  # the number of heads cannot be inferred from shapes
    ("num_hidden_layers",): block_count("blocks."),
    ("embed_dim",): length(_PATCH, 0),
    ("hidden_size",): length("merger.mlp.2.weight", 0),
    ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
    ("patch_size",): length(_PATCH, 3),
}

DOTS_OCR = Family(
    name="dots_ocr",
    encoder=DotsOCREncoder,
    config=DotsOCRConfig,
    model_types=("dots_ocr", "dots_vit"),
    signs=(("patch_embed.patchifier.proj.weight", "post_trunk_norm.weight"),),
    layouts=(_OTHER_NAMES, _DOTS),
    fields=_FIELDS,
    refusals=dict.fromkeys(
        ("dots3_note", "dots3_note_vision_encoder"),
        "its tower is another one, with a mixture of experts",
    ),
)
