"""The reference of Llama 4, which is a tower and a projector of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.llama4 import configuration_llama4, modeling_llama4

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, split_qkv

LLAMA4_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "projector_input_dim": 40,
    "projector_output_dim": 40,
    "vision_output_dim": 40,
    "llm_width": 48,
}


def llama4_reference(config: Config) -> nn.Module:
    """Build transformers' tower and projector."""
    text = {"hidden_size": config["text_config"]["hidden_size"]}
    wrapped = configuration_llama4.Llama4Config(vision_config=vision_of(config), text_config=text)
    tower = modeling_llama4.Llama4VisionModel._from_config(
        wrapped.vision_config, attn_implementation="sdpa"
    )
    projector = modeling_llama4.Llama4MultiModalProjector(wrapped)
    return nn.ModuleDict({"tower": tower, "projector": projector})


def llama4_keys(state: State) -> State:
    """Map to the tower and the projector of transformers."""
    return renamed(
        split_qkv(state, ("q_proj", "k_proj", "v_proj")),
        [
            (r"^(?!projector)", "tower."),
            (r"^projector\.", "projector.linear_1."),
            (r"\.patch_embed\.", ".patch_embedding.linear."),
            (r"\.pos_embed$", ".positional_embedding_vlm"),
            (r"^tower\.norm_pre\.", "tower.layernorm_pre."),
            (r"^tower\.norm\.", "tower.layernorm_post."),
            (r"^tower\.blocks\.", "tower.model.layers."),
            (r"\.attn\.proj\.", ".self_attn.o_proj."),
            (r"\.attn\.", ".self_attn."),
            (r"\.norm1\.", ".input_layernorm."),
            (r"\.norm2\.", ".post_attention_layernorm."),
            (r"\.adapter\.", ".vision_adapter.mlp."),
        ],
    )


def llama4_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on tiles of any size, then its projector.

    For another size than the published one, the tower gets the resized table of positions and the
    angles that it has for a square of such tiles; pixel shuffle takes a square alone.
    """
    tower, (h, w) = reference["tower"], grid_thw[0, 1:].tolist()
    config, freqs = tower.config, tower.rotary_embedding.freqs_ci
    own, table = config.image_size // config.patch_size, tower.positional_embedding_vlm
    if (h, w) != (own, own):
        grid = table[:-1].T.unflatten(1, (own, own))[None]
        grid = nn.functional.interpolate(grid, (h, w), mode="bicubic")[0]
        table = torch.cat((grid.flatten(1).T, table[-1:]))
        freqs = _freqs(tower, h, w).to(freqs.dtype)
    changed = {"positional_embedding_vlm": table, "rotary_embedding.freqs_ci": freqs}
    shuffle = modeling_llama4.pixel_shuffle if h == w else partial(_shuffle, h=h, w=w)
    with patch.object(modeling_llama4, "pixel_shuffle", shuffle):
        out = functional_call(tower, changed, (pixels,), {"output_hidden_states": True})
    tokens = reference["projector"](out.last_hidden_state).flatten(0, 1)
    return EncoderOutput(out.hidden_states[-1].roll(1, dims=1), tokens, ())


def _freqs(tower: Any, h: int, w: int) -> Tensor:
    """Return transformers' angles of the first rows and columns of a square, and the class's."""
    side = max(h, w)
    config = type(tower.config)(
        **{**tower.config.to_dict(), "image_size": side * tower.config.patch_size}
    )
    square = tower.rotary_embedding._compute_freqs_ci(config)
    return torch.cat((square[:-1].unflatten(0, (side, side))[:h, :w].flatten(0, 1), square[-1:]))


def _shuffle(patches: Tensor, ratio: float, h: int, w: int) -> Tensor:
    """Lay each 2x2 patches of [B, h*w, D] side by side, by plain indexing."""
    maps = patches.unflatten(1, (h, w))
    tokens = [
        maps[:, r : r + 2, c : c + 2].flatten(1) for r in range(0, h, 2) for c in range(0, w, 2)
    ]
    return torch.stack(tokens, 1)


ROWS = [
    make_row(
        "llama4", "meta-llama/Llama-4-Scout-17B-16E-Instruct", llama4_reference, llama4_keys,
        llama4_output,
        shallow={"num_hidden_layers": 1},
        narrow=LLAMA4_NARROW,
        tiny={**LLAMA4_NARROW, "num_hidden_layers": 3, "image_size": 112},
        slow=True,
        eager=True,
        blocks=lambda reference: reference["tower"].model.layers,
        # The reference puts the class token last.
        block_rows=lambda encoder, grids, seen: [x[0].roll(1, dims=1) for x in seen],
    ),
]  # fmt: skip
