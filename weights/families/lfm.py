"""The towers of LFM2-VL and LFM2.5-VL, as Liquid AI publishes them.

Source of the names: ``Lfm2VlModel`` of transformers 5.23.0; its tower is SigLIP2 NaFlex.
"""

from __future__ import annotations

from encoders import Lfm2VLConfig, Lfm2VLEncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, TransformersClass, block_count, length, with_vision
from .siglip import QKV, siglip_names

_PROJECTOR = "multi_modal_projector"
_LAYOUT = Layout(
    name="lfm2-vl",
    prefixes=(  # as published, and as transformers 5 saves it
        Prefix("model.", "vision_tower.vision_model."),
        Prefix("model.", "vision_tower."),
        Prefix("", ""),
    ),
    marks=("embeddings.patch_embedding.",),
    projector=(f"{_PROJECTOR}.",),
    joins={"blocks.N.attn.qkv": QKV},
    renames={**siglip_names("", "patch_embed"), _PROJECTOR: "projector"},
    ignored=("head",),  # transformers saves SigLIP2's pooling head, which the model does not use
    processor_files=family_facts("lfm2_vl").processors["lfm2-vl"],
)
_LFM3 = "its tower has gated convolutions, and fewer heads of keys than of queries"
LFM2_VL = Family(
    name="lfm2_vl",
    encoder=Lfm2VLEncoder,
    config=Lfm2VLConfig,
    model_types=("lfm2_vl", "lfm2-vl", "siglip2_vision_model"),
    signs=((f"{_PROJECTOR}.linear_1.weight", "embeddings.patch_embedding.weight"),),
    layouts=(_LAYOUT,),
    classes={
        "lfm2-vl": TransformersClass(
            "siglip2",
            "Siglip2VisionModel",
            "siglip2_vision_model",
            make_fields=lambda section: {"vision_use_head": False},
        )
    },
    fields={  # the number of heads cannot be inferred from shapes
        ("hidden_size",): length("patch_embed.weight", 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("num_patches",): length("pos_embed", 0),
    },
    outer_fields={
        ("text_config.hidden_size",): length("projector.linear_2.weight", 0),
        ("projector_hidden_size",): length("projector.linear_1.weight", 0),
        ("projector_use_layernorm",): lambda shapes: "projector.layer_norm.weight" in shapes,
        ("projector_bias",): lambda shapes: "projector.linear_1.bias" in shapes,
    },
    refusals=dict.fromkeys(with_vision("lfm3_vl"), _LFM3),
)
