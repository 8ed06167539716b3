"""Build transformers' towers from published configs, and convert their outputs to ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import InternVLConfig, InternVLModel

from encoders.contract import EncoderOutput

from .configs import Config, vision_of

Grids = list[list[int]]


def qwen_reference(config_class: type, model_class: type) -> Callable[[Config], nn.Module]:
    """Return a function that builds a Qwen tower of transformers from a published config."""

    def build(config: Config) -> nn.Module:
        fields = {k: v for k, v in vision_of(config).items() if k not in ("model_type", "in_chans")}
        return model_class._from_config(config_class(**fields), attn_implementation="sdpa")

    return build


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


def qwen_output(reference: nn.Module, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a Qwen reference."""
    out = reference(pixels, grid_thw)
    return EncoderOutput(
        out.last_hidden_state, out.pooler_output, tuple(out.get("deepstack_features") or ())
    )


def glm_output(reference: nn.Module, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
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


def qwen2_5_output(reference: nn.Module, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
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


def intern_output(reference: nn.Module, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
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
