"""The reference of HunyuanOCR, which is the class of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.hunyuan_vl import configuration_hunyuan_vl, modeling_hunyuan_vl

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, split_qkv

HUNYUAN_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_image_size": 128,
    "llm_width": 40,
}


def hunyuan_vl_reference(config: Config) -> nn.Module:
    """Build transformers' tower, whose merger has the width of the language model."""
    fields = {**vision_of(config), "text_hidden_size": config["text_config"]["hidden_size"]}
    tower = modeling_hunyuan_vl.HunYuanVLVisionTransformer._from_config(
        configuration_hunyuan_vl.HunYuanVLVisionConfig(**fields), attn_implementation="sdpa"
    )
    del tower.patch_merger.image_sep  # which it never reads
    return nn.ModuleDict({"tower": tower})


def hunyuan_vl_keys(state: State) -> State:
    """Map to the tower of transformers."""
    return renamed(
        split_qkv(state, ("q_proj", "k_proj", "v_proj")),
        [
            (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
            (r"^pos_embed\.", "embeddings.position_embedding."),
            (r"^blocks\.", "layers."),
            (r"\.attn\.proj\.", ".self_attn.o_proj."),
            (r"\.attn\.", ".self_attn."),
            (r"\.norm(\d)\.", r".layer_norm\1."),
            (r"^merger\.", "patch_merger."),
            (r"^", "tower."),
        ],
    )


def hunyuan_vl_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower; it takes each frame as an image."""
    frames = grid_thw.repeat_interleave(grid_thw[:, 0], 0)
    frames[:, 0] = 1
    output = reference["tower"](pixels, frames)
    return EncoderOutput(output.last_hidden_state[0], output.pooler_output[0], ())


ROWS = [
    make_row(
        "hunyuan_vl",
        "tencent/HunyuanOCR",
        hunyuan_vl_reference,
        hunyuan_vl_keys,
        hunyuan_vl_output,
        shallow={"num_hidden_layers": 1},
        narrow=HUNYUAN_NARROW,
        tiny={**HUNYUAN_NARROW, "num_hidden_layers": 3},
        slow=True,
        blocks=lambda reference: reference["tower"].layers,
        block_rows=lambda encoder, grids, seen: [x[0] for x in seen],
        casts=(("float",),),  # of the table of positions
        learned=lambda rows, columns: rows + 2,
    ),
]
