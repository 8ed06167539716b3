"""The tower of Llama 4, as Meta publishes it.

Source of the names: ``Llama4ForConditionalGeneration`` of transformers 5.23.0.
"""

from __future__ import annotations

from math import isqrt

from encoders import Llama4Config, Llama4Encoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, Shapes, TransformersClass, block_count, length

_LAYER, _BLOCK = "model.layers.N", "blocks.N"
_LAYOUT = Layout(
    name="llama4",
    prefixes=(Prefix("", "vision_model."), Prefix("", "")),
    marks=("patch_embedding.linear.",),
    projector=("multi_modal_projector.",),
    joins={f"{_BLOCK}.attn.qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv")},
    renames={
        "patch_embedding.linear": "patch_embed",
        "positional_embedding_vlm": "pos_embed",
        "layernorm_pre": "norm_pre",
        f"{_LAYER}.input_layernorm": f"{_BLOCK}.norm1",
        f"{_LAYER}.self_attn.o_proj": f"{_BLOCK}.attn.proj",
        f"{_LAYER}.post_attention_layernorm": f"{_BLOCK}.norm2",
        f"{_LAYER}.mlp": f"{_BLOCK}.mlp",
        "layernorm_post": "norm",
        "vision_adapter.mlp": "adapter",
        "multi_modal_projector.linear_1": "projector",
    },
    processor_files=family_facts("llama4").processors["llama4"],
)
_PATCH, _ADAPTER = "patch_embed.weight", "adapter.fc2.weight"


def _patch_size(shapes: Shapes) -> int:
    return isqrt(shapes[_PATCH][1] // 3)


LLAMA4 = Family(
    name="llama4",
    encoder=Llama4Encoder,
    config=Llama4Config,
    model_types=("llama4", "llama4_vision_model"),
    signs=(("vision_adapter.mlp.fc1.weight", "positional_embedding_vlm"),),
    layouts=(_LAYOUT,),
    classes={
        "llama4": TransformersClass(
            "llama4", "Llama4VisionModel", "llama4_vision_model", auto=False
        )
    },
    fields={  # the number of heads cannot be inferred from shapes
        ("hidden_size",): length(_PATCH, 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("patch_size",): _patch_size,
        ("image_size",): lambda shapes: isqrt(shapes["pos_embed"][0] - 1) * _patch_size(shapes),
        ("projector_input_dim",): length(_ADAPTER, 0),
        ("projector_output_dim",): length(_ADAPTER, 0),
        ("vision_output_dim",): length(_ADAPTER, 0),
    },
    outer_fields={("text_config.hidden_size",): length("projector.weight", 0)},
)
