"""The reference of CLIP, which is a tower and a projection of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.clip import configuration_clip, modeling_clip

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..keys import State, renamed, split_qkv

_NAMES = [
    (r"^head\.", "visual_projection."),
    (r"^(?!visual_projection)", "vision_model."),
    (r"\.class_embedding$", ".embeddings.class_embedding"),
    (r"\.pos_embed$", ".embeddings.position_embedding.weight"),
    (r"\.patch_embed\.proj\.", ".embeddings.patch_embedding."),
    (r"\.norm_pre\.", ".pre_layrnorm."),
    (r"\.norm\.", ".post_layernorm."),
    (r"\.blocks\.", ".encoder.layers."),
    (r"\.norm(\d)\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.out_proj."),
    (r"\.attn\.", ".self_attn."),
]


UNPROJECTED = {"projection_dim": None}


def clip_keys(state: State) -> State:
    """Map to transformers' CLIPModel, without its text half."""
    return renamed(split_qkv(state, ("q_proj", "k_proj", "v_proj")), _NAMES)


def clip_reference(config: Config) -> nn.Module:
    """Build transformers' tower, and its projection if the config has one."""
    columns = config["projection_dim"]
    wrapped = configuration_clip.CLIPVisionConfig(**vision_of(config))
    tower = modeling_clip.CLIPVisionModel._from_config(wrapped, attn_implementation="sdpa")
    projection = nn.Linear(wrapped.hidden_size, columns or 1, bias=False)
    parts = {"vision_model": tower, "visual_projection": projection}
    return nn.ModuleDict(parts if columns else {"vision_model": tower})


def clip_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on views of any size, and its last norm on all rows."""
    tower = reference["vision_model"]
    out = tower(pixels, interpolate_pos_encoding=True)
    normed = tower.post_layernorm(out.last_hidden_state)
    prefix = {"prefix": out.pooler_output[:, None]}
    return EncoderOutput(out.last_hidden_state, normed[:, 1:].flatten(0, 1), (), prefix)
