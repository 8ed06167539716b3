"""Small checkpoints of models whose published names or configs transformers does not write.

The tower has the names of its family's layout, the language model those of transformers, with a
prefix. Tensors are random, of a fixed seed, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import IDS
from tiny_towers import TEXT, VISION, Model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engines.models import write_tokenizer
from vitgraph.seeded import seeded_tower
from weights import FAMILIES
from weights.layouts import Prefix

_MLA = {
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_LLAMA4_VISION = {
    **VISION,
    "model_type": "llama4_vision_model",
    "image_size": 56,
    "intermediate_size": 4 * VISION["hidden_size"],
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64),
}
_LLAMA4_TOKENS = ("<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>")
_LLAMA4_TOKENS += ("<|tile_y_separator|>", "<|image|>")
PUBLISHED: dict[str, Model] = {
    "llama4": Model(
        "Llama4ForConditionalGeneration",
        {
            "model_type": "llama4",
            "text_config": {
                **TEXT,
                "model_type": "llama4_text",
                "intermediate_size_mlp": 256,
                "num_local_experts": 2,
                "interleave_moe_layer_step": 1,
            },
            "vision_config": _LLAMA4_VISION,
            "boi_token_index": 310,
            "eoi_token_index": 311,
            "image_token_index": 312,
        },
        {token: 310 + number for number, token in enumerate(_LLAMA4_TOKENS)},
        "<|image|>",
        "Llama4Processor",
        {"preprocessor_config": {"size": {"height": 56, "width": 56}, "max_patches": 4}},
        family="llama4",
        prefixes=("language_model.", "vision_model."),
    ),
    "kimi_k25": Model(
        "KimiK25ForConditionalGeneration",
        {
            "model_type": "kimi_k25",
            "text_config": {**TEXT, **_MLA, "model_type": "deepseek_v3"},
            "vision_config": {**VISION, "pos_emb_height": 8, "pos_emb_width": 8},
            "projection_hidden_size": VISION["hidden_size"],
            "image_token_id": 304,
        },
        {"<|media_begin|>": 310, "<|media_content|>": 311, "<|media_pad|>": 304}
        | {"<|media_end|>": 312},
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        "",
        family="moonvit",
        clip="<|media_begin|>video<|media_content|><|media_pad|><|media_end|>",
        prefixes=("language_model.", "vision_tower."),
    ),
}
"""The models; ``prefixes`` are those of the names of the language model and of the tower."""
LAYOUTS = {"kimi_k25": "kimi-k25", "llama4": "llama4"}
"""The layout of each tower's names."""


def write_published(folder: Path, name: str) -> Path:
    """Write one of :data:`PUBLISHED`."""
    model = PUBLISHED[name]
    family = FAMILIES[model.family]
    layout = next(one for one in family.layouts if one.name == LAYOUTS[name])
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"torch_dtype": "float32", "tie_word_embeddings": False}
    config |= {"architectures": [model.architecture], **model.config}
    for stem, content in {"config": config, **layout.processor_files}.items():
        text = json.dumps({**content, **model.files.get(stem, {})}, indent=1)
        (folder / f"{stem}.json").write_text(text)
    write_tokenizer(folder, {**IDS, "image_token_id": 398, "video_token_id": 399}, model.tokens)
    torch.manual_seed(0)
    text = AutoConfig.for_model(**config["text_config"])
    language = AutoModelForCausalLM.from_config(text).float()
    language_prefix, tower_prefix = model.prefixes
    tensors: dict[str, Tensor] = {}
    for local, tensor in language.state_dict().items():
        drawn = torch.randn(tensor.shape) * model.scale if tensor.ndim > 1 else tensor
        tensors[language_prefix + local] = drawn
    prefix = next(one for one in layout.prefixes if one.full == tower_prefix)
    tensors |= published(layout, prefix, seeded_tower(family, config, 0, torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def published(layout: Any, prefix: Prefix, tower: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an encoder under published names."""
    found = {}
    for ours, tensor in tower.items():
        names = layout.published_names(ours)
        rows = tensor.view(layout.published_shape(ours, tuple(tensor.shape))).chunk(len(names))
        for name, part in zip(names, rows, strict=True):
            found[layout.full_name(prefix, name)] = part.contiguous()
    return found
