"""The tower of Granite for Docling, as IBM publishes it.

Source of the names: ``GraniteDoclingModel`` of transformers 5.23.0.
"""

from __future__ import annotations

from encoders import GraniteDoclingConfig, GraniteDoclingEncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, TransformersClass, block_count, length, square, with_vision
from .siglip import QKV, siglip_names

_COARSE = "connector.coarse.projection"
_LAYOUT = Layout(
    name="granite-docling",
    prefixes=(Prefix("model.", "vision_model."), Prefix("", "vision_model."), Prefix("", "")),
    marks=("embeddings.patch_embedding.",),
    needed=(f"vision_model.{_COARSE}.", f"{_COARSE}."),
    joins={"blocks.N.attn.qkv": QKV},
    renames=siglip_names("", "patch_embed.proj"),
    processor_files=family_facts("granite_docling").processors["granite-docling"],
)
_PATCH = "patch_embed.proj.weight"
GRANITE_DOCLING = Family(
    name="granite_docling",
    encoder=GraniteDoclingEncoder,
    config=GraniteDoclingConfig,
    model_types=with_vision("granite_docling"),
    signs=((f"{_COARSE}.weight", "post_layernorm.weight"),),
    layouts=(_LAYOUT,),
    classes={
        "granite-docling": TransformersClass(
            "granite_docling", "GraniteDoclingVisionModel", "granite_docling_vision"
        )
    },
    fields={  # the number of heads cannot be inferred from shapes, nor the blocks that are read
        ("hidden_size",): length(_PATCH, 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("patch_size",): length(_PATCH, 3),
        ("image_size",): square("pos_embed", 0, _PATCH, extra=0),
        ("out_hidden_size",): length(f"{_COARSE}.weight", 0),
        ("scale_factor",): lambda shapes: round(
            (shapes[f"{_COARSE}.weight"][1] / shapes[_PATCH][0]) ** 0.5
        ),
        ("use_fine_route",): lambda shapes: "connector.fine.projection.weight" in shapes,
    },
)
