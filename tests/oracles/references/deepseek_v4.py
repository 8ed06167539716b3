"""The reference of DeepSeek-V4 and V4.1, timm's DeepseekVitEncoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from encoders.contract import EncoderOutput

from ..configs import Config
from ..family import make_row
from ..keys import State, renamed

V4_NARROW = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 176}


def v4_reference(config: Config) -> nn.Module:
    """Build timm's tower and aligner, beside the learned tokens, which it lacks."""
    timm: Any = pytest.importorskip("timm.models.deepseek_vit")
    vision, width = config["vision_config"], config["text_config"]["hidden_size"]
    tower = timm.DeepseekVitEncoder(
        img_size=126,
        embed_dim=vision["hidden_size"],
        depth=vision["num_hidden_layers"],
        num_heads=vision["num_attention_heads"],
        mlp_ratio=vision["intermediate_size"] / vision["hidden_size"],
        out_features=width,
        downsample_ratio=vision["downsample_ratio"],
        rope_temperature=vision["rope_theta"],
    )
    whole = nn.ModuleDict({"tower": tower})
    for name in ("start", "newline", "end"):
        whole.register_parameter(f"image_{name}", nn.Parameter(torch.zeros(width)))
    return whole


def v4_keys(state: State) -> State:
    """Map to timm's names; its patch embedding is a convolution."""
    learned = {key: x for key, x in state.items() if key.startswith("image_")}
    tower = renamed(
        {key: x for key, x in state.items() if key not in learned},
        [
            (r"^patch_embed\.", "patch_embed.proj."),
            (r"\.mlp\.gate_up\.", ".mlp.fc1."),
            (r"\.mlp\.down\.", ".mlp.fc2."),
        ],
    )
    weight = tower["patch_embed.proj.weight"]
    tower["patch_embed.proj.weight"] = weight.unflatten(1, (3, 14, 14))
    return learned | {f"tower.{key}": x for key, x in tower.items()}


def v4_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run timm's tower on one image at a time, and its aligner on the normed rows."""
    tower, hidden, tokens = reference["tower"], [], []
    grids = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    for part, (h, w) in zip(pixels.split([h * w for h, w in grids]), grids, strict=True):
        image = part.view(h, w, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(1, 3, 14 * h, 14 * w)
        normed, (state,) = tower.forward_intermediates(image, 1, output_fmt="NLC")
        hidden.append(state[0])
        tokens.append(tower.aligner(normed)[0])
    return EncoderOutput(torch.cat(hidden), torch.cat(tokens), ())


ROWS = [
    make_row(
        "deepseek_v4",
        "deepseek-ai/DeepSeek-V4.1-Flash",
        v4_reference,
        v4_keys,
        v4_output,
        shallow={"num_hidden_layers": 2},
        narrow={**V4_NARROW, "llm_width": 48},
        tiny={**V4_NARROW, "num_hidden_layers": 3, "llm_width": 48},
        variant=True,
        ragged=True,
        unread=("image_",),
        # Without the first, a model has no tower; transformers' class of V4 reads text only.
        required=("vision_n_layers", "hidden_size"),
        casts=(("float",),),  # of its RMS norms; timm makes the angles
    ),
]
