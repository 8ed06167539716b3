"""The reference of Muse-Glimmer, which is a tower, an adapter and a projection of transformers.

Transformers 5.24.0 reads the table of positions at (w, h) for a grid of (h, w), as Meta does. Older
versions read it at (h, w), which is put right here.
"""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers.models.muse_glimmer import configuration_muse_glimmer, modeling_muse_glimmer

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, split_qkv
from .qwen import window_walk

NARROW = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "llm_width": 48}
NARROW |= {"projector_hidden_size": 56}
SMALL_WINDOWS = {"pos_emb_height": 4, "pos_emb_width": 4}
_WINDOW, _FULL = "window_attention", "full_attention"


def muse_glimmer_reference(config: Config) -> nn.Module:
    """Build transformers' tower, adapter, projection and norm."""
    fields = {**vision_of(config), "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
    wrapped = configuration_muse_glimmer.MuseGlimmerVisionConfig(**fields)
    model = modeling_muse_glimmer.MuseGlimmerVisionModel
    tower: Any = model._from_config(wrapped, attn_implementation="sdpa")
    if Version(version("transformers")) < Version("5.24"):
        tower.patch_embedder.register_forward_pre_hook(_exchange)
    sizes = SimpleNamespace(
        out_hidden_size=4 * wrapped.hidden_size,
        projector_hidden_size=config["projector_hidden_size"],
        projector_hidden_act="gelu",
    )
    width = config["text_config"]["hidden_size"]
    return nn.ModuleDict(
        {
            "tower": tower,
            "adapter": modeling_muse_glimmer.MuseGlimmerVisionAdapter(sizes),
            "projection": nn.Linear(sizes.projector_hidden_size, width, bias=False),
            "norm": modeling_muse_glimmer.MuseGlimmerRMSNorm(eps=1e-5, with_scale=False),
        }
    )


def _exchange(module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    pixels, grid_thw = args
    return pixels, grid_thw[:, [0, 2, 1]]


def muse_glimmer_keys(state: State) -> State:
    """Map to the tower, the adapter and the projection of transformers."""
    names = [
        (r"^projector\.projection\.", "projection."),
        (r"^projector\.", "adapter."),
        (r"^patch_embed\.", "tower.patch_embedder.patch_embedding."),
        (r"^pos_embed\.", "tower.patch_embedder.position_embedding_table."),
        (r"^ln_", "tower.ln_"),
        (r"^blocks\.", "tower.layers."),
    ]
    return renamed(split_qkv(state, ("q_proj", "k_proj", "v_proj")), names)


def muse_glimmer_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower and projector; its last block's rows go back to input order."""
    tower, states = reference["tower"], []
    hook = tower.layers[-1].register_forward_hook(lambda *args: states.append(args[2]))
    merged = tower(pixels, grid_thw).last_hidden_state
    hook.remove()
    side = tower.config.pos_emb_height
    order = torch.tensor(window_walk(grid_thw.tolist(), side, 1), device=pixels.device)
    hidden = torch.empty_like(states[0])
    hidden[order] = states[0]
    tokens = reference["projection"](reference["adapter"](merged))
    return EncoderOutput(hidden, reference["norm"](tokens), ())


ROWS = [
    make_row(
        "muse_glimmer", "meta-models/Muse-Glimmer-30B", muse_glimmer_reference, muse_glimmer_keys,
        muse_glimmer_output,
        shallow={"num_hidden_layers": 2, "layer_types": [_WINDOW, _FULL]},
        six={"num_hidden_layers": 6, "layer_types": [_WINDOW, _WINDOW, _FULL] * 2},
        narrow=NARROW,
        tiny={
            **NARROW, **SMALL_WINDOWS, "num_hidden_layers": 3,
            "layer_types": [_WINDOW, _FULL, _WINDOW],
        },
        variant=True,
    ),
]  # fmt: skip
