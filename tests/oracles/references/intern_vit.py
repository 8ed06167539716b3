"""transformers' InternVL without its language model, on tiles of any shape."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import InternVLConfig, InternVLModel

from encoders.contract import EncoderOutput

from ..configs import Config
from ..family import make_row
from ..keys import intern_keys
from ..sizes import INTERN_NARROW, INTERN_TILE


def intern_reference(config: Config) -> nn.Module:
    """Build transformers' InternVLModel with a stub for its language model."""
    vision, width = config["vision_config"], config["llm_config"]["hidden_size"]
    text = {
        "model_type": "qwen2",
        "hidden_size": width,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    tower = {
        "model_type": "internvl_vision",
        "attention_bias": vision["qkv_bias"],
        "use_qk_norm": vision["qk_normalization"],
        **{
            key: vision[key]
            for key in (
                "hidden_size",
                "intermediate_size",
                "norm_type",
                "layer_norm_eps",
                "hidden_act",
                "num_hidden_layers",
                "num_attention_heads",
                "num_channels",
                "image_size",
                "patch_size",
            )
        },
    }
    layer = config["select_layer"]
    wrapped = InternVLConfig(
        vision_config=tower,
        text_config=text,
        downsample_ratio=config["downsample_ratio"],
        vision_feature_layer=layer,
    )
    model = InternVLModel._from_config(wrapped, attn_implementation="sdpa")
    model.language_model = nn.Identity()
    return model


def intern_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' InternVL on tiles: tower, pixel shuffle v2, projector.

    ``get_image_features`` joins the three for square tiles; for others its parts run in turn.
    """
    layer, (h, w) = reference.config.vision_feature_layer, grid_thw[0, 1:].tolist()
    keep = layer != -1
    if h == w:
        out = reference.get_image_features(
            pixels,
            vision_feature_layer=layer,
            vision_feature_select_strategy="default",
            output_hidden_states=keep,
        )
        hidden = out.hidden_states[layer] if keep else out.last_hidden_state
        return EncoderOutput(hidden, out.pooler_output.flatten(0, 1), ())
    out = reference.vision_tower(pixels, output_hidden_states=keep)
    hidden = out.hidden_states[layer] if keep else out.last_hidden_state
    tokens = reference.pixel_shuffle(hidden[:, 1:].unflatten(1, (h, w)), scale_factor=0.5)
    return EncoderOutput(hidden, reference.multi_modal_projector(tokens).flatten(0, 2), ())


ROWS = [
    make_row(
        "intern_vit_300m", "OpenGVLab/InternVL2_5-1B", intern_reference, intern_keys, intern_output,
        shallow={"num_hidden_layers": 2},
        narrow=INTERN_NARROW,
        tiny={**INTERN_NARROW, "num_hidden_layers": 3, **INTERN_TILE},
        eager=True,
        blocks=lambda reference: reference.vision_tower.encoder.layer,
    ),
    make_row(
        "intern_vit_6b", "OpenGVLab/InternVL2_5-38B", intern_reference, intern_keys, intern_output,
        shallow={"num_hidden_layers": 1},
        narrow={**INTERN_NARROW, "hidden_size": 60, "num_attention_heads": 3},
        tiny={**INTERN_NARROW, "num_hidden_layers": 3, **INTERN_TILE},
        eager=True,
        blocks=lambda reference: reference.vision_tower.encoder.layer,
    ),
]  # fmt: skip
