"""The reference of MiniCPM-V, which is a tower and a merger of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from encoders.contract import EncoderOutput
from encoders.minicpm.minicpm_v import MiniCPMVTower

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed
from ..versions import MINICPM_V, skip_without
from .siglip import SIZES, siglip_keys

MINICPM_V_NARROW = {**SIZES, "llm_width": 48}
"""Widths of small towers, by the names of transformers' config."""


def minicpm_v_reference(config: Config) -> nn.Module:
    """Build transformers' tower and merger."""
    skip_without(*MINICPM_V)
    from transformers.models.minicpmv4_6 import configuration_minicpmv4_6 as configuration
    from transformers.models.minicpmv4_6 import modeling_minicpmv4_6 as modeling

    whole = configuration.MiniCPMV4_6Config(
        vision_config=vision_of(config),
        text_config={"model_type": "qwen3_5_text", **config["text_config"]},
        insert_layer_id=config["insert_layer_id"],
        downsample_mode=config["downsample_mode"],
    )
    tower = modeling.MiniCPMV4_6VisionModel._from_config(
        whole.vision_config, attn_implementation="sdpa"
    )
    reference = nn.ModuleDict({"tower": tower, "merger": modeling.MiniCPMV4_6Merger(whole)})
    reference.merges_inside = config["downsample_mode"] == "16x"
    return reference


def minicpm_v_keys(state: State) -> State:
    """Map to the tower and the merger of transformers."""
    windows = [
        (r"\.norm1\.", ".layer_norm1."),
        (r"\.norm2\.", ".pre_norm."),
        (r"\.fc(\d)\.", r".linear_\1."),
    ]
    apart = {
        "window": {k: x for k, x in state.items() if k.startswith("window_merger.")},
        "merger": {k: x for k, x in state.items() if k.startswith("merger.")},
    }
    body = {k: x for k, x in state.items() if not k.startswith(("window_merger.", "merger."))}
    inner = renamed(apart["window"], windows)
    return {
        **{f"tower.{key}": x for key, x in siglip_keys(body).items()},
        **{
            key.replace("window_merger.", "tower.vit_merger."): x
            for key, x in siglip_keys(inner).items()
        },
        **{key.replace("merger.", "merger.mlp.0."): x for key, x in apart["merger"].items()},
    }


def side_by_side(pixels: Tensor, patch: int) -> Tensor:
    """Return patches [P, 3*patch*patch] as transformers takes them, [1, 3, patch, P*patch]."""
    return pixels.unflatten(1, (3, patch, patch)).permute(1, 2, 0, 3).flatten(2)[None]


def minicpm_v_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower and merger on views side by side, one of each frame.

    Its tower finds the nearest entries of the table in the default dtype, where float64 would
    divide sides of 5 in another way. They are found here by whole numbers.
    """
    sizes = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    tower, shapes = reference["tower"], torch.tensor(sizes)
    side = tower.embeddings.num_patches_per_side
    places = [
        row * side // h * side + column * side // w
        for h, w in sizes
        for row in range(h)
        for column in range(w)
    ]
    states: list[Tensor] = []
    hook = tower.encoder.layers[-1].register_forward_hook(lambda *args: states.append(args[2]))
    inside = reference.merges_inside
    try:
        normed = tower(
            side_by_side(pixels, tower.config.patch_size),
            target_sizes=shapes,
            use_vit_merger=inside,
            position_ids=torch.tensor(places, device=pixels.device),
        ).last_hidden_state
    finally:
        hook.remove()
    tokens = reference["merger"](normed, shapes // 2 if inside else shapes)
    return EncoderOutput(states[0][0], torch.cat(tokens), ())


# A variant: a token has 4x4 patches, where shared tests have grids for 2x2. The tests of this
# family alone run what those tests run.
ROWS = [
    make_row(
        "minicpm_v",
        "openbmb/MiniCPM-V-4.6",
        minicpm_v_reference,
        minicpm_v_keys,
        minicpm_v_output,
        shallow={"num_hidden_layers": 2, "insert_layer_id": 0},
        narrow={**MINICPM_V_NARROW, "image_size": 224},
        tiny={
            **MINICPM_V_NARROW,
            "num_hidden_layers": 3,
            "insert_layer_id": 0,
            "image_size": 224,
        },
        tower=MiniCPMVTower,
        variant=True,
        slow=True,
        required=(  # the defaults of transformers are those of no published tower
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("image_size", "patch_size"),
        ),
        casts=(),  # the reference has none
    ),
]
