"""SAM 3's image encoder and Muse-Glimmer's tower, as Meta publishes and transformers saves them.

Source of the names: ``Sam3VisionModel``, ``Sam3Model``, ``Sam3VideoModel`` and
``MuseGlimmerModel`` of transformers 5.24.0.
"""

from __future__ import annotations

from math import isqrt

from encoders import MuseGlimmerConfig, MuseGlimmerEncoder, Sam3Config, Sam3Encoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, TransformersClass, block_count, length, square, with_vision

_BLOCK = "backbone.layers.N"
_SAM3 = Layout(
    name="sam3",
    prefixes=(
        Prefix("detector_model.", "vision_encoder."),  # facebook/sam3
        Prefix("", "vision_encoder."),  # Sam3Model
        Prefix("", ""),
    ),
    marks=("backbone.embeddings.", "backbone.layers."),
    joins={"blocks.N.attn.qkv": tuple(f"{_BLOCK}.attention.{part}_proj" for part in "qkv")},
    reshapes={"pos_embed": "n d -> one n d"},
    renames={
        "backbone.embeddings.patch_embeddings.projection": "patch_embed.proj",
        "backbone.embeddings.position_embeddings": "pos_embed",
        "backbone.layer_norm": "norm_pre",
        f"{_BLOCK}.layer_norm1": "blocks.N.norm1",
        f"{_BLOCK}.attention.o_proj": "blocks.N.attn.proj",
        f"{_BLOCK}.layer_norm2": "blocks.N.norm2",
        f"{_BLOCK}.mlp": "blocks.N.mlp",
        "neck.fpn_layers.N": "neck.N",
    },
    processor_files=family_facts("sam3").processors["sam3"],
)
_PATCH = "patch_embed.proj.weight"
SAM3 = Family(
    name="sam3",
    encoder=Sam3Encoder,
    config=Sam3Config,
    model_types=("sam3_video", "sam3", "sam3_vision_model", "sam3_lite_text"),
    signs=(("backbone.embeddings.position_embeddings", "neck.fpn_layers.0.proj1.weight"),),
    layouts=(_SAM3,),
    classes={"sam3": TransformersClass("sam3", "Sam3VisionModel", "sam3_vision_model")},
    fields={  # the number of heads, the windows and the size of views cannot be inferred
        ("backbone_config.hidden_size",): length(_PATCH, 0),
        ("backbone_config.intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("backbone_config.num_hidden_layers",): block_count("blocks."),
        ("backbone_config.patch_size",): length(_PATCH, 3),
        ("backbone_config.pretrain_image_size",): square("pos_embed", 0, _PATCH, extra=0),
        ("fpn_hidden_size",): length("neck.0.proj1.weight", 0),
    },
    refusals={
        "sam3_tracker": "its neck lies outside of the tower, under tracker_neck",
        "sam3_tracker_video": "its neck lies outside of the tower, under tracker_neck",
        "sam3_vit_model": "it has no neck",
    },
)

_LAYER = "layers.N"
_MUSE_GLIMMER = Layout(
    name="muse-glimmer",
    prefixes=(Prefix("model.", "vision_tower."), Prefix("", "vision_tower."), Prefix("", "")),
    marks=("patch_embedder.",),
    projector=("vision_adapter.", "vision_projection."),
    joins={"blocks.N.attn.qkv": tuple(f"{_LAYER}.attn.{part}_proj" for part in "qkv")},
    renames={
        "patch_embedder.patch_embedding": "patch_embed",
        "patch_embedder.position_embedding_table": "pos_embed",
        _LAYER: "blocks.N",
        "vision_projection": "projector.projection",  # first: "projector" begins it
        "vision_adapter": "projector",
    },
    processor_files=family_facts("muse_glimmer").processors["muse-glimmer"],
)
MUSE_GLIMMER = Family(
    name="muse_glimmer",
    encoder=MuseGlimmerEncoder,
    config=MuseGlimmerConfig,
    model_types=with_vision("muse_glimmer", "muse_spark"),
    signs=(("patch_embedder.position_embedding_table.weight", "vision_adapter.fc1.weight"),),
    layouts=(_MUSE_GLIMMER,),
    fields={  # the number of heads and the blocks without windows cannot be inferred from shapes
        ("hidden_size",): length("patch_embed.weight", 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("pos_emb_height",): lambda shapes: isqrt(shapes["pos_embed.weight"][0]),
        ("pos_emb_width",): lambda shapes: isqrt(shapes["pos_embed.weight"][0]),
    },
    outer_fields={
        ("text_config.hidden_size",): length("projector.projection.weight", 0),
        ("projector_hidden_size",): length("projector.fc1.weight", 0),
    },
)
