"""The references of C-RADIO: transformers' RadioModel for v4, timm's NaFlexVit for v3.

Shapes: P packed patches, r rows before the patches of an image (class tokens, registers).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.initialization import no_init_weights

from encoders.contract import EncoderOutput

from ..configs import Config
from ..family import make_row
from ..keys import State, renamed, split_qkv
from ..versions import skip_without
from .dino import image_of

OLDER = ("transformers", "5.23", "it has no RadioModel")
"""Why the tower is not compared with an older reference."""


C_RADIO_NARROW = {"hidden_size": 64, "num_attention_heads": 4, "mlp_ratio": 1.5}
"""Widths of small towers, by the names of transformers' config."""
_SIZES = {  # width, depth and heads
    "vit_base_patch16_v2_224": (768, 12, 12),
    "vit_huge_patch16_224": (1280, 32, 16),
}


def _sizes_of(config: Config) -> tuple[dict[str, Any], int]:
    """Return the sizes of a published config, by the names of transformers, and of its table."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict(zip(names, _SIZES[config["args"]["model"]], strict=True))
    sizes = {name: config.get(name, value) for name, value in sizes.items()}
    return {**sizes, "mlp_ratio": config.get("mlp_ratio", 4.0)}, config.get("max_img_size", 2048)


def c_radio_reference(config: Config) -> nn.Module:
    """Build transformers' RadioModel without its scales of 1; pixels are normalised outside."""
    skip_without(*OLDER)
    from transformers.models.radio import RadioConfig, RadioModel

    sizes, largest = _sizes_of(config)
    frames = config.get("video_temporal_patch_size")
    wrapped: Any = RadioConfig(**sizes, max_img_size=largest, video_temporal_patch_size=frames)
    model: Any = RadioModel._from_config(wrapped, attn_implementation="sdpa")
    model.make_preprocessor_external()
    model.register_buffer("summary_idxs", torch.tensor([0, 1]), persistent=False)
    for layer in model.encoder.layer:
        layer.layer_scale1 = layer.layer_scale2 = nn.Identity()
    built: nn.Module = model
    return built


def c_radio_keys(state: State) -> State:
    """Map to the names of transformers' RadioModel."""
    state = split_qkv(state, ("q_proj", "k_proj", "v_proj"))
    state["embeddings.position_embedding"] = state.pop("pos_embed.weight")[None]
    return renamed(
        state,
        [
            (r"^tokens$", "embeddings.cls_register_token"),
            (r"^patch_embed\.", "embeddings.patch_projection."),
            (r"^blocks\.", "encoder.layer."),
            (r"\.attn\.proj\.", ".attention.o_proj."),
            (r"\.attn\.", ".attention."),
        ],
    )


def unnormalised(pixels: Tensor) -> Tensor:
    """Return normalised patches [P, 3*p*p] as RadioModel takes them that normalises by itself."""
    mean, std = (torch.tensor(values)[:, None] for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    return (pixels.unflatten(1, (3, -1)) * std + mean).flatten(1)


def c_radio_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on packed frames."""
    frames = grid_thw[:, 1:].repeat_interleave(grid_thw[:, 0], 0)
    out = reference(pixels, image_grid_hw=frames)
    rows = out.last_hidden_state.split([h * w + 10 for h, w in frames.tolist()])
    prefix = torch.stack([part[:10] for part in rows])
    return EncoderOutput(out.features, out.features, (), {"prefix": prefix})


def c_radio_v3_reference(config: Config) -> nn.Module:
    """Build timm's NaFlexVit of C-RADIO v3 B."""
    naflexvit: Any = pytest.importorskip("timm.models.naflexvit")
    sizes, largest = _sizes_of(config)
    width, depth, heads, ratio = sizes.values()
    with no_init_weights():
        tower: nn.Module = naflexvit.naflexvit_base_patch16_radio_v3(
            embed_dim=width,
            depth=depth,
            num_heads=heads,
            mlp_ratio=ratio,
            pos_embed_grid_size=(largest // 16, largest // 16),
        )
    return tower


def c_radio_v3_keys(state: State) -> State:
    """Map to the names of timm's NaFlexVit, as timm does for NVIDIA's checkpoints."""
    tokens, table = state.pop("tokens")[None], state.pop("pos_embed.weight")
    rows = state.pop("patch_embed.weight").unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
    side = round(len(table) ** 0.5)
    return {
        **renamed(state, [(r"\.ls([12])$", r".ls\1.gamma")]),
        "embeds.pos_embed": table.view(1, side, side, -1),
        "embeds.proj.weight": rows,
        "embeds.proj.bias": torch.zeros_like(rows[:, 0]),
        "embeds.cls_token": tokens[:, :1],
        "embeds.reg_token": tokens[:, 1:],
    }


def c_radio_v3_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run timm's tower on one frame at a time."""
    frames = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    parts = []
    for (h, w), rows in zip(frames, pixels.split([h * w for h, w in frames]), strict=True):
        parts.append(reference.forward_features(image_of(rows, h, w))[0])
    hidden = torch.cat([part[8:] for part in parts])
    prefix = torch.stack([part[:8] for part in parts])
    return EncoderOutput(hidden, hidden, (), {"prefix": prefix})


ROWS = [
    make_row(
        "c_radio", "nvidia/C-RADIOv4-H", c_radio_reference, c_radio_keys, c_radio_output,
        shallow={"num_hidden_layers": 1},
        narrow=C_RADIO_NARROW,
        tiny={**C_RADIO_NARROW, "num_hidden_layers": 3, "max_img_size": 192},
        renamed=True,
        filled=("input_conditioner.norm_mean", "input_conditioner.norm_std", "summary_idxs"),
        required=("num_attention_heads",),
        not_in_tensors=("summary",),
        casts=(("to", "float"),),  # of positions: by ``to``, and from 5.24 on by ``float``
        blocks=lambda reference: reference.encoder.layer,
        block_rows=lambda encoder, grids, seen: [
            x[0][encoder.prepare_encoder_metadata(grids)["patch_index"]] for x in seen
        ],
        alone=lambda model, pixels, grids: c_radio_output(
            model, unnormalised(pixels), grids
        ).pooler_output,
    ),
    make_row(
        "c_radio_v3", "nvidia/C-RADIOv3-B", c_radio_v3_reference, c_radio_v3_keys,
        c_radio_v3_output,
        shallow={"num_hidden_layers": 2},
        narrow=C_RADIO_NARROW,
        tiny={**C_RADIO_NARROW, "num_hidden_layers": 3, "max_img_size": 192},
        variant=True,
        casts=(("to", "float"),),  # of positions: by ``to``, and from 5.24 on by ``float``
    ),
]  # fmt: skip
