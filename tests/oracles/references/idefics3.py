"""The reference of Idefics3 and SmolVLM, which is a tower and a connector of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.idefics3 import configuration_idefics3, modeling_idefics3

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State
from .siglip import SIZES, siglip_keys


def idefics3_reference(config: Config) -> nn.Module:
    """Build transformers' tower and connector."""
    width = config["text_config"]["hidden_size"]
    text = {"model_type": "llama", "hidden_size": width, "num_attention_heads": 1}
    wrapped = configuration_idefics3.Idefics3Config(
        vision_config={**vision_of(config), "model_type": "idefics3_vision"},
        text_config=text,
        scale_factor=config["scale_factor"],
    )
    tower = modeling_idefics3.Idefics3VisionTransformer._from_config(
        wrapped.vision_config, attn_implementation="sdpa"
    )
    return nn.ModuleDict(
        {"tower": tower, "connector": modeling_idefics3.Idefics3Connector(wrapped)}
    )


def idefics3_keys(state: State, projection: str = "modality_projection.proj") -> State:
    """Map to the tower and the connector of transformers."""
    body = {key: x for key, x in state.items() if not key.startswith("projector.")}
    return {
        **{f"tower.{key}": x for key, x in siglip_keys(body).items()},
        f"connector.{projection}.weight": state["projector.weight"],
    }


def idefics3_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower, and its connector on square tiles."""
    out = reference["tower"](pixels, output_hidden_states=True)
    return connected(reference["connector"], out, grid_thw, "scale_factor")


def connected(connector: Any, out: Any, grid_thw: Tensor, factor: str) -> EncoderOutput:
    """Project what a tower returned; ``factor`` is the connector's attribute for a square's side.

    Of tiles that are no squares, the squares of patches are laid side by side by plain indexing.
    """
    normed, (h, w) = out.last_hidden_state, grid_thw[0, 1:].tolist()
    if h == w:
        return EncoderOutput(out.hidden_states[-1], connector(normed).flatten(0, 1), ())
    side, maps = getattr(connector, factor), normed.unflatten(1, (h, w))
    tokens = [
        maps[:, r : r + side, c : c + side].flatten(1)
        for r in range(0, h, side)
        for c in range(0, w, side)
    ]
    projected = [connector.modality_projection(token) for token in tokens]
    return EncoderOutput(out.hidden_states[-1], torch.stack(projected, 1).flatten(0, 1), ())


ROWS = [
    make_row(
        "idefics3", "HuggingFaceM4/Idefics3-8B-Llama3", idefics3_reference, idefics3_keys,
        idefics3_output,
        shallow={"num_hidden_layers": 1},
        narrow={**SIZES, "llm_width": 48},
        tiny={**SIZES, "num_hidden_layers": 3, "image_size": 112, "llm_width": 48},
        variant=True,
    ),
]  # fmt: skip
