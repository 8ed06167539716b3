"""The reference of Molmo2, which is a model of transformers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from encoders.allenai.molmo2 import Molmo2Config, Molmo2Tower
from encoders.contract import EncoderOutput

from ..configs import Config
from ..family import make_row
from ..keys import State, renamed, split_qkv
from .siglip import interpolate_any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "adapter": {"text_hidden_size": 48, "intermediate_size": 80},
}


def molmo2_reference(config: Config) -> nn.Module:
    """Build the tower of transformers' Molmo2Model, which 5.22 and older may lack."""
    reference: nn.Module = molmo2_model(Molmo2Config.from_hf(config)).vision_tower
    return reference


def molmo2_model(sizes: Molmo2Config) -> Any:
    """Build transformers' Molmo2Model with a language model of one layer."""
    modeling: Any = pytest.importorskip("transformers.models.molmo2.modeling_molmo2")
    heads = {"num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_heads}
    pool_heads = dict.fromkeys(heads, sizes.pool_heads)
    head_dim, width = sizes.hidden_size // sizes.num_heads, {"hidden_size": sizes.hidden_size}
    config = modeling.Molmo2Config(
        vision_config={
            **width,
            **heads,
            "head_dim": head_dim,
            "num_hidden_layers": sizes.depth,
            "intermediate_size": sizes.intermediate_size,
            "patch_size": sizes.patch_size,
            "image_size": [sizes.image_size] * 2,
            "layer_norm_eps": sizes.layer_norm_eps,
            "num_channels": sizes.in_channels,
        },
        adapter_config={
            **width,
            **pool_heads,
            "head_dim": sizes.hidden_size // sizes.pool_heads,
            "intermediate_size": sizes.projector_size,
            "text_hidden_size": sizes.out_hidden_size,
            "vision_feature_layer": list(sizes.vit_layers),
        },
        text_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "vocab_size": 60,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "additional_vocab_size": 0,
        },
    )
    model = modeling.Molmo2Model._from_config(config, attn_implementation="sdpa")
    model.vision_tower.read = sizes.vit_layers
    return model


def molmo2_keys(state: State) -> State:
    """Map to the tower of transformers' Molmo2Model, which encodes views and pools none."""
    outside = ("pool.", "projector.")
    return molmo2_names({key: x for key, x in state.items() if not key.startswith(outside)})


def molmo2_names(state: State) -> State:
    """Map to transformers' Molmo2Model, without the name of its tower."""
    return renamed(
        split_qkv(state, ("q_proj", "k_proj", "v_proj")),
        [
            (r"^pos_embed$", "positional_embedding"),
            (r"^patch_embed\.", "patch_embedding."),
            (r"^blocks\.", "layers."),
            (r"\.norm(\d)\.", r".layer_norm\1."),
            (r"\.attn\.proj\.", ".self_attn.o_proj."),
            (r"\.attn\.", ".self_attn."),
        ],
    )


def molmo2_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on views; put the outputs of the layers that are read side by side.

    It takes views of one size. For others, its positions are interpolated as in vLLM.
    """
    h, w = grid_thw[0, 1:].tolist()
    table, side = reference.positional_embedding, reference.config.patch_size
    count = round(len(table) ** 0.5)
    if (h, w) != (count, count):
        square = table.unflatten(0, (count, count)).permute(2, 0, 1)[None]
        options = {"mode": "bicubic", "align_corners": False, "antialias": True}
        resized = interpolate_any(square, size=(h, w), **options)
        table = nn.Parameter(resized[0].flatten(1).T, requires_grad=False)
    rows = pixels.unfold(2, side, side).unfold(3, side, side)  # [B, C, h, w, p, q]
    patches = rows.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    with patch.dict(reference._parameters, positional_embedding=table):
        out = reference(patches, output_hidden_states=True)
    read = [out.hidden_states[layer + 1] for layer in reference.read]
    return EncoderOutput(out.last_hidden_state, torch.cat(read, -1).flatten(0, 1), ())


ROWS = [
    make_row(
        "molmo2",
        "allenai/Molmo2-4B",
        molmo2_reference,
        molmo2_keys,
        molmo2_output,
        shallow={"num_hidden_layers": 1, "adapter": {"vit_layers": [0, 0]}},
        narrow={  # SigLIP's row has all blocks
            **SIZES,
            "num_hidden_layers": 4,
            "adapter": {**SIZES["adapter"], "vit_layers": [3, 1]},
        },
        tiny={
            **SIZES,
            "num_hidden_layers": 3,
            "image_default_input_size": [140, 140],
            "image_num_pos": 100,
            "adapter": {**SIZES["adapter"], "vit_layers": [-1, -3]},
        },
        blocks=lambda reference: reference.layers,
        variant=True,
        tower=Molmo2Tower,
        required=("num_attention_heads",),
        unread=("pool.", "projector."),
    ),
]
