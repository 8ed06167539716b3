"""The reference of LFM2-VL, which is a tower and a projector of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.lfm2_vl import configuration_lfm2_vl, modeling_lfm2_vl

from encoders.contract import EncoderOutput
from encoders.lfm.lfm2_vl import Lfm2VLTower

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State
from .siglip import SIZES, siglip2_output, siglip2_reference, siglip_keys

_FIELDS = ("downsample_factor", "projector_hidden_size", "projector_bias", "projector_hidden_act")


def lfm2_reference(config: Config) -> nn.Module:
    """Build transformers' tower and projector."""
    wrapped = configuration_lfm2_vl.Lfm2VlConfig(
        vision_config=vision_of(config),
        text_config={**config["text_config"], "num_attention_heads": 1, "num_key_value_heads": 1},
        projector_use_layernorm=config.get("projector_use_layernorm", True),
        **{name: config[name] for name in _FIELDS},
    )
    projector = modeling_lfm2_vl.Lfm2VlMultiModalProjector(wrapped)
    return nn.ModuleDict({"tower": siglip2_reference(config), "projector": projector})


def lfm2_keys(state: State) -> State:
    """Map to the tower and the projector of transformers."""
    body = {key: x for key, x in state.items() if not key.startswith("projector.")}
    return {
        **{f"tower.{key}": x for key, x in siglip_keys(body).items()},
        **{key: x for key, x in state.items() if key.startswith("projector.")},
    }


def lfm2_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on padded images, and its projector on one image after another."""
    hidden, normed, *_ = siglip2_output(reference["tower"], pixels, grid_thw)
    shapes = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    parts = normed.split([h * w for h, w in shapes])
    tokens = [
        reference["projector"](part.unflatten(0, shape)[None]).flatten(0, -2)
        for part, shape in zip(parts, shapes, strict=True)
    ]
    width = reference["projector"].linear_2.out_features
    return EncoderOutput(hidden, torch.cat([*tokens, normed.new_zeros(0, width)]), ())


ROWS = [
    make_row(
        "lfm2_vl", "LiquidAI/LFM2-VL-450M", lfm2_reference, lfm2_keys, lfm2_output,
        shallow={"num_hidden_layers": 2},
        narrow={**SIZES, "llm_width": 48},
        tiny={**SIZES, "num_hidden_layers": 3, "llm_width": 48},
        tower=Lfm2VLTower,
        slow=True,
        required=("num_attention_heads",),
        casts=(("to", "float"),),  # of positions: by ``to``, and from 5.24 on by ``float``
    ),
    make_row(
        "lfm2_5_vl", "LiquidAI/LFM2.5-VL-1.6B", lfm2_reference, lfm2_keys, lfm2_output,
        shallow={"num_hidden_layers": 2},
        narrow={**SIZES, "llm_width": 48},
        tiny={**SIZES, "num_hidden_layers": 3, "llm_width": 48},
        variant=True,
        tower=Lfm2VLTower,
        casts=(("to", "float"),),  # of positions: by ``to``, and from 5.24 on by ``float``
    ),
]  # fmt: skip
