"""The reference of SAM 3's image encoder, which is a model of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.sam3 import configuration_sam3, modeling_sam3

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, split_qkv

SAM3_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "window_size": 2,
    "pretrain_image_size": 56,
    "fpn_hidden_size": 48,
    "scale_factors": [1.0],
}
"""Small widths, and windows so small that views of an even number of patches need no padding."""


def sam3_reference(config: Config) -> nn.Module:
    """Build transformers' Sam3VisionModel."""
    wrapped = configuration_sam3.Sam3VisionConfig(**vision_of(config))
    return modeling_sam3.Sam3VisionModel._from_config(wrapped, attn_implementation="sdpa")


def sam3_keys(state: State) -> State:
    """Map to the names of the modules of transformers' Sam3VisionModel."""
    state = split_qkv(state, ("q_proj", "k_proj", "v_proj"))
    state["backbone.embeddings.position_embeddings"] = state.pop("pos_embed")[None]
    return renamed(
        state,
        [
            (r"^patch_embed\.proj\.", "backbone.embeddings.patch_embeddings.projection."),
            (r"^norm_pre\.", "backbone.layer_norm."),
            (r"^blocks\.", "backbone.layers."),
            (r"\.norm([12])\.", r".layer_norm\1."),
            (r"\.attn\.proj\.", ".attention.o_proj."),
            (r"\.attn\.", ".attention."),
            (r"^neck\.", "neck.fpn_layers."),
        ],
    )


def sam3_maps(reference: Any, pixels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the hidden states of views of any size, [B, n, D], and all levels of the neck.

    Each block gets the positions that it has if the config has views of this size.
    """
    config, (h, w) = reference.config.backbone_config, pixels.shape[2:]
    config.image_size = [w, h]  # the order in which the blocks read it
    for layer in reference.backbone.layers:
        places = layer.precompute_positions(config, layer.window_size)
        layer.position_ids = places.to(pixels.device)
    out = reference(pixels)
    return out.last_hidden_state, out.fpn_hidden_states


def sam3_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' encoder; take the level of the neck that has the patches' resolution."""
    hidden, levels = sam3_maps(reference, pixels)
    level = levels[reference.config.scale_factors.index(1.0)]
    return EncoderOutput(hidden, level.flatten(2).mT.flatten(0, 1), ())


ROWS = [
    make_row(
        "sam3", "facebook/sam3", sam3_reference, sam3_keys, sam3_output,
        shallow={
            "num_hidden_layers": 2, "global_attn_indexes": [1], "window_size": 2,
            "scale_factors": [1.0],
        },
        narrow=SAM3_NARROW,
        tiny={
            **SAM3_NARROW, "num_hidden_layers": 3, "global_attn_indexes": [1], "image_size": 112,
        },
        slow=True,
        eager=True,
        six={"num_hidden_layers": 6, "global_attn_indexes": [2, 5], "window_size": 8},
        unread=("neck.0.", "neck.1.", "neck.3."),
        not_in_tensors=("global_blocks",),
        blocks=lambda reference: reference.backbone.layers,
        block_rows=lambda encoder, grids, seen: [x.flatten(1, 2) for x in seen],
    ),
]  # fmt: skip
