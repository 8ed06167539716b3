"""Folders of models that an engine starts from: configs, processors and a tokenizer of bytes.

Nothing is fetched. The tower is of a published size, the language model of any number of layers;
there are no weights, since an engine draws them (``load_format="dummy"``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.towers import TOWERS
from weights import FAMILIES

SPECIAL = {
    "<|endoftext|>": "bos_token_id",
    "<|im_end|>": "eos_token_id",
    "<|vision_start|>": "vision_start_token_id",
    "<|vision_end|>": "vision_end_token_id",
    "<|image_pad|>": "image_token_id",
    "<|video_pad|>": "video_token_id",
}
"""Special tokens of Qwen models, and the field of the config that has the number of each."""
IDS = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
_ROPE3 = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_QWEN3 = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rope_parameters": {**_ROPE3, "rope_theta": 5000000},
    "rope_scaling": _ROPE3,
    "bos_token_id": IDS["bos_token_id"],
    "eos_token_id": IDS["eos_token_id"],
}
_ROPE2 = {"rope_type": "default", "mrope_section": [16, 24, 24]}
_QWEN2_5 = {
    "model_type": "qwen2_5_vl_text",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_parameters": {**_ROPE2, "rope_theta": 1000000},
    "rope_scaling": _ROPE2,
    "bos_token_id": IDS["bos_token_id"],
    "eos_token_id": IDS["eos_token_id"],
}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-VL-8B": ("Qwen3VLForConditionalGeneration", _QWEN3),
    "Qwen2.5-VL-7B": ("Qwen2_5_VLForConditionalGeneration", _QWEN2_5),
}
"""The towers of :mod:`benchmarks.towers` -> architecture and language model, as published."""
_ALL = {
    **MODELS,
    "Qwen2-VL-7B": (
        "Qwen2VLForConditionalGeneration",
        {**_QWEN2_5, "model_type": "qwen2_vl_text", "max_position_embeddings": 32768},
    ),
}
INTERN_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>")
INTERN_CONFIG = "configuration_internvl_chat"
INTERN_CODE = """
from transformers import PretrainedConfig, Qwen2Config


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"

    def __init__(self, vision_config=None, llm_config=None, **kwargs):
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        self.llm_config = Qwen2Config(**(llm_config or {}))
        super().__init__(**kwargs)

    def get_text_config(self, decoder=None, encoder=None):
        return self.llm_config
"""
"""The class of the config, which repos of InternVL bring along as well."""


def write_model(folder: Path, name: str, layers: int | None = None) -> Path:
    """Write the folder of a published model, without weights.

    Args:
        folder: the folder to write to; made if it does not exist.
        name: one of :data:`MODELS`, "Qwen2-VL-7B" or "InternViT-300M".
        layers: number of layers of the language model; None keeps all.
    """
    if name == "InternViT-300M":
        return write_internvl(folder, dict(TOWERS[name].config), layers or 24)
    architecture, text = _ALL[name]
    text = {**text, "num_hidden_layers": layers or text["num_hidden_layers"]}
    vision = dict(TOWERS[name].config)["vision_config"]
    return write_folder(folder, architecture, vision, text, IDS, TOWERS[name].family)


def write_folder(
    folder: Path,
    architecture: str,
    vision: Mapping[str, Any],
    text: Mapping[str, Any],
    ids: Mapping[str, int],
    family: str,
) -> Path:
    """Write the folder of a model: ``config.json``, processor files and a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    model_type = text["model_type"].removesuffix("_text")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vision_config": deepcopy(dict(vision)),
        "text_config": dict(text),
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **ids,
    }
    if model_type in ("qwen2_vl", "qwen2_5_vl"):  # the published form has one level
        config |= {key: value for key, value in text.items() if key != "model_type"}
    files = {"config": config, **processor_files(family)}
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1))
    write_tokenizer(folder, ids)
    return folder


def write_internvl(folder: Path, config: dict[str, Any], layers: int) -> Path:
    """Write the folder of an InternVL model: its config with a class for it, and a tokenizer.

    Args:
        folder: the folder to write to; made if it does not exist.
        config: the published config; of ``llm_config`` it needs only ``hidden_size``.
        layers: number of layers of the language model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "intermediate_size": 4864,
        "num_hidden_layers": layers,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151680,
        "max_position_embeddings": 32768,
        **config["llm_config"],
    }
    vision = {**config["vision_config"], "initializer_factor": 1.0}  # vLLM reads it
    config |= {"vision_config": vision, "llm_config": text, "torch_dtype": "bfloat16"}
    config["auto_map"] = {"AutoConfig": f"{INTERN_CONFIG}.InternVLChatConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / f"{INTERN_CONFIG}.py").write_text(INTERN_CODE)
    tokens = {token: 151665 + number for number, token in enumerate(INTERN_TOKENS)}
    write_tokenizer(folder, IDS, tokens)
    return folder


def processor_files(family: str) -> dict[str, dict[str, Any]]:
    """Return the processor files that repos of a family publish."""
    name = "qwen3_vl" if family.startswith("qwen3") else family
    files = {k: dict(v) for k, v in FAMILIES[name].layouts[-1].processor_files.items()}
    kind = "Qwen3VLProcessor" if name == "qwen3_vl" else "Qwen2_5_VLProcessor"
    if name == "qwen2_vl":
        kind = "Qwen2VLProcessor"
    for content in files.values():
        content["processor_class"] = kind
    return files


def write_tokenizer(
    folder: Path, ids: Mapping[str, int], more: Mapping[str, int] | None = None
) -> None:
    """Write a tokenizer whose tokens are bytes, with the special tokens at the given numbers."""
    vocab = {
        char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    special = {**{token: ids[field] for token, field in SPECIAL.items()}, **(more or {})}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **special}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    ).save_pretrained(folder)
