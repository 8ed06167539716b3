"""The reference of Cosmos3-Edge, which is a tower and a merger of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers.models.cosmos3_edge import configuration_cosmos3_edge, modeling_cosmos3_edge

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State
from .siglip import SIZES, siglip_keys

SMALL = {**SIZES, "llm_width": 48, "projector_hidden_size": 56}


def cosmos3_edge_reference(config: Config) -> nn.Module:
    """Build transformers' tower and merger."""
    wrapped = configuration_cosmos3_edge.Cosmos3EdgeVisionConfig(**vision_of(config))
    sizes: Any = SimpleNamespace(
        vision_config=wrapped,
        text_config=SimpleNamespace(hidden_size=config["text_config"]["hidden_size"]),
        projector_hidden_size=config["projector_hidden_size"],
    )
    model = modeling_cosmos3_edge.Cosmos3EdgeVisionModel
    tower = model._from_config(wrapped, attn_implementation="sdpa")
    merger = modeling_cosmos3_edge.Cosmos3EdgePatchMerger(sizes)
    return nn.ModuleDict({"tower": tower, "merger": merger})


def cosmos3_edge_keys(state: State) -> State:
    """Map to the tower and the merger of transformers."""
    body = {key: x for key, x in state.items() if not key.startswith("merger.")}
    return {
        **{f"tower.{key}": x for key, x in siglip_keys(body).items()},
        **{key: x for key, x in state.items() if key.startswith("merger.")},
    }


def cosmos3_edge_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower and merger; the last block's rows are those before the last norm."""
    tower, rows = reference["tower"], list[Tensor]()
    hook = tower.encoder.layers[-1].register_forward_hook(lambda *args: rows.append(args[2]))
    normed = tower(pixels, grid_thw).last_hidden_state
    hook.remove()
    return EncoderOutput(rows[0], reference["merger"](normed), ())


ROWS = [
    make_row(
        "cosmos3_edge",
        "nvidia/Cosmos3-Edge",
        cosmos3_edge_reference,
        cosmos3_edge_keys,
        cosmos3_edge_output,
        shallow={"num_hidden_layers": 2},
        narrow=SMALL,
        tiny={**SMALL, "num_hidden_layers": 3},
        blocks=lambda reference: reference["tower"].encoder.layers,
        variant=True,
        casts=(("to", "float"),),
    ),
]
