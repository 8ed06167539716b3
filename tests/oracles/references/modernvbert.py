"""The reference of ModernVBERT, which is SigLIP's tower and a connector of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers.models.modernvbert import modeling_modernvbert

from encoders.contract import EncoderOutput

from ..configs import Config
from ..family import make_row
from ..keys import State
from .idefics3 import connected, idefics3_keys
from .siglip import SIZES, siglip_reference


def modernvbert_reference(config: Config) -> nn.Module:
    """Build transformers' tower and the connector of ModernVBERT."""
    tower: Any = siglip_reference(config)
    text = SimpleNamespace(hidden_size=config["text_config"]["hidden_size"])
    factor = config["pixel_shuffle_factor"]
    sizes = SimpleNamespace(
        pixel_shuffle_factor=factor, vision_config=tower.config, text_config=text
    )
    connector = modeling_modernvbert.ModernVBertConnector(sizes)
    return nn.ModuleDict({"tower": tower, "connector": connector})


def modernvbert_keys(state: State) -> State:
    """Map to the tower and the connector of ModernVBERT."""
    return idefics3_keys(state, "modality_projection")


def modernvbert_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower, and the connector of ModernVBERT on square tiles."""
    resize = {"interpolate_pos_encoding": True, "output_hidden_states": True}
    out = reference["tower"](pixels, **resize)
    return connected(reference["connector"], out, grid_thw, "pixel_shuffle_factor")


ROWS = [
    make_row(
        "modernvbert", "ModernVBERT/modernvbert", modernvbert_reference, modernvbert_keys,
        modernvbert_output,
        shallow={"num_hidden_layers": 1, "pixel_shuffle_factor": 2},
        narrow={**SIZES, "llm_width": 48, "pixel_shuffle_factor": 2},
        tiny={
            **SIZES, "num_hidden_layers": 3, "image_size": 128, "llm_width": 48,
            "pixel_shuffle_factor": 2,
        },
        variant=True,
        eager=True,
    ),
]  # fmt: skip
