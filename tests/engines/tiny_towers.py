"""Small checkpoints of models with other towers than Qwen's: config, weights, processor, tokenizer.

The processor files are those of the families' records, with small sizes where a config has them.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tiny_models import IDS, WIDTH
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.engines.models import write_tokenizer
from weights import FAMILIES

TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 400,
    "max_position_embeddings": 32768,
    "bos_token_id": IDS["bos_token_id"],
    "eos_token_id": IDS["eos_token_id"],
    "pad_token_id": IDS["bos_token_id"],
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_channels": 3,
    "patch_size": 14,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 3, 3],
}


class Model(NamedTuple):
    """One model: its config, its tokens by name, and what stands for an image in a prompt."""

    architecture: str
    config: dict[str, Any]
    tokens: dict[str, int]
    mark: str
    processor: str
    files: dict[str, dict[str, Any]] = {}
    """Fields of processor files that differ from those of the family's record."""
    named: dict[str, str] = {}
    """Fields of the tokenizer's config."""
    family: str = ""
    """The family of the tower, where the model has another name."""
    clip: str = ""
    """What stands for a clip in a prompt; empty if the model takes none."""
    scale: float = 0.1
    """Standard deviation of the weights of the language model."""
    prefixes: tuple[str, str] = ("", "")
    """A prefix of the names that transformers saves, and the published one."""


_GLM_TOKENS = {
    "<|begin_of_image|>": 310,
    "<|image|>": 304,
    "<|end_of_image|>": 311,
    "<|begin_of_video|>": 312,
    "<|video|>": 305,
    "<|end_of_video|>": 313,
}
_GLM_IDS = {
    "image_token_id": 304,
    "video_token_id": 305,
    "image_start_token_id": 310,
    "image_end_token_id": 311,
    "video_start_token_id": 312,
    "video_end_token_id": 313,
}
_GLM_VISION = {
    "depth": 3,
    "hidden_size": 128,
    "num_heads": 4,
    "image_size": 112,
    "patch_size": 14,
    "out_hidden_size": WIDTH,
    "intermediate_size": 256,
}
_GLM_MARK = "<|begin_of_image|><|image|><|end_of_image|>"
_GLM_CLIP = "<|begin_of_video|><|video|><|end_of_video|>"
_PIXTRAL_TOKENS = {"[IMG]": 304, "[IMG_BREAK]": 310, "[IMG_END]": 311}
_SIZES = {"image_size": 140, "head_dim": 32, "hidden_act": "silu"}
_PIXTRAL = {
    "text_config": {**TEXT, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "vision_config": {**VISION, **_SIZES, "model_type": "pixtral"},
    "image_token_index": 304,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
}
_IDEFICS_TOKENS = {"<fake_token_around_image>": 310, "<image>": 304, "<global-img>": 312}
_IDEFICS_TOKENS |= {"<end_of_utterance>": 311}
_IDEFICS_TOKENS |= {f"<row_{r}_col_{c}>": 320 + 6 * r + c for r in range(1, 7) for c in range(1, 7)}
_ROPES = {"rope_type": "default", "rope_theta": 10000.0}


def _glm(kind: str, architecture: str, processor: str) -> Model:
    """GLM-4.1V or GLM-OCR, whose merger is as wide as vLLM takes the language model's MLP to be."""
    text = {key: value for key, value in TEXT.items() if kind == "glm_ocr" or key != "head_dim"}
    rope = {**MROPE, "partial_rotary_factor": 1.0, "mrope_section": [4, 6, 6]}
    more = {"intermediate_size": 3 * WIDTH, "rope_parameters": rope}
    config = {
        "model_type": kind,
        "text_config": {**text, "model_type": f"{kind}_text", "rope_parameters": MROPE},
        "vision_config": {**_GLM_VISION, "model_type": f"{kind}_vision"},
        **_GLM_IDS,
    }
    if kind == "glm_ocr":
        config["text_config"] |= more
    return Model(architecture, config, _GLM_TOKENS, _GLM_MARK, processor, clip=_GLM_CLIP)


MODELS: dict[str, Model] = {
    "glm4v": _glm("glm4v", "Glm4vForConditionalGeneration", "Glm4vProcessor"),
    "glm_ocr": _glm("glm_ocr", "GlmOcrForConditionalGeneration", "Glm46VProcessor"),
    "gemma3": Model(
        "Gemma3ForConditionalGeneration",
        {
            "model_type": "gemma3",
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "query_pre_attn_scalar": 32,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"sliding_attention": _ROPES, "full_attention": _ROPES},
            },
            "vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 112}
            | {"vision_use_head": False},
            "mm_tokens_per_image": 16,
            "boi_token_index": 310,
            "eoi_token_index": 311,
            "image_token_index": 304,
            "tie_word_embeddings": True,
        },
        {
            "<start_of_image>": 310,
            "<end_of_image>": 311,
            "<image_soft_token>": 304,
            **{"\n" * count: 313 + count for count in range(1, 5)},
        },
        "<start_of_image>",
        "Gemma3Processor",
        {
            "preprocessor_config": {"size": {"height": 112, "width": 112}, "image_seq_length": 16},
            "processor_config": {"image_seq_length": 16},
        },
        {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        prefixes=("vision_tower.", "vision_tower.vision_model."),
    ),
    "mistral3": Model(
        "Mistral3ForConditionalGeneration",
        {
            **_PIXTRAL,
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "multimodal_projector_bias": False,
        },
        _PIXTRAL_TOKENS,
        "[IMG]",
        "PixtralProcessor",
        {"preprocessor_config": {"size": {"longest_edge": 140}}},
        family="pixtral",
    ),
    "llava": Model(
        "LlavaForConditionalGeneration",
        {
            **_PIXTRAL,
            "model_type": "llava",
            "image_seq_length": 1,
            "multimodal_projector_bias": True,
            "vision_feature_select_strategy": "full",
        },
        _PIXTRAL_TOKENS,
        "[IMG]",
        "PixtralProcessor",
        {
            "preprocessor_config": {"size": {"longest_edge": 140}},
            "processor_config": {"spatial_merge_size": 1},
        },
        family="pixtral",
    ),
    "idefics3": Model(
        "Idefics3ForConditionalGeneration",
        {
            "model_type": "idefics3",
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "idefics3_vision", "image_size": 56},
            "image_token_id": 304,
            "scale_factor": 2,
        },
        _IDEFICS_TOKENS,
        "<image>",
        "Idefics3Processor",
        {
            "preprocessor_config": {
                "max_image_size": {"longest_edge": 56},
                "size": {"longest_edge": 112},
            },
            "processor_config": {"image_seq_len": 4, "processor_class": "Idefics3Processor"},
        },
    ),
    "paddleocr_vl": Model(
        "PaddleOCRVLForConditionalGeneration",
        {
            "model_type": "paddleocr_vl",
            "text_config": {
                **TEXT,
                "model_type": "paddleocr_vl_text",
                "rope_parameters": {**_ROPES, "mrope_section": [4, 6, 6]},
            },
            "vision_config": {**VISION, "model_type": "paddleocr_vl_vision", "image_size": 112},
            "image_token_id": 304,
            "video_token_id": 305,
            "vision_start_token_id": 310,
            "vision_end_token_id": 311,
        },
        {"<|IMAGE_START|>": 310, "<|IMAGE_PLACEHOLDER|>": 304, "<|IMAGE_END|>": 311},
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "PaddleOCRVLProcessor",
        {"preprocessor_config": {"min_pixels": 3136}},
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "gemma4": Model(
        "Gemma4ForConditionalGeneration",
        {
            "model_type": "gemma4",
            "text_config": {
                **TEXT,
                "model_type": "gemma4_text",
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"],
                "vocab_size_per_layer_input": 400,
                "hidden_size_per_layer_input": 0,
                "global_head_dim": 32,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                **VISION,
                "model_type": "gemma4_vision",
                "num_key_value_heads": 4,
                "head_dim": 32,
                "patch_size": 16,
                "position_embedding_size": 64,
                "standardize": True,
                "default_output_length": 70,
            },
            "audio_config": None,
            "image_token_id": 304,
            "video_token_id": 305,
            "boi_token_id": 310,
            "eoi_token_id": 311,
            "tie_word_embeddings": True,
        },
        {
            "<|image>": 310,
            "<image|>": 311,
            "<|image|>": 304,
            "<|video|>": 305,
            "<|audio>": 312,
            "<audio|>": 313,
            "<|audio|>": 314,
        },
        "<|image|>",
        "Gemma4Processor",
        {
            "processor_config": {
                "image_seq_length": 70,
                "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
            }
        },
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
        clip="<|video|>",
        scale=0.03,
    ),
}

MODELS["exaone4_5"] = Model(
    "Exaone4_5_ForConditionalGeneration",
    {
        "model_type": "exaone4_5",
        "text_config": {
            **TEXT,
            "model_type": "exaone4",
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _ROPES,
        },
        "vision_config": {
            "model_type": "exaone4_5_vision",
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "num_key_value_heads": 2,
            "out_hidden_size": WIDTH,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        "image_token_id": 304,
        "video_token_id": 305,
    },
    {"<|vision_start|>": 302, "<|image_pad|>": 304, "<|vision_end|>": 303, "<|video_pad|>": 305},
    "<|vision_start|><|image_pad|><|vision_end|>",
    "Exaone4_5_Processor",
    family="qwen2_5_vl",
)

_LFM_SIZES = {"tile_size": 64, "min_image_tokens": 4, "max_image_tokens": 8, "max_tiles": 6}
_LFM_RULES = FAMILIES["lfm2_vl"].layouts[-1].processor_files["processor_config"]
_LFM_TOKENS = {"<image>": 304, "<|image_start|>": 310, "<|image_end|>": 311}
_LFM_TOKENS |= {f"<|img_row_{n // 6 + 1}_col_{n % 6 + 1}|>": 320 + n for n in range(36)}
_LFM_TEXT = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
_LFM_TEXT |= {"block_ff_dim": 256, "block_auto_adjust_ff_dim": False, "rope_parameters": _ROPES}
_LFM_TEXT |= dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), WIDTH)
_LFM_VISION = {"model_type": "siglip2_vision_model", "patch_size": 16, "num_patches": 64}
_LFM_VISION |= {"vision_use_head": False}
_LFM = {"model_type": "lfm2_vl", "image_token_id": 304, "projector_hidden_size": 160, **_LFM_SIZES}
MODELS["lfm2_vl"] = Model(
    "Lfm2VlForConditionalGeneration",
    {**_LFM, "text_config": TEXT | _LFM_TEXT, "vision_config": VISION | _LFM_VISION},
    {**_LFM_TOKENS, "<|img_thumbnail|>": 312},
    "<image>",
    "Lfm2VlProcessor",
    {"processor_config": {"image_processor": {**_LFM_RULES["image_processor"], **_LFM_SIZES}}},
    prefixes=("model.vision_tower.", "model.vision_tower.vision_model."),
)


def write_tower(folder: Path, name: str) -> Path:
    """Write one of :data:`MODELS` with weights of a fixed seed, in float32."""
    model = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [model.architecture], "torch_dtype": "float32", **model.config}
    config = {"tie_word_embeddings": False, **config}
    for stem, content in {"config": config, **_files(model, name)}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1))
    ids = {**IDS, "image_token_id": 398, "video_token_id": 399}
    write_tokenizer(folder, ids, model.tokens)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | model.named))
    torch.manual_seed(0)
    drawn = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    for weight_name, weight in drawn.named_parameters():
        if weight.ndim > 1:  # larger than at the start of a training, so that towers matter
            language = "language_model" in weight_name or "text_model" in weight_name
            torch.nn.init.normal_(weight, std=model.scale if language else 0.05)
        elif "vision_tower" in weight_name and "q_norm" in weight_name:
            torch.nn.init.constant_(weight, 0.2)  # Gemma 4 divides no products by a root
    drawn.float().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors, (saved, published) = load_file(folder / "model.safetensors"), model.prefixes
    named = {
        f"{published}{name.removeprefix(saved)}" if name.startswith(saved) else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _files(model: Model, name: str) -> dict[str, dict[str, Any]]:
    """The processor files of the family's record, with the model's own fields."""
    published = FAMILIES[model.family or name].layouts[-1].processor_files
    files = {stem: deepcopy(dict(content)) for stem, content in published.items()}
    for stem, content in model.files.items():
        files[stem] = {**files.get(stem, {}), **content}
    for content in files.values():
        content["processor_class"] = model.processor
    return files
