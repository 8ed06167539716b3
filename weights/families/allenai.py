"""The tower of Molmo2, as the Allen Institute for AI publishes it.

Source of the names: the index of allenai/Molmo2-4B; ``Molmo2Model`` of transformers 5.23.0, which
saves the same names.
"""

from __future__ import annotations

from encoders import Molmo2Config, Molmo2Encoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, length, with_vision

_BLOCK = "transformer.resblocks.N"
_LAYOUT = Layout(
    name="molmo2",
    prefixes=(
        Prefix("model.vision_backbone.", "image_vit."),
        Prefix("vision_backbone.", "image_vit."),
        Prefix("", ""),
    ),
    marks=("patch_embedding.",),
    projector=("image_pooling_2d.", "image_projector."),
    joins={
        "blocks.N.attn.qkv": tuple(f"{_BLOCK}.attention.w{part}" for part in "qkv"),
        "pool.kv": ("image_pooling_2d.wk", "image_pooling_2d.wv"),
    },
    renames={
        "patch_embedding": "patch_embed",
        "positional_embedding": "pos_embed",
        f"{_BLOCK}.attention.wo": "blocks.N.attn.proj",
        f"{_BLOCK}.attention_norm": "blocks.N.norm1",
        f"{_BLOCK}.feed_forward.w1": "blocks.N.mlp.fc1",
        f"{_BLOCK}.feed_forward.w2": "blocks.N.mlp.fc2",
        f"{_BLOCK}.ffn_norm": "blocks.N.norm2",
        "image_pooling_2d.wq": "pool.q",
        "image_pooling_2d.wo": "pool.proj",
        "image_projector.w1": "projector.gate",
        "image_projector.w2": "projector.down",
        "image_projector.w3": "projector.up",
    },
    processor_files=family_facts("molmo2").processors["molmo2"],
)
MOLMO2 = Family(
    name="molmo2",
    encoder=Molmo2Encoder,
    config=Molmo2Config,
    model_types=with_vision("molmo2"),
    signs=(("image_pooling_2d.wq.weight", "patch_embedding.bias"),),
    layouts=(_LAYOUT,),
    fields={  # heads cannot be inferred from shapes, nor the blocks that are read
        ("hidden_size",): length("patch_embed.weight", 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("image_patch_size", "patch_size"): lambda shapes: round(
            (shapes["patch_embed.weight"][1] / 3) ** 0.5
        ),
        ("image_default_input_size", "image_size"): lambda shapes: round(
            (shapes["pos_embed"][0] * shapes["patch_embed.weight"][1] / 3) ** 0.5
        ),
    },
    outer_fields={
        ("adapter_config.intermediate_size",): length("projector.gate.weight", 0),
        ("adapter_config.text_hidden_size",): length("projector.down.weight", 0),
    },
)
