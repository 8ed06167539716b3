"""The towers of Idefics3, SmolVLM and ModernVBERT, as Hugging Face publishes them.

Source of the names: ``Idefics3Model``, ``SmolVLMModel``, ``ModernVBertModel`` and
``ColModernVBertForRetrieval`` of transformers 5.23.0.
"""

from __future__ import annotations

from dataclasses import replace

from encoders import Idefics3Config, Idefics3Encoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, TransformersClass, block_count, length, square, with_vision
from .siglip import QKV, siglip_names

_SHUFFLED = "connector.modality_projection"
_PROJECTION = f"{_SHUFFLED}.proj"
_NAMES = siglip_names("", "patch_embed.proj")
_LAYOUT = Layout(
    name="idefics3",
    prefixes=(Prefix("model.", "vision_model."), Prefix("", "vision_model."), Prefix("", "")),
    marks=("embeddings.patch_embedding.",),
    projector=("connector.",),
    joins={"blocks.N.attn.qkv": QKV},
    renames={**_NAMES, _PROJECTION: "projector"},
    processor_files=family_facts("idefics3").processors["idefics3"],
)
_MODERNVBERT = replace(
    _LAYOUT,
    name="modernvbert",
    prefixes=(
        *_LAYOUT.prefixes,
        Prefix("vlm.", "vision_model."),  # ColModernVBERT
    ),
    needed=(f"{_SHUFFLED}.weight",),
    renames={**_NAMES, _SHUFFLED: "projector"},
    ignored=("head",),  # ModernVBERT does not use SigLIP's pooling head
    processor_files=family_facts("idefics3").processors["modernvbert"],
)
_PATCH = "patch_embed.proj.weight"
IDEFICS3 = Family(
    name="idefics3",
    encoder=Idefics3Encoder,
    config=Idefics3Config,
    model_types=(
        *with_vision("idefics3", "smolvlm", "modernvbert"),
        *("colmodernvbert", "siglip_vision_model"),
    ),
    signs=(
        (f"{_PROJECTION}.weight", "post_layernorm.weight"),
        (f"{_SHUFFLED}.weight", "post_layernorm.weight"),
    ),
    layouts=(_MODERNVBERT, _LAYOUT),
    classes={
        "idefics3": TransformersClass("idefics3", "Idefics3VisionTransformer", "idefics3_vision"),
        "modernvbert": TransformersClass("siglip", "SiglipVisionModel", "siglip_vision_model"),
        "smolvlm": TransformersClass("smolvlm", "SmolVLMVisionTransformer", "smolvlm_vision"),
    },
    fields={  # the number of heads cannot be inferred from shapes
        ("hidden_size",): length(_PATCH, 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("patch_size",): length(_PATCH, 3),
        ("image_size",): square("pos_embed", 0, _PATCH, extra=0),
    },
    outer_fields={
        ("text_config.hidden_size",): length("projector.weight", 0),
        ("scale_factor", "pixel_shuffle_factor"): lambda shapes: round(
            (shapes["projector.weight"][1] / shapes[_PATCH][0]) ** 0.5
        ),
    },
)
