"""SigLIP and SigLIP2 as Google publishes them, and models with SigLIP's tower.

These are Gemma 3, PaliGemma and LLaVA-OneVision.

Source of the names: ``SiglipModel``, ``Siglip2Model``, ``Gemma3Model``, ``PaliGemmaModel`` and
``ColPaliForRetrieval`` of transformers 5.23.0, and ``LlavaOnevisionModel`` of 5.24.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from encoders import (
    Gemma3Config,
    Gemma3Encoder,
    LlavaOnevisionConfig,
    LlavaOnevisionEncoder,
    PaliGemmaConfig,
    PaliGemmaEncoder,
    Siglip2Config,
    Siglip2Encoder,
    SiglipConfig,
    SiglipEncoder,
)

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import (
    Family,
    Fields,
    TransformersClass,
    block_count,
    length,
    square,
)

_BLOCK = "encoder.layers.N"
QKV = tuple(f"{_BLOCK}.self_attn.{part}_proj" for part in "qkv")
"""Published layers whose stacked weights are the encoder's ``blocks.N.attn.qkv``."""


def siglip_names(tower: str, patch: str) -> Mapping[str, str]:
    """Return, for the modules of a SigLIP tower, published names -> the encoder's names.

    Args:
        tower: prefix of the encoder's names, such as "vision.", or "".
        patch: the encoder's name, after the prefix, of the layer that embeds patches.
    """
    return {
        "embeddings.patch_embedding": f"{tower}{patch}",
        "embeddings.position_embedding.weight": f"{tower}pos_embed",
        f"{_BLOCK}.layer_norm1": f"{tower}blocks.N.norm1",
        f"{_BLOCK}.layer_norm2": f"{tower}blocks.N.norm2",
        f"{_BLOCK}.self_attn.out_proj": f"{tower}blocks.N.attn.proj",
        f"{_BLOCK}.mlp": f"{tower}blocks.N.mlp",
        "post_layernorm": f"{tower}norm",
    }


_NAMES = siglip_names("", "patch_embed.proj")
_PROJECTOR = "multi_modal_projector"
_SIGLIP = Layout(
    name="siglip",
    prefixes=(Prefix("", "vision_model."), Prefix("", "")),
    marks=("embeddings.patch_embedding.",),
    joins={"blocks.N.attn.qkv": QKV},
    renames=_NAMES,
    processor_files=family_facts("siglip").processors["siglip"],
)
_GEMMA3 = Layout(
    name="gemma3",
    prefixes=(
        Prefix("", "vision_tower.vision_model."),  # google/gemma-3-*
        Prefix("model.", "vision_tower.vision_model."),
        Prefix("", "vision_tower."),  # as transformers 5.23.0 saves it
        Prefix("model.", "vision_tower."),  # ``Gemma3Model`` of transformers 5.23.0
        Prefix("", ""),
    ),
    marks=_SIGLIP.marks,
    projector=(f"{_PROJECTOR}.",),
    joins=_SIGLIP.joins,
    renames={
        **_NAMES,
        f"{_PROJECTOR}.mm_soft_emb_norm.weight": "projector.norm",
        f"{_PROJECTOR}.mm_input_projection_weight": "projector.projection",
    },
    processor_files=family_facts("gemma3").processors["gemma3"],
)
_PALIGEMMA = Layout(
    name="paligemma",
    prefixes=(
        Prefix("", "vision_tower.vision_model."),  # google/paligemma*
        Prefix("", "vision_tower."),  # as transformers 5.23.0 saves it
        Prefix("model.", "vision_tower.vision_model."),  # as transformers 4.52 to 4.57 saved it
        Prefix("vlm.", "vision_tower.vision_model."),  # vidore/colpali-v1.*-hf
        Prefix("vlm.", "vision_tower."),
        Prefix("vlm.model.", "vision_tower.vision_model."),
        Prefix("", ""),
    ),
    marks=_SIGLIP.marks,
    projector=(f"{_PROJECTOR}.",),
    joins=_SIGLIP.joins,
    renames={**_NAMES, f"{_PROJECTOR}.linear": "projector"},
    processor_files=family_facts("paligemma").processors["paligemma"],
)
_ONEVISION = Layout(
    name="llava_onevision",
    prefixes=(
        Prefix("", "vision_tower.vision_model."),  # llava-hf/llava-onevision-*
        Prefix("model.", "vision_tower.vision_model."),
        Prefix("model.", "vision_tower."),  # as transformers 5.24.0 saves it
        Prefix("", "vision_tower."),
        Prefix("", ""),
    ),
    marks=_SIGLIP.marks,
    projector=(f"{_PROJECTOR}.", "image_newline"),
    joins=_SIGLIP.joins,
    renames={
        **_NAMES,
        f"{_PROJECTOR}.linear_1": "projector.0",
        f"{_PROJECTOR}.linear_2": "projector.2",
    },
    processor_files=family_facts("llava_onevision").processors["llava_onevision"],
)
_NAFLEX = Layout(
    name="siglip2-naflex",
    prefixes=_SIGLIP.prefixes,
    marks=_SIGLIP.marks,
    joins={"blocks.N.attn.qkv": QKV},
    renames=siglip_names("", "patch_embed"),
    processor_files=family_facts("siglip2").processors["siglip2-naflex"],
)

_PATCH = "patch_embed.proj.weight"
_CONFIG_FIELDS: Fields = {  # the number of heads cannot be inferred from shapes
    ("hidden_size",): length(_PATCH, 0),
    ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
    ("num_hidden_layers",): block_count("blocks."),
    ("patch_size",): length(_PATCH, 3),
    ("image_size",): square("pos_embed", 0, _PATCH, extra=0),
    ("vision_use_head",): lambda shapes: "head.probe" in shapes,
}
_NAFLEX_FIELDS: Fields = {
    ("hidden_size",): length("patch_embed.weight", 0),
    ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
    ("num_hidden_layers",): block_count("blocks."),
    ("num_patches",): length("pos_embed", 0),
    ("vision_use_head",): lambda shapes: "head.probe" in shapes,
}

_SIGLIP_CLASS = TransformersClass("siglip", "SiglipVisionModel", "siglip_vision_model")
SIGLIP = Family(
    name="siglip",
    encoder=SiglipEncoder,
    config=SiglipConfig,
    model_types=("siglip", "siglip_vision_model"),
    signs=(("head.probe", "head.attention.in_proj_weight"),),
    layouts=(_SIGLIP,),
    classes={"siglip": _SIGLIP_CLASS},
    fields=_CONFIG_FIELDS,
)
SIGLIP2 = Family(
    name="siglip2",
    encoder=Siglip2Encoder,
    config=Siglip2Config,
    model_types=("siglip2", "siglip2_vision_model"),
    signs=(("head.probe", "head.layernorm.weight"),),
    layouts=(_NAFLEX,),
    classes={
        "siglip2-naflex": TransformersClass("siglip2", "Siglip2VisionModel", "siglip2_vision_model")
    },
    fields=_NAFLEX_FIELDS,
)
GEMMA3 = Family(
    name="gemma3",
    encoder=Gemma3Encoder,
    config=Gemma3Config,
    model_types=("gemma3", "siglip_vision_model"),
    signs=((f"{_PROJECTOR}.mm_input_projection_weight", f"{_PROJECTOR}.mm_soft_emb_norm.weight"),),
    layouts=(_GEMMA3,),
    classes={"gemma3": _SIGLIP_CLASS},
    fields=_CONFIG_FIELDS,
    outer_fields={("text_config.hidden_size",): length("projector.projection", 1)},
)
PALIGEMMA = Family(
    name="paligemma",
    encoder=PaliGemmaEncoder,
    config=PaliGemmaConfig,
    model_types=("paligemma", "colpali", "siglip_vision_model"),
    signs=((f"{_PROJECTOR}.linear.weight", "post_layernorm.weight"),),
    layouts=(_PALIGEMMA,),
    classes={"paligemma": _SIGLIP_CLASS},
    fields=_CONFIG_FIELDS,
    outer_fields={("projection_dim",): length("projector.weight", 0)},
)
LLAVA_ONEVISION = Family(
    name="llava_onevision",
    encoder=LlavaOnevisionEncoder,
    config=LlavaOnevisionConfig,
    model_types=("llava_onevision", "siglip_vision_model"),
    signs=(("image_newline", "embeddings.patch_embedding.bias"),),
    by_type=True,
    layouts=(_ONEVISION,),
    classes={"llava_onevision": _SIGLIP_CLASS},
    fields=_CONFIG_FIELDS,
    outer_fields={("text_config.hidden_size",): length("projector.2.weight", 0)},
)
