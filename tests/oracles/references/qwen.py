"""transformers' towers of Qwen and of GLM, which run alike, and their outputs in our order."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import Grids, make_row
from ..keys import omni2_5_keys, omni3_keys, same_keys
from ..sizes import QWEN2_5_NARROW, QWEN2_5_SHALLOW, QWEN2_NARROW, QWEN3_NARROW, QWEN3_SHALLOW


def qwen_reference(module: str, name: str) -> Callable[[Config], nn.Module]:
    """Return a function that builds a Qwen tower of transformers from a published config.

    Args:
        module: the module of transformers, which is imported once a tower is built.
        name: the class of the tower.
    """

    def build(config: Config) -> nn.Module:
        found = vars(import_module(f"transformers.models.{module}.modeling_{module}"))[name]
        fields = {k: v for k, v in vision_of(config).items() if k not in ("model_type", "in_chans")}
        return found._from_config(found.config_class(**fields), attn_implementation="sdpa")

    return build


def qwen_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a Qwen reference."""
    out = reference(pixels, grid_thw)
    return EncoderOutput(
        out.last_hidden_state, out.pooler_output, tuple(out.get("deepstack_features") or ())
    )


def glm_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a GLM reference on one row (1, h, w) per frame pair, as its model does for videos.

    Its own last hidden state are the tokens between convolution and merger, so that of the last
    block is read where it leaves the block.
    """
    states: list[Tensor] = []
    hook = reference.blocks[-1].register_forward_hook(lambda *args: states.append(args[2]))
    rows = [[1, h, w] for t, h, w in grid_thw.tolist() for _ in range(t)]
    out = reference(pixels, torch.tensor(rows, device=pixels.device))
    hook.remove()
    return EncoderOutput(states[0], out.pooler_output, ())


def qwen2_5_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a Qwen2.5 reference and bring its hidden state from window order to input order."""
    out = qwen_output(reference, pixels, grid_thw)
    order = torch.tensor(window_walk(grid_thw.tolist()), device=pixels.device)
    hidden = torch.empty_like(out.last_hidden_state)
    hidden.view(len(order), 4, -1)[order] = out.last_hidden_state.view(len(order), 4, -1)
    return out._replace(last_hidden_state=hidden)


def window_walk(grids: Grids, side: int = 4, merge: int = 2) -> list[int]:
    """Return merged tokens in the order of windows, by plain loops."""
    order, start = [], 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        for frame in range(t):
            for top in range(0, rows, side):
                for left in range(0, columns, side):
                    for r in range(top, min(top + side, rows)):
                        for c in range(left, min(left + side, columns)):
                            order.append(start + (frame * rows + r) * columns + c)
        start += t * rows * columns
    return order


def _in_input_order(encoder: VisionEncoder, grids: Grids, seen: list[Tensor]) -> list[Tensor]:
    """Undo the order of windows of Qwen2.5's blocks."""
    order = encoder.prepare_encoder_metadata(grids)["reverse_index"]
    return [x.unflatten(0, (-1, 4))[order].flatten(0, 1) for x in seen]


ROWS = [
    make_row(
        "qwen2_vl", "Qwen/Qwen2-VL-7B-Instruct",
        qwen_reference("qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),
        same_keys, qwen_output,
        shallow={"depth": 2},
        narrow=QWEN2_NARROW,
        tiny={**QWEN2_NARROW, "depth": 3},
        slow=True,
        eager=True,
    ),
    make_row(
        "qwen2_5_vl", "Qwen/Qwen2.5-VL-7B-Instruct",
        qwen_reference("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
        same_keys, qwen2_5_output,
        shallow=QWEN2_5_SHALLOW,
        narrow=QWEN2_5_NARROW,
        tiny={**QWEN2_5_NARROW, **QWEN2_5_SHALLOW},
        eager=True,
        required=("hidden_size", "intermediate_size", "out_hidden_size"),
        block_rows=_in_input_order,
    ),
    make_row(
        "qwen2_5_omni", "Qwen/Qwen2.5-Omni-7B",
        qwen_reference("qwen2_5_omni", "Qwen2_5OmniVisionEncoder"),
        omni2_5_keys, qwen2_5_output,
        shallow=QWEN2_5_SHALLOW,
        narrow=QWEN2_5_NARROW,
        tiny={**QWEN2_5_NARROW, **QWEN2_5_SHALLOW},
        variant=True,
        eager=True,
    ),
    make_row(
        "exaone4_5", "LGAI-EXAONE/EXAONE-4.5-33B",
        qwen_reference("exaone4_5", "Exaone4_5_VisionModel"),
        same_keys, qwen2_5_output,
        shallow={"depth": 2, "fullatt_block_indexes": [1]},
        narrow={**QWEN2_5_NARROW, "num_key_value_heads": 2},
        tiny={**QWEN2_5_NARROW, **QWEN2_5_SHALLOW, "num_key_value_heads": 2},
        variant=True,
        eager=True,
    ),
    make_row(
        "qwen3_vl", "Qwen/Qwen3-VL-8B-Instruct",
        qwen_reference("qwen3_vl", "Qwen3VLVisionModel"),
        same_keys, qwen_output,
        shallow=QWEN3_SHALLOW,
        narrow=QWEN3_NARROW,
        tiny={**QWEN3_NARROW, **QWEN3_SHALLOW},
        eager=True,
    ),
    make_row(
        "qwen3_omni", "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        qwen_reference("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder"),
        omni3_keys, qwen_output,
        shallow=QWEN3_SHALLOW,
        narrow=QWEN3_NARROW,
        tiny={**QWEN3_NARROW, **QWEN3_SHALLOW},
        variant=True,
        eager=True,
    ),
    make_row(
        "qwen3_5", "Qwen/Qwen3.5-27B",
        qwen_reference("qwen3_5", "Qwen3_5VisionModel"),
        same_keys, qwen_output,
        shallow={"depth": 2},
        narrow=QWEN3_NARROW,
        tiny={**QWEN3_NARROW, "depth": 3},
        variant=True,
        eager=True,
    ),
]  # fmt: skip
