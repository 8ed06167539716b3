"""The reference of MiniMax-M3, which is a tower and a projector of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as configuration
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, split_qkv
from ..versions import skip_without
from .moonvit import cut

OLDER = ("transformers", "5.23", "in its tower, one image attends to another")
"""Why the tower is not compared with an older reference."""


MINIMAX_M3_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "projector_hidden_size": 40,
    "llm_width": 48,
}


class MiniMaxM3Reference(nn.Module):
    """The tower and the projector of transformers, side by side as in its model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        skip_without(*OLDER)
        published = vision_of(config)
        self.frames = published["vision_segment_max_frames"]
        fields = {k: v for k, v in published.items() if k != "model_type"}
        whole = configuration.MiniMaxM3VLConfig(
            vision_config={**fields, **fields["img_token_compression_config"]},
            text_config={"hidden_size": config["text_config"]["hidden_size"]},
            projector_hidden_size=config["projector_hidden_size"],
        )
        self.tower = modeling.MiniMaxM3VLVisionModel._from_config(
            whole.vision_config, attn_implementation="sdpa"
        )
        self.projector = modeling.MiniMaxM3VLMultiModalProjector(whole)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the tower."""
        return self.tower.layers


def minimax_m3_keys(state: State) -> State:
    """Map to the tower and the projector of transformers."""
    return renamed(
        split_qkv(state, ("q_proj", "k_proj", "v_proj")),
        [
            (r"^patch_embed\.", "tower.embeddings."),
            (r"^norm_pre\.", "tower.pre_layrnorm."),
            (r"^blocks\.", "tower.layers."),
            (r"\.attn\.proj\.", ".self_attn.out_proj."),
            (r"\.attn\.", ".self_attn."),
            (r"\.norm(\d)\.", r".layer_norm\1."),
        ],
    )


def minimax_m3_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on segments, each an item of its own, and its projector."""
    segments = torch.tensor(cut(grid_thw.tolist(), reference.frames), device=pixels.device)
    hidden = reference.tower(pixels, grid_thw=segments).last_hidden_state[0]
    return EncoderOutput(hidden, reference.projector(hidden), ())


ROWS = [
    make_row(
        "minimax_m3", "MiniMaxAI/MiniMax-M3", MiniMaxM3Reference, minimax_m3_keys,
        minimax_m3_output, shallow={"num_hidden_layers": 1},
        narrow=MINIMAX_M3_NARROW, tiny={**MINIMAX_M3_NARROW, "num_hidden_layers": 3},
        slow=True,
        eager=True,
        segment_rows=4,
        block_rows=lambda encoder, grids, seen: [x[0] for x in seen],
    ),
]  # fmt: skip
