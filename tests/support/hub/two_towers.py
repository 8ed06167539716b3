"""Small seeded checkpoints of whole CLIP and SigLIP models, with a small tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Siglip2Tokenizer

KINDS = ("clip", "metaclip_2", "siglip", "siglip2")
_NAMES = {
    "clip": "CLIP",
    "metaclip_2": "MetaClip2",
    "siglip": "Siglip",
    "siglip2": "Siglip2",
}
_WORDS = ("red", "car", "blue", "sky", "flower", "dog", "house", "tree", "cat", "sea")
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TEXT = {**_SIZES, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 40}
_LENGTH = 16
"""The most tokens of a text."""


def tokenizer_of(kind: str) -> Any:
    """Return a small tokenizer that ends and pads texts as the tokenizer of a kind does."""
    if kind == "siglip2":
        letters = {letter: 5 + n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz▁")}
        special = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4}
        tokenizer = Siglip2Tokenizer(vocab={**special, **letters}, model_max_length=_LENGTH)
        tokenizer._tokenizer.post_processor = _ending("<eos>", 1)
        return tokenizer
    pad, end = (1, 1) if kind == "siglip" else (1, 2) if kind == "metaclip_2" else (23, 23)
    words = {word: 4 + n for n, word in enumerate(_WORDS)}
    vocab = {"<s>": 0, "<pad>": 1, "<end>": 2, "<unk>": 3, **words, "<z>": 23}
    names = {number: name for name, number in vocab.items()}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind != "siglip":  # whose texts are lower-cased before
        backend.normalizer = normalizers.Lowercase()
    backend.post_processor = _ending(names[end], end)
    special_tokens = {"eos_token": names[end], "pad_token": names[pad], "unk_token": "<unk>"}
    side = {"padding_side": "left" if kind == "siglip" else "right"}  # left: Siglip2Tokenizer's
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=_LENGTH, **special_tokens, **side
    )


def _ending(name: str, number: int) -> Any:
    return processors.TemplateProcessing(single=f"$A {name}", special_tokens=[(name, number)])


def write_two_towers(folder: Path, kind: str) -> Path:
    """Write a whole model of a kind, its processor file and its tokenizer to a folder."""
    name = _NAMES[kind]
    vision: dict[str, Any] = {**_SIZES, "image_size": 32, "patch_size": 8}
    text: dict[str, Any] = {**_TEXT, "max_position_embeddings": _LENGTH}
    if kind.startswith("siglip"):
        text |= {"projection_size": 64}
        if kind == "siglip2":
            vision = {**_SIZES, "num_patches": 16, "patch_size": 8}
        options = {}
    else:
        text |= {"eos_token_id": 2, "bos_token_id": 22, "pad_token_id": 1}
        options = {"projection_dim": 24}
    config = getattr(transformers, f"{name}Config")
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{name}Model")(
        config(vision_config=vision, text_config=text, **options)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer_of(kind).save_pretrained(folder)
    prepared = "CLIP" if kind == "metaclip_2" else name
    processor: dict[str, Any] = {"image_processor_type": f"{prepared}ImageProcessor"}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if kind == "siglip2":
        processor |= {"patch_size": 8, "max_num_patches": 16}
    elif kind == "siglip":
        processor |= {"size": {"height": 32, "width": 32}, "resample": 3}
    else:
        processor |= {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def token_ids(folder: Path, kind: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return the inputs that the text half of a model takes, as its processor makes them."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if not kind.startswith("siglip"):
        return dict(tokenizer([*texts], padding=True, truncation=True, return_tensors="pt"))
    words = [text.lower() for text in texts]
    rule = {"padding": "max_length", "truncation": True, "max_length": _LENGTH}
    ids = tokenizer(words, **rule, padding_side="right", return_tensors="pt")["input_ids"]
    return {"input_ids": ids}
