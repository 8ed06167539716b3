"""The tensor names under which Google publishes the vision towers of Gemma 4 and its kin."""

from __future__ import annotations

from dataclasses import replace

from encoders import Gemma4Config, Gemma4Encoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from ..strict_json import JsonObject
from .family import Family, Fields, Shapes, TransformersClass, block_count, length, with_vision

_LAYER, _BLOCK = "encoder.layers.N", "blocks.N"
_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
_GEMMA4 = Layout(
    name="gemma4",
    prefixes=(
        Prefix("model.encoder.", "vision_tower."),  # google/diffusiongemma-*
        Prefix("model.", "vision_tower."),
        Prefix("", "vision_tower."),  # google/embeddinggemma-2
        Prefix("", ""),
    ),
    marks=("patch_embedder.",),
    projector=("embed_vision.",),
    joins={
        f"{_BLOCK}.attn.qkv.weight": tuple(f"{_ATTENTION}.{x}_proj.linear.weight" for x in "qkv")
    },
    renames={
        "patch_embedder.input_proj": "patch_embed",
        "patch_embedder.position_embedding_table": "position_embedding_table",
        f"{_LAYER}.input_layernorm": f"{_BLOCK}.norm1",
        f"{_LAYER}.post_attention_layernorm": f"{_BLOCK}.post_norm1",
        f"{_LAYER}.pre_feedforward_layernorm": f"{_BLOCK}.norm2",
        f"{_LAYER}.post_feedforward_layernorm": f"{_BLOCK}.post_norm2",
        f"{_ATTENTION}.q_norm": f"{_BLOCK}.attn.q_norm",
        f"{_ATTENTION}.k_norm": f"{_BLOCK}.attn.k_norm",
        f"{_ATTENTION}.o_proj.linear": f"{_BLOCK}.attn.proj",
        **{f"{_MLP}.{x}_proj.linear": f"{_BLOCK}.mlp.{x}_proj" for x in ("gate", "up", "down")},
    },
    processor_files=family_facts("gemma4").processors["gemma4"],
)
_BOUNDED = replace(  # E2B and E4B clamp each linear layer's input and output by stored bounds
    _GEMMA4,
    name="gemma4-clipped",
    marks=(f"{_LAYER}.self_attn.q_proj.input_min".replace("N", "0"),),
    renames={
        **{
            name.replace(".linear", ".linear.weight"): f"{encoder_name}.weight"
            if "linear" in name
            else encoder_name
            for name, encoder_name in _GEMMA4.renames.items()
        },
        **{f"{_ATTENTION}.{x}_proj": f"{_BLOCK}.attn.qkv.bounds.{n}" for n, x in enumerate("qkv")},
        f"{_ATTENTION}.o_proj": f"{_BLOCK}.attn.proj.bounds.0",
        **{f"{_MLP}.{x}_proj": f"{_BLOCK}.mlp.{x}_proj.bounds.0" for x in ("gate", "up", "down")},
    },
)

_QKV, _HEAD = "blocks.0.attn.qkv.weight", "blocks.0.attn.q_norm.weight"


def _heads(shapes: Shapes) -> int:
    return shapes[_QKV][0] // 3 // shapes[_HEAD][0]


_CONFIG_FIELDS: Fields = {
    ("num_hidden_layers",): block_count("blocks."),
    ("hidden_size",): length("patch_embed.weight", 0),
    ("intermediate_size",): length("blocks.0.mlp.gate_proj.weight", 0),
    ("head_dim",): length(_HEAD, 0),
    ("num_attention_heads",): _heads,
    ("num_key_value_heads",): _heads,
    ("position_embedding_size",): length("position_embedding_table", 1),
    ("use_clipped_linears",): lambda shapes: "blocks.0.attn.proj.bounds.0.input_min" in shapes,
    ("standardize",): lambda shapes: "std_bias" in shapes,
}
_OUT = "embed_vision.embedding_projection.weight"


def _parse_config(config: JsonObject, shapes: Shapes) -> Gemma4Config:
    """Return the encoder's config from the published ``config`` and the shapes of tensors.

    The encoder gets a projector if the checkpoint has its tensor, whose shape has the output width.
    """
    return replace(Gemma4Config.from_hf(config), out_hidden_size=shapes.get(_OUT, (None,))[0])


GEMMA4 = Family(
    name="gemma4",
    encoder=Gemma4Encoder,
    config=Gemma4Config,
    model_types=with_vision("gemma4"),
    signs=(("patch_embedder.input_proj.weight", "patch_embedder.position_embedding_table"),),
    layouts=(_BOUNDED, _GEMMA4),
    classes=dict.fromkeys(
        ("gemma4", "gemma4-clipped"),
        TransformersClass("gemma4", "Gemma4VisionModel", "gemma4_vision"),
    ),
    fields=_CONFIG_FIELDS,
    outer_fields={("text_config.hidden_size",): length(_OUT, 0)},
    refusals=dict.fromkeys(
        with_vision("gemma4_unified"),
        "Gemma 4 12B has no vision tower: its language model reads patches itself",
    ),
    parse_config=_parse_config,
)
