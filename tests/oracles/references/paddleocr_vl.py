"""The reference of PaddleOCR-VL, which is a tower and a projector of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.paddleocr_vl import configuration_paddleocr_vl, modeling_paddleocr_vl

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State
from ..sizes import PADDLE_NARROW
from ..versions import skip_without
from .siglip import siglip_keys

OLDER = ("transformers", "5.23", "it interpolates positions with aligned corners")
"""Why the tower is not compared with an older reference."""


def paddle_reference(config: Config) -> nn.Module:
    """Build transformers' tower and projector."""
    skip_without(*OLDER)
    fields = {name: value for name, value in vision_of(config).items() if name != "model_type"}
    wrapped = configuration_paddleocr_vl.PaddleOCRVLConfig(
        vision_config=fields, text_config={"hidden_size": config["hidden_size"]}
    )
    tower = modeling_paddleocr_vl.PaddleOCRVisionModel._from_config(
        wrapped.vision_config, attn_implementation="sdpa"
    )
    projector = modeling_paddleocr_vl.PaddleOCRProjector(wrapped)
    return nn.ModuleDict({"tower": tower, "projector": projector})


def paddle_keys(state: State) -> State:
    """Map to the tower and the projector of transformers."""
    plain = {key.replace("pos_embed.weight", "pos_embed"): x for key, x in state.items()}
    body = {key: x for key, x in plain.items() if not key.startswith("projector.")}
    return {
        **{f"tower.vision_model.{key}": x for key, x in siglip_keys(body).items()},
        **{key: x for key, x in state.items() if key.startswith("projector.")},
    }


def paddle_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower, whose last hidden state is what follows the norm, and projector.

    A frame of a clip is an image of its own, since this tower has no time.
    """
    side = reference["tower"].config.patch_size
    patches = pixels.view(1, -1, 3, side, side)
    seen: list[Tensor] = []
    last = reference["tower"].vision_model.encoder.layers[-1]
    hook = last.register_forward_hook(lambda module, args, out: seen.append(out))
    normed = reference["tower"](patches, grid_thw).last_hidden_state
    hook.remove()
    return EncoderOutput(seen[0], reference["projector"](normed, grid_thw), ())


ROWS = [
    make_row(
        "paddleocr_vl", "PaddlePaddle/PaddleOCR-VL", paddle_reference, paddle_keys, paddle_output,
        shallow={"num_hidden_layers": 1},
        narrow={**PADDLE_NARROW, "llm_width": 48},
        tiny={**PADDLE_NARROW, "num_hidden_layers": 3, "llm_width": 48},
        slow=True,
        blocks=lambda reference: reference["tower"].vision_model.encoder.layers,
    ),
]  # fmt: skip
