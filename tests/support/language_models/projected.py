"""Tiny models of transformers with a projector beside the tower; for each an encoder and a prompt.

The tower and the projector are those of ``tests/oracles``, with the weights of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from encoders import Encoder
from tests.oracles import BY_NAME, draw_weights, edited
from vitgraph.integrations.model_towers.records import CALLS

WIDTH, VOCABULARY, MARK = 48, 64, 60
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
_LAYERS = ["sliding_attention", "full_attention"]
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
}
_ERNIE = {
    "moe_intermediate_size": [16, 16],
    "moe_num_experts": 4,
    "moe_k": 2,
    "rope_parameters": _MROPE,
}
_MINIMAX = {
    "rotary_dim": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse"],
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 16,
}
Batch = dict[str, Tensor]


class Case(NamedTuple):
    """A model to test: the entry of its tower, its language model, and a batch with its tokens."""

    row: str
    text: dict[str, Any]
    batch: Callable[[Any], Batch]
    tokens: tuple[int, ...]
    """The number of placeholders of each image."""
    config: dict[str, Any] = {}
    counts_kinds: bool = False
    """Whether the model needs to know which tokens are of images."""


def noise(*shape: int) -> Tensor:
    """Draw normal numbers in a shape, the same in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tiles(encoder: Any, count: int = 3) -> Batch:
    """Make a batch of ``count`` random square tiles."""
    return {"pixel_values": noise(count, *encoder.row_shape)}


def rows_of_tiles(encoder: Any) -> Batch:
    """Make a batch of two prompts of Idefics3 with two tiles each, the last of which is padding."""
    pixels = noise(2, 2, *encoder.row_shape)
    pixels[1, 1] = 0
    mask = torch.ones(2, 2, *encoder.row_shape[1:], dtype=torch.bool)
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def images(encoder: Any) -> Batch:
    """Make a batch of two images of 4x6 and 6x2 patches, padded to one size."""
    side = encoder.config.patch_size
    sizes = torch.tensor([[4, 6], [6, 2]]) * side
    return {"pixel_values": noise(2, 3, 6 * side, 6 * side), "image_sizes": sizes}


def padded(encoder: Any) -> Batch:
    """Make a batch of two images of LFM2-VL, of 4x6 and 6x8 patches, each padded to 60 patches."""
    shapes = torch.tensor([[4, 6], [6, 8]])
    mask = (torch.arange(60) < shapes.prod(1)[:, None]).int()
    pixels = noise(2, 60, encoder.config.patch_dim)
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def positions(encoder: Any) -> Batch:
    """Make a batch of two images of Gemma 4, of 4x6 and 2x4 patches, each padded to 28 patches."""
    places = torch.full((2, 28, 2), -1)
    for line, (h, w) in zip(places, ((4, 6), (2, 4)), strict=True):
        line[: h * w] = torch.tensor([[c, r] for r in range(h) for c in range(w)])
    return {"pixel_values": noise(2, 28, encoder.config.patch_dim), "image_position_ids": places}


def patches(encoder: Any, *cell: int) -> Batch:
    """Make a batch of packed patches of two images, of 4x6 and 6x2 patches."""
    grids = torch.tensor([[1, 4, 6], [1, 6, 2]])
    pixels = noise(36, encoder.config.patch_dim)
    return {"pixel_values": pixels.view(36, *(cell or (-1,))), "image_grid_thw": grids}


def cells(encoder: Any) -> Batch:
    """Make a batch of the patches of two images in the shape [patches, 3, 14, 14]."""
    return patches(encoder, 3, 14, 14)


CASES: dict[str, Case] = {
    "mistral3": Case("pixtral", {"model_type": "mistral"}, images, (6, 3)),
    "llava": Case(
        "pixtral_12b", {"model_type": "mistral"}, images, (24, 12),
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "lighton_ocr": Case("pixtral", {"model_type": "qwen3"}, images, (6, 3)),
    "gemma3": Case(
        "gemma3", {"model_type": "gemma3_text", "layer_types": _LAYERS}, tiles, (16, 16, 16),
        {"mm_tokens_per_image": 16},
    ),
    "paligemma": Case("paligemma", {"model_type": "gemma"}, tiles, (64, 64, 64)),
    "gemma4": Case(
        "gemma4",
        {"model_type": "gemma4_text", "layer_types": _LAYERS, "global_head_dim": 12,
         "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 0},
        positions, (6, 2), {"audio_config": None},
    ),
    "idefics3": Case("idefics3", {"model_type": "llama"}, rows_of_tiles, (16, 16, 16)),
    "smolvlm": Case("idefics3", {"model_type": "llama"}, rows_of_tiles, (16, 16, 16)),
    "deepseek_vl": Case("deepseek_vl", {"model_type": "llama"}, tiles, (64, 64, 64)),
    "kimi_k25": Case("moonvit", _DEEPSEEK, cells, (6, 3)),
    "paddleocr_vl": Case(
        "paddleocr_vl", {"model_type": "paddleocr_vl_text", "rope_parameters": _MROPE}, cells,
        (6, 3),
        counts_kinds=True,
    ),
    "lfm2_vl": Case(
        "lfm2_vl", {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, padded,
        (6, 12),
    ),
    "llama4": Case(
        "llama4",
        {"model_type": "llama4_text", "num_local_experts": 2, "intermediate_size_mlp": 64},
        tiles, (16, 16, 16),
    ),
    "internvl": Case("intern_vit_300m", {"model_type": "qwen2"}, tiles, (16, 16, 16)),
    "minimax_m3_vl": Case(
        "minimax_m3", {"model_type": "minimax_m3_vl_text", **_MINIMAX}, patches, (6, 3)
    ),
    "cosmos3_edge": Case(
        "cosmos3_edge", {"model_type": "cosmos3_edge_text", "rope_parameters": _MROPE}, patches,
        (6, 3),
        counts_kinds=True,
    ),
    "hunyuan_vl": Case(
        "hunyuan_vl", {"model_type": "hunyuan_vl_text", "rope_parameters": _MROPE}, patches,
        (10, 8),
        counts_kinds=True,
    ),
    "ernie4_5_vl_moe": Case(
        "ernie4_5_vl", {"model_type": "ernie4_5_vl_moe_text", **_ERNIE}, patches, (6, 3),
        counts_kinds=True,
    ),
}  # fmt: skip


class Pair(NamedTuple):
    """A model of transformers, and an encoder with the weights of its tower and projector."""

    model: PreTrainedModel
    encoder: Encoder
    prompt: dict[str, Tensor]


def build(kind: str) -> Pair:
    """Build the model and the encoder of a key of :data:`CASES`, in float32."""
    case = CASES[kind]
    row = BY_NAME[case.row]
    config = edited(row.config, **{**row.tiny, "llm_width": WIDTH})
    encoder = row.encoder_class(row.config_class.from_hf(config))
    draw_weights(encoder, calm=0.7).eval().requires_grad_(False)
    reference = row.reference(config).eval()
    reference.load_state_dict(row.keys(encoder.state_dict()), strict=True)
    parts = [*reference.children()][:2]
    model = _language_model(kind, case, parts[0])
    (place,) = [call.models[kind] for call in CALLS.values() if kind in call.models]
    for name, part in zip(filter(None, place), parts, strict=True):
        setattr(model.base_model, name, part)
    return Pair(model, encoder, _prompt(case, encoder))


def _language_model(kind: str, case: Case, tower: Any) -> PreTrainedModel:
    marks = {"image_token_id": MARK, "image_token_index": MARK}
    whole = AutoConfig.for_model(
        kind,
        text_config={**TEXT, **case.text},
        vision_config=tower.config.to_dict(),
        **marks,
        **case.config,
    )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(whole, attn_implementation="sdpa").eval()


def _prompt(case: Case, encoder: Encoder) -> dict[str, Tensor]:
    batch = case.batch(encoder)
    marks = [[MARK] * count + [5] for count in case.tokens]
    ids = torch.tensor([[3, *chain.from_iterable(marks), 7, 9]])
    kinds = {"mm_token_type_ids": (ids == MARK).int()} if case.counts_kinds else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **kinds, **batch}
