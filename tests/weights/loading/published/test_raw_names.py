"""Checkpoints with the names of transformers' own modules, as ``state_dict()`` has them, load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from tests.support.hub.checkpoints import same_weights
from weights import extract_encoder, load_encoder

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*defaults are used:UserWarning"),
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
        reason="transformers had other names before 5.23",
    ),
]
SMALL = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_heads": 2,
}
KINDS = [
    "paddleocr_vl",
    pytest.param("minimax_m3_vl", marks=pytest.mark.slow),
    "qianfan_ocr",
    "ernie4_5_vl_moe",
    "lfm2_vl",
]


def make_model(kind: str) -> Any:
    """Return transformers' model of a kind with a small tower, and without its language model."""
    config: Any = transformers.AutoConfig.for_model(kind)
    for name, value in SMALL.items():
        if name in vars(config.vision_config):
            setattr(config.vision_config, name, value)
    if "projector_hidden_size" in vars(config):
        config.projector_hidden_size = 64
    text = config.text_config
    layers, text.num_hidden_layers = text.num_hidden_layers, 1
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:1])
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    model.model.language_model, model.lm_head = nn.Module(), nn.Module()
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_the_modules_of_transformers_load(tmp_path: Path, kind: str) -> None:
    model = make_model(kind)
    raw = tmp_path / "raw"
    model.save_pretrained(tmp_path / "saved")
    model.config.save_pretrained(raw)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, raw / "model.safetensors")
    encoder = load_encoder(raw)
    assert same_weights(encoder, load_encoder(tmp_path / "saved"))
    assert same_weights(encoder, load_encoder(extract_encoder(raw, tmp_path / "extracted")))
    assert same_weights(encoder, load_encoder(encoder.save_pretrained(tmp_path / "own")))
