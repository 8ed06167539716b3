"""CLIP's tower as OpenAI, LAION and Meta publish it in the form of transformers.

Source of the names: ``CLIPModel``, ``CLIPVisionModel`` and ``MetaClip2Model`` of transformers
5.24.0.
"""

from __future__ import annotations

from dataclasses import replace

from encoders import ClipConfig, ClipEncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from ..strict_json import JsonObject
from .family import Family, Fields, Shapes, TransformersClass, block_count, length, square
from .siglip import QKV, siglip_names

_CLIP = Layout(
    name="clip",
    prefixes=(Prefix("", "vision_model."), Prefix("", "")),
    marks=("embeddings.class_embedding",),
    projector=("visual_projection.",),
    joins={"blocks.N.attn.qkv": QKV},
    renames={
        "embeddings.class_embedding": "class_embedding",
        **siglip_names("", "patch_embed.proj"),
        "pre_layrnorm": "norm_pre",
        "visual_projection": "head",
    },
    processor_files=family_facts("clip").processors["clip"],
)

_PATCH = "patch_embed.proj.weight"
_FIELDS: Fields = {  # shapes do not tell the number of heads, nor the activation
    ("hidden_size",): length(_PATCH, 0),
    ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
    ("num_hidden_layers",): block_count("blocks."),
    ("patch_size",): length(_PATCH, 3),
    ("image_size",): square("pos_embed", 0, _PATCH, extra=1),
}


def _parse_config(config: JsonObject, shapes: Shapes) -> ClipConfig:
    """Return the encoder's config; a tower alone has a projection if there are tensors of it."""
    built, bias = ClipConfig.from_hf(config), "head.bias" in shapes
    columns = built.projection_dim or shapes.get("head.weight", (None,))[0]
    return replace(built, projection_dim=columns, projection_bias=bias)


CLIP = Family(
    name="clip",
    encoder=ClipEncoder,
    config=ClipConfig,
    model_types=("clip", "clip_vision_model", "metaclip_2", "metaclip_2_vision_model"),
    signs=(("embeddings.class_embedding", "pre_layrnorm.weight"),),
    layouts=(_CLIP,),
    classes={
        "clip": TransformersClass("clip", "CLIPVisionModel", "clip_vision_model"),
        "metaclip_2": TransformersClass(
            "metaclip_2", "MetaClip2VisionModel", "metaclip_2_vision_model"
        ),
    },
    fields=_FIELDS,
    outer_fields={("projection_dim",): length("head.weight", 0)},
    parse_config=_parse_config,
)
