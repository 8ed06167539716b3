"""The references of CLIP and LLaVA, which are models of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.clip import configuration_clip, modeling_clip
from transformers.models.llava import configuration_llava, modeling_llava

from encoders import LlavaEncoder
from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, split_qkv
from .siglip import SIZES

_NAMES = [
    (r"^head\.", "visual_projection."),
    (r"^(?!visual_projection|projector)", "vision_model."),
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


def clip_reference(config: Config) -> nn.ModuleDict:
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


def llava_reference(config: Config) -> nn.Module:
    """Build transformers' tower, and LLaVA's projector."""
    wrapped = configuration_llava.LlavaConfig(
        vision_config=vision_of(config),
        text_config={**config["text_config"], "num_attention_heads": 1, "num_key_value_heads": 1},
        vision_feature_layer=config["vision_feature_layer"],
    )
    tower = clip_reference({**config, "projection_dim": None})
    projector = modeling_llava.LlavaMultiModalProjector(wrapped)
    reference = nn.ModuleDict({**tower, "projector": projector})
    reference.layer = wrapped.vision_feature_layer
    return reference


def llava_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on views of any size, and the projector on one of its states."""
    out = reference["vision_model"](
        pixels, interpolate_pos_encoding=True, output_hidden_states=True
    )
    hidden = out.hidden_states[reference.layer]
    tokens = reference["projector"](hidden[:, 1:])
    return EncoderOutput(hidden, tokens.flatten(0, 1), (), {"prefix": hidden[:, :1]})


def llava_next_keys(state: State) -> State:
    """Map to :func:`llava_reference`, which encodes views and joins none."""
    return clip_keys({name: x for name, x in state.items() if name != "image_newline"})


ROWS = [
    make_row(
        "clip", "openai/clip-vit-large-patch14-336", clip_reference, clip_keys, clip_output,
        shallow={**UNPROJECTED, "num_hidden_layers": 2},
        narrow={**UNPROJECTED, **SIZES},
        tiny={**UNPROJECTED, **SIZES, "num_hidden_layers": 3, "image_size": 112},
        required=("num_attention_heads",),
        blocks=lambda reference: reference["vision_model"].encoder.layers,
    ),
    make_row(
        "llava", "llava-hf/llava-1.5-7b-hf", llava_reference, clip_keys, llava_output,
        shallow={"num_hidden_layers": 2},
        narrow={**SIZES, "llm_width": 48},
        tiny={**SIZES, "num_hidden_layers": 3, "image_size": 112, "llm_width": 48},
        variant=True,
        unread=("blocks.1.", "norm."),
    ),
    make_row(
        "llava_next", "llava-hf/llava-v1.6-mistral-7b-hf",
        llava_reference, llava_next_keys, llava_output,
        shallow={"num_hidden_layers": 2},
        narrow={**SIZES, "num_hidden_layers": 4, "llm_width": 48},  # LLaVA's row has all 24
        tiny={
            **SIZES, "num_hidden_layers": 3, "image_size": 112, "llm_width": 48,
            "image_grid_pinpoints": [[112, 224], [224, 112], [224, 224]],
        },
        variant=True,
        tower=LlavaEncoder,
        unread=("blocks.1.", "norm.", "image_newline"),
    ),
]  # fmt: skip
