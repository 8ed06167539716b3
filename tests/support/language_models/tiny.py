"""Tiny vision-language models of transformers with random weights, and prompts for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from encoders import Glm4VEncoder, GlmOCREncoder
from encoders.base.vision_encoder import VisionEncoder
from tests.oracles import draw_weights
from vitgraph.seeded import SEEDED
from weights import load_encoder

VOCABULARY = 64
IMAGE, VIDEO, START, END = 60, 61, 62, 63
TEXT = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "head_dim": 12,
    "initializer_range": 0.15,
}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
GLM_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": START,
    "video_end_token_id": END,
}
GLM_ROPE = {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 1.0}}
GLM = {"depth": 2, "hidden_size": 48, "num_heads": 4, "out_hidden_size": 48}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
QWEN3 = {
    "depth": 3,
    "hidden_size": 48,
    "num_heads": 4,
    "intermediate_size": 64,
    "out_hidden_size": 48,
    "patch_size": 16,
    "num_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **QWEN_TOKENS,
        "text_config": {**TEXT, **ROPE},
        "vision_config": {
            "depth": 2,
            "embed_dim": 48,
            "num_heads": 4,
            "hidden_size": 48,
            "mlp_ratio": 2,
        },
    },
    "qwen2_5_vl": {
        **QWEN_TOKENS,
        "text_config": {**TEXT, **ROPE},
        "vision_config": {
            "depth": 3,
            "hidden_size": 48,
            "num_heads": 4,
            "intermediate_size": 64,
            "out_hidden_size": 48,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        **QWEN_TOKENS,
        "text_config": {**TEXT, **ROPE},
        "vision_config": {**QWEN3, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {
        **QWEN_TOKENS,
        "text_config": {**TEXT, **ROPE, **LINEAR},
        "vision_config": QWEN3,
    },
    "glm4v": {
        **GLM_TOKENS,
        "text_config": {**TEXT, **GLM_ROPE},
        "vision_config": {**GLM, "intermediate_size": 64, "image_size": 112},
    },
    "glm_ocr": {
        **GLM_TOKENS,
        "text_config": {**TEXT, **GLM_ROPE},
        "vision_config": {**GLM, "intermediate_size": 64},
    },
    "internvl": {
        "image_token_id": IMAGE,
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": [56, 56],
            "patch_size": [14, 14],
            "norm_type": "layer_norm",
            "attention_bias": True,
        },
    },
}
QWENS = [name for name in CONFIGS if name != "internvl"]


def build_model(name: str) -> PreTrainedModel:
    """Build a random float32 model whose logits are within 5e-6 of those in float64."""
    config = AutoConfig.for_model(name, **CONFIGS[name])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    for part, weights in model.model.named_children():
        if part != "language_model":
            draw_weights(weights, calm=0.7)
    return model.eval()


def load_own(name: str, model: PreTrainedModel, folder: Path) -> VisionEncoder:
    """Load our encoder of a model from what the model's ``save_pretrained`` writes."""
    model.save_pretrained(folder)
    recipe = "intern_vit_hf" if name == "internvl" else name
    for file, content in SEEDED[recipe].layout.processor_files.items():
        content = dict(content)
        if name == "internvl":
            content["size"] = {"height": 56, "width": 56}
        (folder / f"{file}.json").write_text(json.dumps(content))
    encoder = load_encoder(folder, progress=False)
    assert isinstance(encoder, VisionEncoder)
    return encoder


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@dataclass
class Prompt:
    """A prompt with images and videos as a processor makes it: token ids and pixels."""

    text: dict[str, Tensor]
    pixels: dict[str, Tensor]

    @property
    def whole(self) -> dict[str, Tensor]:
        return {**self.text, **self.pixels}


def make_prompt(
    encoder: VisionEncoder,
    images: list[Image.Image],
    videos: list[list[Image.Image]],
    limits: dict[str, int],
) -> Prompt:
    """Make a prompt with a placeholder per feature, all images before all videos."""
    tokens, types = [3], [0]
    text: dict[str, Tensor] = {}
    pixels: dict[str, Tensor] = {}
    tiled = len(encoder.row_shape) > 1
    video_mark = IMAGE if _is_glm(encoder) else VIDEO
    for kind, items, mark in (("image", images, IMAGE), ("video", videos, video_mark)):
        if not items:
            continue
        given: dict[str, Any] = {f"{kind}s": items, **limits}
        inputs = encoder.preprocess(**given)
        specs = encoder.item_specs(inputs.grid_thw)
        if tiled:
            mark = IMAGE
            parts = [pixels["pixel_values"]] if pixels else []
            pixels["pixel_values"] = torch.cat([*parts, inputs.pixel_values])
        else:
            pixels["pixel_values" + ("_videos" if kind == "video" else "")] = inputs.pixel_values
            text[f"{kind}_grid_thw"] = inputs.grid_thw
        for (frames, _, _), spec in zip(inputs.grid_thw.tolist(), specs, strict=True):
            runs = frames if kind == "video" and not tiled else 1
            shares = (
                [spec.output_tokens // runs] * runs if _per_frame(encoder) else [spec.output_tokens]
            )
            number = 2 if kind == "video" else 1
            tokens += chain.from_iterable([START, *[mark] * share, END, 5] for share in shares)
            types += chain.from_iterable([0, *[number] * share, 0, 0] for share in shares)
    ids = torch.tensor([[*tokens, 7, 9]])
    if not tiled:
        text["mm_token_type_ids"] = torch.tensor([[*types, 0, 0]])
    return Prompt({"input_ids": ids, "attention_mask": torch.ones_like(ids), **text}, pixels)


def _per_frame(encoder: VisionEncoder) -> bool:
    """Return whether prompts have a run of placeholders per frame pair (Qwen3-VL and later,
    GLM).
    """
    return "Qwen3" in type(encoder).__name__ or _is_glm(encoder)


def _is_glm(encoder: VisionEncoder) -> bool:
    """Return whether videos have the placeholders of images, so that no prompt has both."""
    return isinstance(encoder, Glm4VEncoder | GlmOCREncoder)


TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def write_repo(folder: Path) -> Path:
    """Write the repo of a tiny Qwen3-VL: model, tokenizer, processors and chat template."""
    special = {
        "<|image_pad|>": IMAGE,
        "<|video_pad|>": VIDEO,
        "<|vision_start|>": START,
        "<|vision_end|>": END,
    }
    letters = {chr(ord("A") + number): number for number in range(3, IMAGE)}
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **letters, **special}
    tokenizer = Tokenizer(WordLevel(words, unk_token="D"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    build_model("qwen3_vl").save_pretrained(folder)
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=16, size={"shortest_edge": 4096, "longest_edge": 65536}
        ),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            eos_token="</s>",
            additional_special_tokens=list(special),
        ),
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder
