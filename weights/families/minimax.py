"""The tower of MiniMax-M3, as MiniMax publishes it.

Source of the names: the index of MiniMaxAI/MiniMax-M3, and the conversion of names of
``MiniMaxM3SparseForConditionalGeneration`` of transformers 5.23.0, which writes these names, too.
"""

from __future__ import annotations

from math import isqrt

from encoders import MiniMaxM3Config, MiniMaxM3Encoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, block_count, length, with_vision

_LAYER, _BLOCK = "encoder.layers.N", "blocks.N"
_LAYOUT = Layout(
    name="minimax-m3",
    prefixes=(Prefix("", "vision_tower.vision_model."), Prefix("", "")),
    marks=("pre_layrnorm.",),
    projector=("multi_modal_projector.", "patch_merge_mlp."),
    joins={f"{_BLOCK}.attn.qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv")},
    renames={
        "embeddings.patch_embedding": "patch_embed.proj",
        "pre_layrnorm": "norm_pre",
        f"{_LAYER}.layer_norm1": f"{_BLOCK}.norm1",
        f"{_LAYER}.self_attn.out_proj": f"{_BLOCK}.attn.proj",
        f"{_LAYER}.layer_norm2": f"{_BLOCK}.norm2",
        f"{_LAYER}.mlp": f"{_BLOCK}.mlp",
        "multi_modal_projector.linear_1": "projector.linear_1",
        "multi_modal_projector.linear_2": "projector.linear_2",
        "patch_merge_mlp.linear_1": "projector.merge_linear_1",
        "patch_merge_mlp.linear_2": "projector.merge_linear_2",
    },
    processor_files=family_facts("minimax_m3").processors["minimax-m3"],
)
_RAW_LAYER = "layers.N"
_RAW = Layout(  # the names of the modules of transformers 5.24, as ``state_dict`` has them
    name="minimax-m3-transformers",
    prefixes=(Prefix("model.", "vision_tower."), Prefix("", "vision_tower."), Prefix("", "")),
    marks=("embeddings.proj.",),
    projector=("multi_modal_projector.",),
    joins={f"{_BLOCK}.attn.qkv": tuple(f"{_RAW_LAYER}.self_attn.{part}_proj" for part in "qkv")},
    renames={
        "embeddings.proj": "patch_embed.proj",
        "pre_layrnorm": "norm_pre",
        f"{_RAW_LAYER}.layer_norm1": f"{_BLOCK}.norm1",
        f"{_RAW_LAYER}.self_attn.out_proj": f"{_BLOCK}.attn.proj",
        f"{_RAW_LAYER}.layer_norm2": f"{_BLOCK}.norm2",
        f"{_RAW_LAYER}.mlp": f"{_BLOCK}.mlp",
        "multi_modal_projector": "projector",
    },
    processor_files=_LAYOUT.processor_files,
)
_PATCH, _MERGE = "patch_embed.proj.weight", "projector.merge_linear_1.weight"
_OUT = "projector.merge_linear_2.weight"
_SIZES = "img_token_compression_config"

MINIMAX_M3 = Family(
    name="minimax_m3",
    encoder=MiniMaxM3Encoder,
    config=MiniMaxM3Config,
    model_types=with_vision("minimax_m3_vl"),
    signs=(("patch_merge_mlp.linear_1.weight", "pre_layrnorm.weight"),),
    layouts=(_RAW, _LAYOUT),
    fields={  # the number of heads cannot be inferred from shapes
        ("hidden_size",): length(_PATCH, 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("patch_size",): length(_PATCH, 4),
        (f"{_SIZES}.temporal_patch_size", "temporal_patch_size"): length(_PATCH, 2),
        (f"{_SIZES}.spatial_merge_size", "spatial_merge_size"): lambda shapes: isqrt(
            shapes[_MERGE][1] // shapes[_OUT][0]
        ),
    },
    outer_fields={
        ("text_config.hidden_size",): length(_OUT, 0),
        ("projector_hidden_size",): length("projector.linear_1.weight", 0),
    },
)
