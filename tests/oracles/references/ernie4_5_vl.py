"""transformers' tower and resampler of ERNIE-4.5-VL, in our names and on clips of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.ernie4_5_vl_moe import configuration_ernie4_5_vl_moe as configuration
from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as modeling

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State

ERNIE_NARROW = {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 4, "llm_width": 48}


class ErnieReference(nn.Module):
    """The tower and the resampler of transformers, side by side as in its model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        published = vision_of(config)
        names = ("depth", "hidden_size", "num_heads", "in_channels", "patch_size", "hidden_act")
        whole = configuration.Ernie4_5_VLMoeConfig(
            vision_config={
                **{name: published[name] for name in names},
                "intermediate_size": published["hidden_size"] * published["mlp_ratio"],
            },
            text_config={name: config[name] for name in ("hidden_size", "rms_norm_eps")},
        )
        self.vision_tower = modeling.Ernie4_5_VLMoeVisionTransformerPretrainedModel._from_config(
            whole.vision_config, attn_implementation="sdpa"
        )
        self.resampler_model = modeling.Ernie4_5_VLMoeVariableResolutionResamplerModel(whole)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the tower."""
        return self.vision_tower.blocks

    def set_attn_implementation(self, name: str) -> None:
        """Change the attention of the tower."""
        self.vision_tower.set_attn_implementation(name)


def ernie_keys(state: State) -> State:
    """Put our names under those of the two parts."""
    return {
        f"resampler_model.{key.removeprefix('resampler.')}"
        if key.startswith("resampler.")
        else f"vision_tower.{key}": value
        for key, value in state.items()
    }


def ernie_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a reference on clips whose odd last frame is repeated, as the processor repeats it.

    Its own last hidden state is the normed one, so that of the last block is read where it leaves
    the block, and the rows of repeated frames are dropped.
    """
    grids = grid_thw.tolist()
    rows, kept, filled = [], [], []
    for part, (t, h, w) in zip(pixels.split([t * h * w for t, h, w in grids]), grids, strict=True):
        more = int(t > 1) * (t % 2)
        rows += [part, part[-h * w :] if more else part[:0]]
        kept += [True] * (t * h * w) + [False] * (more * h * w)
        filled.append([t + more, h, w])
    states: list[Tensor] = []
    hook = reference.blocks[-1].register_forward_hook(lambda *args: states.append(args[2]))
    whole = torch.tensor(filled, device=pixels.device)
    normed = reference.vision_tower(torch.cat(rows), whole).last_hidden_state
    hook.remove()
    hidden = states[0][torch.tensor(kept, device=pixels.device)]
    return EncoderOutput(hidden, reference.resampler_model(normed, whole), ())


ROWS = [
    make_row(
        "ernie4_5_vl", "baidu/ERNIE-4.5-VL-28B-A3B-PT", ErnieReference, ernie_keys, ernie_output,
        shallow={"depth": 2}, narrow=ERNIE_NARROW, tiny={**ERNIE_NARROW, "depth": 3},
        slow=True,
        eager=True,
        joins=True,
    ),
]  # fmt: skip
