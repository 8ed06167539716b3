"""transformers' towers of Qwen and of GLM, which run alike, and their outputs in our order."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import Grids


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
