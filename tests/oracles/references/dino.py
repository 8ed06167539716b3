"""The references of DINOv2 and DINOv3, which are models of transformers.

Shapes: P packed patches, r rows before the patches of an image (class token, registers).
"""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.models.dinov2 import configuration_dinov2, modeling_dinov2
from transformers.models.dinov2_with_registers import (
    configuration_dinov2_with_registers,
    modeling_dinov2_with_registers,
)
from transformers.models.dinov3_vit import configuration_dinov3_vit, modeling_dinov3_vit

from encoders.contract import EncoderOutput

from ..configs import Config
from ..family import by_frame, make_row
from ..keys import State, renamed, split_qkv
from ..versions import skip_without
from .siglip import SIZES, interpolate_any

OLDER = ("transformers", "5.18", "the parameters of its Dinov2Model have other names")
"""Why the tower is not compared with an older reference."""


DINO_NARROW = {"hidden_size": 64, "num_attention_heads": 4, "mlp_ratio": 2}
"""Widths of small towers, by the names of transformers' configs."""

_COORDINATES = modeling_dinov3_vit.get_patches_center_coordinates.__wrapped__
"""The coordinates of DINOv3's patches without the cache, which is one for float32 and float64."""


def dinov2_reference(config: Config) -> nn.Module:
    """Build transformers' Dinov2Model, or Dinov2WithRegistersModel."""
    skip_without(*OLDER)
    kind = {key: value for key, value in config.items() if key != "model_type"}
    model: Any
    if config["model_type"] == "dinov2":
        wrapped: Any = configuration_dinov2.Dinov2Config(**kind)
        model = modeling_dinov2.Dinov2Model
    else:
        wrapped = configuration_dinov2_with_registers.Dinov2WithRegistersConfig(**kind)
        model = modeling_dinov2_with_registers.Dinov2WithRegistersModel
    built: nn.Module = model._from_config(wrapped, attn_implementation="sdpa")
    return built


def dinov2_keys(state: State) -> State:
    """Map to the names of the modules of transformers' Dinov2Model."""
    state = split_gates(split_qkv(state, ("q_proj", "k_proj", "v_proj")))
    state["embeddings.position_embeddings"] = state.pop("pos_embed.weight")[None]
    return renamed(
        state,
        [
            (r"^(cls_token|mask_token|register_tokens)$", r"embeddings.\1"),
            (r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
            (r"^blocks\.", "encoder.layer."),
            (r"\.attn\.proj\.", ".attention.o_proj."),
            (r"\.attn\.", ".attention."),
            (r"\.ls([12])$", r".layer_scale\1.lambda1"),
            (r"^norm\.", "layernorm."),
        ],
    )


def dinov3_reference(config: Config) -> nn.Module:
    """Build transformers' DINOv3ViTModel."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    wrapped = configuration_dinov3_vit.DINOv3ViTConfig(**fields)
    return modeling_dinov3_vit.DINOv3ViTModel._from_config(wrapped, attn_implementation="sdpa")


def dinov3_keys(state: State) -> State:
    """Map to the names of the modules of transformers' DINOv3ViTModel."""
    return renamed(
        split_gates(split_qkv(state, ("q_proj", "k_proj", "v_proj"))),
        [
            (r"^(cls_token|mask_token|register_tokens)$", r"embeddings.\1"),
            (r"^patch_embed\.proj\.", "embeddings.patch_embeddings."),
            (r"^blocks\.", "model.layer."),
            (r"\.attn\.qkv\.([qv])_bias$", r".attention.\1_proj.bias"),
            (r"\.attn\.proj\.", ".attention.o_proj."),
            (r"\.attn\.", ".attention."),
            (r"\.ls([12])$", r".layer_scale\1.lambda1"),
            (r"\.mlp\.fc1\.", ".mlp.up_proj."),
            (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        ],
    )


def split_gates(state: State) -> State:
    """Split every layer of gate and up in one, which is twice as wide as it should be, into two."""
    out: State = {}
    for key, value in state.items():
        match = re.fullmatch(r"(.*\.mlp)\.fc([12])\.(weight|bias)", key)
        if not match or not _is_gated(state, match[1]):
            out[key] = value
        elif match[2] == "2":
            out[f"{match[1]}.down_proj.{match[3]}"] = value
        else:
            gate, up = value.chunk(2)
            out[f"{match[1]}.gate_proj.{match[3]}"] = gate
            out[f"{match[1]}.up_proj.{match[3]}"] = up
    return out


def _is_gated(state: State, mlp: str) -> bool:
    return len(state[f"{mlp}.fc1.weight"]) == 2 * state[f"{mlp}.fc2.weight"].shape[1]


def dino_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on one frame at a time; take patches, and the rows before them."""
    parts = []
    frames = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    for (h, w), rows in zip(frames, pixels.split([h * w for h, w in frames]), strict=True):
        with (
            patch.object(torch.nn.functional, "interpolate", interpolate_any),
            patch.object(modeling_dinov3_vit, "get_patches_center_coordinates", _COORDINATES),
        ):
            out = reference(image_of(rows, h, w), output_hidden_states=True)
        parts.append((out.hidden_states[-1][0], out.last_hidden_state[0], h * w))
    hidden = torch.cat([states[-count:] for states, _, count in parts])
    normed = torch.cat([tokens[-count:] for _, tokens, count in parts])
    prefix = torch.stack([tokens[:-count] for _, tokens, count in parts])
    return EncoderOutput(hidden, normed, (), {"prefix": prefix})


def image_of(rows: Tensor, h: int, w: int) -> Tensor:
    """Return the patches [h*w, 3*p*p] of one image as a batch of that image."""
    side = round((rows.shape[1] / 3) ** 0.5)
    return rearrange(rows, "(h w) (c p q) -> 1 c (h p) (w q)", h=h, w=w, p=side, q=side)


ROWS = [
    make_row(
        "dinov2", "facebook/dinov2-base", dinov2_reference, dinov2_keys, dino_output,
        shallow={"num_hidden_layers": 2},
        narrow=DINO_NARROW,
        tiny={**DINO_NARROW, "num_hidden_layers": 3, "image_size": 112},
        renamed=True,
        required=("num_attention_heads",),
        casts=(("to", "float"),),  # of positions: by ``to``, and from 5.24 on by ``float``
        blocks=lambda reference: reference.encoder.layer, block_rows=by_frame,
        alone=lambda model, pixels, grids: dino_output(model, pixels, grids).pooler_output,
    ),
    make_row(
        "dinov2_registers", "facebook/dinov2-with-registers-giant", dinov2_reference, dinov2_keys,
        dino_output,
        shallow={"num_hidden_layers": 1},
        narrow=DINO_NARROW,
        tiny={**DINO_NARROW, "num_hidden_layers": 3, "image_size": 112},
        variant=True,
        casts=(("to", "float"),),  # of positions: by ``to``, and from 5.24 on by ``float``
        alone=lambda model, pixels, grids: dino_output(model, pixels, grids).pooler_output,
    ),
    make_row(
        "dinov3", "facebook/dinov3-vitb16-pretrain-lvd1689m", dinov3_reference, dinov3_keys,
        dino_output,
        shallow={"num_hidden_layers": 2},
        narrow=SIZES,
        tiny={**SIZES, "num_hidden_layers": 3},
        renamed=True,
        required=("num_attention_heads",),
        casts=(("arange",),),
        blocks=lambda reference: reference.model.layer, block_rows=by_frame,
        alone=lambda model, pixels, grids: dino_output(model, pixels, grids).pooler_output,
    ),
    make_row(
        "dinov3_plus", "facebook/dinov3-vith16plus-pretrain-lvd1689m", dinov3_reference,
        dinov3_keys, dino_output,
        shallow={"num_hidden_layers": 1},
        narrow=SIZES,
        tiny={**SIZES, "num_hidden_layers": 3},
        variant=True,
        casts=(("arange",),),
        alone=lambda model, pixels, grids: dino_output(model, pixels, grids).pooler_output,
    ),
]  # fmt: skip
