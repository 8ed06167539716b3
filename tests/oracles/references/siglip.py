"""The references of SigLIP and of models with its tower, which are models of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.models.gemma3 import configuration_gemma3, modeling_gemma3
from transformers.models.llava_onevision import modeling_llava_onevision
from transformers.models.paligemma import modeling_paligemma
from transformers.models.siglip import configuration_siglip, modeling_siglip
from transformers.models.siglip2 import configuration_siglip2, modeling_siglip2

from encoders.contract import EncoderOutput
from encoders.siglip.siglip import LlavaOnevisionTower

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, split_qkv

_NAMES = [
    (r"^pos_embed$", "embeddings.position_embedding.weight"),
    (r"^patch_embed(\.proj)?\.", "embeddings.patch_embedding."),
    (r"^blocks\.", "encoder.layers."),
    (r"^norm\.", "post_layernorm."),
    (r"\.norm(\d)\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.out_proj."),
    (r"\.attn\.", ".self_attn."),
]
SIZES = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4}
"""Widths of small towers, by the names of transformers' configs."""
HEADLESS = {"vision_use_head": False}
_INTERPOLATE = torch.nn.functional.interpolate


def siglip_keys(state: State) -> State:
    """Map to transformers' SiglipVisionModel and Siglip2VisionModel."""
    return renamed(split_qkv(state, ("q_proj", "k_proj", "v_proj")), _NAMES)


def siglip_reference(config: Config) -> nn.Module:
    """Build transformers' SiglipVisionModel."""
    fields = {**vision_of(config)}
    wrapped = configuration_siglip.SiglipVisionConfig(**fields)
    return modeling_siglip.SiglipVisionModel._from_config(wrapped, attn_implementation="sdpa")


def siglip2_reference(config: Config) -> nn.Module:
    """Build transformers' Siglip2VisionModel."""
    wrapped = configuration_siglip2.Siglip2VisionConfig(**vision_of(config))
    return modeling_siglip2.Siglip2VisionModel._from_config(wrapped, attn_implementation="sdpa")


def gemma3_reference(config: Config) -> nn.Module:
    """Build the tower and the projector of transformers' Gemma3Model."""
    text = {"hidden_size": config["text_config"]["hidden_size"]}
    wrapped = configuration_gemma3.Gemma3Config(
        vision_config=vision_of(config),
        text_config=text,
        mm_tokens_per_image=config["mm_tokens_per_image"],
    )
    projector = modeling_gemma3.Gemma3MultiModalProjector(wrapped)
    return nn.ModuleDict({"tower": siglip_reference(config), "projector": projector})


def gemma3_keys(state: State) -> State:
    """Map to the tower and the projector of transformers' Gemma3Model."""
    body = {key: x for key, x in state.items() if not key.startswith("projector.")}
    return {
        **{f"tower.{key}": x for key, x in siglip_keys(body).items()},
        "projector.mm_soft_emb_norm.weight": state["projector.norm"],
        "projector.mm_input_projection_weight": state["projector.projection"],
    }


def paligemma_reference(config: Config) -> nn.Module:
    """Build the tower and the projector of transformers' PaliGemmaModel."""
    tower: Any = siglip_reference(config)
    tower.config.projection_dim = config["projection_dim"]
    sizes = SimpleNamespace(vision_config=tower.config)
    projector = modeling_paligemma.PaliGemmaMultiModalProjector(sizes)
    return nn.ModuleDict({"tower": tower, "projector": projector})


def paligemma_keys(state: State) -> State:
    """Map to the tower and the projector of transformers' PaliGemmaModel."""
    body = {key: x for key, x in state.items() if not key.startswith("projector.")}
    return {
        **{f"tower.{key}": x for key, x in siglip_keys(body).items()},
        **{f"projector.linear.{x}": state[f"projector.{x}"] for x in ("weight", "bias")},
    }


def onevision_reference(config: Config) -> nn.Module:
    """Build the tower and the projector of transformers' LlavaOnevisionModel."""
    wrapped = modeling_llava_onevision.LlavaOnevisionConfig(
        vision_config=vision_of(config),
        text_config={**config["text_config"], "num_attention_heads": 1, "num_key_value_heads": 1},
    )
    projector = modeling_llava_onevision.LlavaOnevisionMultiModalProjector(wrapped)
    return nn.ModuleDict({"tower": siglip_reference(config), "projector": projector})


def onevision_keys(state: State) -> State:
    """Map to :func:`onevision_reference`, which encodes views and joins none."""
    outside = ("projector.", "image_newline")
    body = {key: x for key, x in state.items() if not key.startswith(outside)}
    layers = {"projector.0.": "projector.linear_1.", "projector.2.": "projector.linear_2."}
    return {
        **{f"tower.{key}": x for key, x in siglip_keys(body).items()},
        **{f"{layers[old]}{x}": state[f"{old}{x}"] for old in layers for x in ("weight", "bias")},
    }


def onevision_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on views, then its projector on what precedes the last norm."""
    _, hidden = _run(reference["tower"], pixels)
    return EncoderOutput(hidden, reference["projector"](hidden).flatten(0, 1), ())


def siglip_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on views; its last hidden state is what follows the norm."""
    tokens, hidden = _run(reference, pixels=pixels)
    return EncoderOutput(hidden, tokens.flatten(0, 1), ())


def _run(reference: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    out = reference(pixels, interpolate_pos_encoding=True, output_hidden_states=True)
    return out.last_hidden_state, out.hidden_states[-1]


def gemma3_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower, then the steps of its projector on views of any size.

    The projector itself takes views of one size; there, it gives the same.
    """
    tokens, hidden = _run(reference["tower"], pixels)
    projector, (h, w) = reference["projector"], grid_thw[0, 1:].tolist()
    if h == w == projector.patches_per_image:
        return EncoderOutput(hidden, projector(tokens).flatten(0, 1), ())
    maps = projector.avg_pool(tokens.transpose(1, 2).unflatten(2, (h, w)))
    normed = projector.mm_soft_emb_norm(maps.flatten(2).transpose(1, 2))
    projected = normed @ projector.mm_input_projection_weight
    return EncoderOutput(hidden, projected.flatten(0, 1), ())


def paligemma_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on views, then its projector on every patch."""
    tokens, hidden = _run(reference["tower"], pixels)
    return EncoderOutput(hidden, reference["projector"](tokens).flatten(0, 1), ())


def siglip2_inputs(pixels: Tensor, grid_thw: Tensor) -> dict[str, Tensor]:
    """Pad packed patches to the longest image, as transformers' processor does.

    A frame of a clip is an image of its own, since this tower has no time.
    """
    shapes = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    rows = pixels.split([h * w for h, w in shapes])
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask = torch.zeros(padded.shape[:2], dtype=torch.int32, device=pixels.device)
    for line, (h, w) in zip(mask, shapes, strict=True):
        line[: h * w] = 1
    return {
        "pixel_values": padded,
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor(shapes, device=pixels.device),
    }


def interpolate_any(table: Tensor, size: tuple[int, int], **options: Any) -> Tensor:
    """Resize a table as ``F.interpolate`` does, to one column by way of the transposed table.

    On a CPU, torch 2.15 resizes wrongly to several rows of one column if it antialiases. The same
    entries as one row of several columns are right.
    """
    if size[1] > 1:
        return _INTERPOLATE(table, size=size, **options)
    return _INTERPOLATE(table.transpose(2, 3), size=size[::-1], **options).transpose(2, 3)


def siglip2_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower on padded images and take the padding out again."""
    inputs = siglip2_inputs(pixels, grid_thw)
    with patch.object(torch.nn.functional, "interpolate", interpolate_any):
        out = reference(**inputs, output_hidden_states=True)
    keep = inputs["pixel_attention_mask"].bool()
    return EncoderOutput(out.hidden_states[-1][keep], out.last_hidden_state[keep], ())


ROWS = [
    make_row(
        "siglip2", "google/siglip2-so400m-patch16-naflex", siglip2_reference, siglip_keys,
        siglip2_output,
        shallow={**HEADLESS, "num_hidden_layers": 2},
        narrow={**HEADLESS, **SIZES},
        tiny={**HEADLESS, **SIZES, "num_hidden_layers": 3},
        required=("num_attention_heads",),
        casts=(("to", "float"),),  # of positions: by ``to``, and from 5.24 on by ``float``
    ),
    make_row(
        "siglip", "google/siglip2-so400m-patch14-384", siglip_reference, siglip_keys, siglip_output,
        shallow={**HEADLESS, "num_hidden_layers": 2},
        narrow={**HEADLESS, **SIZES},
        tiny={**HEADLESS, **SIZES, "num_hidden_layers": 3, "image_size": 112},
        variant=True,
        eager=True,
        required=("num_attention_heads",),
    ),
    make_row(
        "gemma3", "google/gemma-3-4b-it", gemma3_reference, gemma3_keys, gemma3_output,
        shallow={"num_hidden_layers": 1, "mm_tokens_per_image": 1024},
        narrow={**SIZES, "mm_tokens_per_image": 1024, "llm_width": 48},
        tiny={
            **SIZES, "num_hidden_layers": 3, "image_size": 112, "mm_tokens_per_image": 16,
            "llm_width": 48,
        },
        variant=True,
        eager=True,
        required=("num_attention_heads",),
    ),
    make_row(
        "paligemma", "google/paligemma-3b-pt-224", paligemma_reference, paligemma_keys,
        paligemma_output,
        shallow={"num_hidden_layers": 1},
        narrow={**SIZES, "projection_dim": 48},
        tiny={**SIZES, "num_hidden_layers": 3, "image_size": 112, "projection_dim": 48},
        variant=True,
        eager=True,
        required=("num_attention_heads",),
    ),
    make_row(
        "llava_onevision", "llava-hf/llava-onevision-qwen2-0.5b-ov-hf", onevision_reference,
        onevision_keys, onevision_output,
        shallow={"num_hidden_layers": 1},
        narrow={**SIZES, "num_hidden_layers": 4, "llm_width": 48},  # SigLIP's row has all blocks
        tiny={
            **SIZES, "num_hidden_layers": 3, "image_size": 112, "llm_width": 48,
            "image_grid_pinpoints": [[112, 112], [112, 224], [224, 112], [224, 224]],
        },
        variant=True,
        tower=LlavaOnevisionTower,
        required=("num_attention_heads",),
        unread=("norm.", "image_newline"),
    ),
]  # fmt: skip
