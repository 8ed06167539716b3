"""Gemma 4's tower and projector of transformers, run frame by frame without padding."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import by_frame, make_row
from ..keys import State, renamed
from ..sizes import GEMMA4_NARROW


def gemma4_reference(config: Config) -> nn.Module:
    """Build transformers' tower and projector from a published config."""
    vision = Gemma4VisionConfig(**vision_of(config))
    text = SimpleNamespace(hidden_size=config["text_config"]["hidden_size"])
    tower = Gemma4VisionModel._from_config(vision, attn_implementation="sdpa")
    embedder = Gemma4MultimodalEmbedder(vision, text)
    return nn.ModuleDict({"vision_tower": tower, "embed_vision": embedder})


def gemma4_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a tower over each frame, and its projector.

    ``last_hidden_state`` is what the last block returned. The pixels, from -1 to 1, are brought to
    those from 0 to 1 that the tower takes.
    """
    tower, states, tokens = reference["vision_tower"], list[Tensor](), []
    hook = tower.encoder.register_forward_hook(lambda *call: states.append(call[2][0][0]))
    for rows, places in zip(*frames(pixels, grid_thw), strict=True):
        out = tower(pixel_values=rows[None] / 2 + 0.5, pixel_position_ids=places[None])
        tokens.append(reference["embed_vision"](out.last_hidden_state))
    hook.remove()
    return EncoderOutput(torch.cat(states), torch.cat(tokens), ())


def frames(pixels: Tensor, grid_thw: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows of each frame, and column and row of each of its patches."""
    sizes = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    places = [torch.tensor([[c, r] for r in range(h) for c in range(w)]) for h, w in sizes]
    return list(pixels.split([h * w for h, w in sizes])), [x.to(pixels.device) for x in places]


def gemma4_keys(state: State) -> State:
    """Map to the names of transformers, which are the published ones."""
    split: State = {}
    for key, value in state.items():
        if match := re.fullmatch(r"(.*attn\.)qkv\.weight", key):
            for name, part in zip("qkv", value.chunk(3), strict=True):
                split[f"{match[1]}{name}_proj.weight"] = part
        else:
            split[key] = value
    has_bounds = any("bounds" in key for key in state)
    rules = [
        *((rf"attn\.qkv\.bounds\.{n}\.", f"attn.{name}_proj.") for n, name in enumerate("qkv")),
        (r"attn\.proj\.", "attn.o_proj."),
        (r"\.bounds\.0\.", "."),
        (r"(blocks.*_proj)\.weight$", r"\1.linear.weight"),
        (r"\.attn\.", ".self_attn."),
        (r"\.norm1\.", ".input_layernorm."),
        (r"\.post_norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".pre_feedforward_layernorm."),
        (r"\.post_norm2\.", ".post_feedforward_layernorm."),
        (r"^blocks\.", "encoder.layers."),
        (r"^patch_embed\.", "patch_embedder.input_proj."),
        (r"^position_embedding_table$", "patch_embedder.position_embedding_table"),
        (r"^(?!embed_vision)", "vision_tower."),
    ]
    out = renamed(split, rules)
    assert has_bounds == any("input_min" in key for key in out)
    return out


ROWS = [
    make_row(
        "gemma4", "google/gemma-4-31B-it", gemma4_reference, gemma4_keys, gemma4_output,
        shallow={"num_hidden_layers": 2},
        narrow=GEMMA4_NARROW,
        tiny={**GEMMA4_NARROW, "num_hidden_layers": 3, "pooling_kernel_size": 2},
        slow=True,
        eager=True,
        blocks=lambda reference: reference["vision_tower"].encoder.layers,
        block_rows=by_frame,
    ),
    make_row(
        "gemma4_e2b", "google/gemma-4-E2B-it", gemma4_reference, gemma4_keys, gemma4_output,
        shallow={"num_hidden_layers": 2},
        narrow=GEMMA4_NARROW,
        tiny={**GEMMA4_NARROW, "num_hidden_layers": 3, "pooling_kernel_size": 2},
        variant=True,
        eager=True,
    ),
]  # fmt: skip
