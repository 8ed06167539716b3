"""Towers of GLM-4.1V, 4.5V and 4.6V, and of GLM-OCR and GLM-5.3-Flash.

Sources: the classes of transformers 5.23.0, and copies of the published configs and processor files
in public code (GLM-OCR's processor file is from revision 2e85a628).
"""

from __future__ import annotations

from encoders import Glm4VConfig, Glm4VEncoder, GlmOCRConfig, GlmOCREncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, Fields, TransformersClass, block_count, length, square, with_vision

_PREFIXES = (Prefix("model.", "visual."), Prefix("", "visual."), Prefix("", ""))
_GLM4V_LAYOUT = Layout(
    name="glm4v",
    prefixes=_PREFIXES,
    marks=("embeddings.position_embedding.",),
    ignored=("rotary_pos_emb.inv_freq",),
    processor_files=family_facts("glm4v").processors["glm4v"],
)
_GLM_OCR_LAYOUT = Layout(
    name="glm_ocr",
    prefixes=_PREFIXES,
    marks=("blocks.0.attn.q_norm.",),
    ignored=("rotary_pos_emb.inv_freq",),
    processor_files=family_facts("glm_ocr").processors["glm_ocr"],
)

_PATCH, _POSITIONS = "patch_embed.proj.weight", "embeddings.position_embedding.weight"
_SHARED: Fields = {
    ("depth", "num_hidden_layers"): block_count("blocks."),
    ("hidden_size",): length(_PATCH, 0),
    ("temporal_patch_size",): length(_PATCH, 2),
    ("patch_size",): length(_PATCH, 4),
    ("out_hidden_size",): length("downsample.weight", 0),
    ("spatial_merge_size",): length("downsample.weight", 2),
}
_GLM4V_FIELDS: Fields = {
    **_SHARED,
    ("intermediate_size",): length("merger.gate_proj.weight", 0),
    ("image_size",): square(_POSITIONS, 0, _PATCH, extra=0),
}
_GLM_OCR_FIELDS: Fields = {
    **_SHARED,
    ("intermediate_size",): length("blocks.0.mlp.gate_proj.weight", 0),
    ("projection_intermediate_size",): length("merger.gate_proj.weight", 0),
    ("num_heads", "num_attention_heads"): lambda shapes: (
        shapes[_PATCH][0] // shapes["blocks.0.attn.q_norm.weight"][0]
    ),
}


def _class(module: str, name: str) -> TransformersClass:
    return TransformersClass(module, name, f"{module}_vision")


GLM4V = Family(
    name="glm4v",
    encoder=Glm4VEncoder,
    config=Glm4VConfig,
    model_types=(*with_vision("glm4v", "glm4v_moe"), "glm46v"),
    signs=(("embeddings.position_embedding.weight", "post_conv_layernorm.weight"),),
    layouts=(_GLM4V_LAYOUT,),
    classes={
        "glm4v": _class("glm4v", "Glm4vVisionModel"),
        "glm4v_moe": _class("glm4v_moe", "Glm4vMoeVisionModel"),
    },
    fields=_GLM4V_FIELDS,
)
GLM_OCR = Family(
    name="glm_ocr",
    encoder=GlmOCREncoder,
    config=GlmOCRConfig,
    model_types=with_vision("glm_ocr", "glm5_next"),
    signs=(("blocks.0.attn.q_norm.weight", "downsample.weight"),),
    layouts=(_GLM_OCR_LAYOUT,),
    classes={
        "glm_ocr": _class("glm_ocr", "GlmOcrVisionModel"),
        "glm5_next": _class("glm5_next", "Glm5NextVisionModel"),
    },
    fields=_GLM_OCR_FIELDS,
)
