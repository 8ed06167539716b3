"""transformers' tower and projector of Kimi-K2.5, which is Kimi-VL's tower for images, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config, Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import (
    Kimi_K25MultimodalProjection,
    Kimi_K25VisionModel,
)

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, split_qkv
from .step import HeadsInHalves

SIZES = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4}
"""Widths of small towers, by the names of transformers' configs."""
KIMI_VL = {**SIZES, "llm_width": 48}
KIMI_K25 = {f"vt_{name}": size for name, size in SIZES.items()} | {
    "mm_hidden_size": 64,
    "llm_width": 48,
}
"""The same widths by the names of Kimi-K2.5's published config, and that of a language model."""


class MoonViTReference(HeadsInHalves):
    """The tower and the projector of transformers, side by side as in its model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        published = vision_of(config)
        fields = {
            name: published.get(f"vt_{name}", published.get(name))
            for name in (*SIZES, "num_hidden_layers", "patch_size", "merge_kernel_size")
        }
        sides = {
            f"pos_emb_{axis}": published[f"init_pos_emb_{axis}"] for axis in ("height", "width")
        }
        vision = Kimi_K25VisionConfig(**fields, **sides)
        whole = Kimi_K25Config(
            vision_config=vision,
            text_config={"hidden_size": config["text_config"]["hidden_size"]},
            projection_hidden_size=vision.hidden_size,
        )
        self.frames = published.get("init_pos_emb_time", 1)
        self.heads = vision.num_attention_heads
        self.vision_tower = Kimi_K25VisionModel._from_config(vision, attn_implementation="sdpa")
        self.mm_projector = Kimi_K25MultimodalProjection(whole)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the tower."""
        return self.vision_tower.layers


def moonvit_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a reference on one segment after the other: it takes none of different lengths.

    Its own last hidden state is the normed one, so that of the last block is read where it leaves
    the block.
    """
    states: list[Tensor] = []
    hook = reference.blocks[-1].register_forward_hook(lambda *args: states.append(args[2]))
    segments = cut(grid_thw.tolist(), reference.frames)
    tokens, side = [], reference.vision_tower.config.patch_size
    images = pixels.unflatten(1, (3, side, side)).split([f * h * w for f, h, w in segments])
    for rows, segment in zip(images, segments, strict=True):
        grid = torch.tensor([segment], device=pixels.device)
        pooled = reference.vision_tower(rows, grid).pooler_output
        tokens.append(reference.mm_projector(pooled).squeeze(1))
    hook.remove()
    return EncoderOutput(torch.cat(states), torch.cat(tokens), ())


def cut(grids: list[list[int]], most: int) -> list[list[int]]:
    """Cut items into segments of at most ``most`` frames, by plain loops."""
    segments = []
    for t, h, w in grids:
        left = t
        while left:
            segments.append([min(most, left), h, w])
            left -= segments[-1][0]
    return segments


def moonvit_keys(state: State) -> State:
    """Map to transformers' names, queries, keys and values apart, and the table as a square."""
    table = state["pos_embed.weight"]
    side = round(len(table) ** 0.5)
    square = {**state, "pos_embed.weight": table.unflatten(0, (side, side))}
    return renamed(
        split_qkv(square, ("q_proj", "k_proj", "v_proj")),
        [
            (r"^projector\.linear_1\.", "mm_projector.in_proj."),
            (r"^projector\.linear_2\.", "mm_projector.out_proj."),
            (r"^projector\.", "mm_projector."),
            (r"^pos_embed\.weight", "patch_embed.pos_emb.position_embeddings"),
            (r"^norm\.", "final_layernorm."),
            (r"^blocks\.", "layers."),
            (r"^(patch_embed|layers|final_layernorm)\.", r"vision_tower.\1."),
        ],
    )


ROWS = [
    make_row(
        "moonvit", "moonshotai/Kimi-K2.5", MoonViTReference, moonvit_keys, moonvit_output,
        shallow={"vt_num_hidden_layers": 2},
        narrow=KIMI_K25, tiny={**KIMI_K25, "vt_num_hidden_layers": 3},
        slow=True,
        eager=True,
        joins=True,
        segment_rows=4,
        # The reference runs once per segment.
        block_rows=lambda encoder, grids, seen: [torch.cat(seen[block::3]) for block in range(3)],
    ),
    make_row(
        "kimi_vl", "moonshotai/Kimi-VL-A3B-Instruct", MoonViTReference, moonvit_keys,
        moonvit_output, shallow={"num_hidden_layers": 2},
        narrow=KIMI_VL, tiny={**KIMI_VL, "num_hidden_layers": 3}, variant=True,
        eager=True,
    ),
]  # fmt: skip
