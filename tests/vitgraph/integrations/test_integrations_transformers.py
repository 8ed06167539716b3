"""Towers and features inside the tiny vision-language models of transformers."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from encoders.base.vision_encoder import VisionEncoder
from graphwrap import GraphedEncoder
from tests.support.language_models.tiny import (
    CONFIGS,
    QWENS,
    build_model,
    load_own,
    make_prompt,
    photograph,
)
from vitgraph.integrations.transformers import as_vision_tower, mm_encoder_outputs

IMAGES = [photograph(64, 96), photograph(120, 50, seed=1)]
VIDEOS = [[photograph(70, 60, seed=seed) for seed in (2, 3, 4, 5)]]
LIMITS = {"min_pixels": 4096, "max_pixels": 16384}


def limits_of(name: str) -> dict[str, int]:
    return {} if name == "internvl" else LIMITS


def videos_beside_images(name: str) -> list[Any]:
    """The videos, but none for GLM, whose prompts hold either images or videos."""
    return [] if name.startswith("glm") else VIDEOS


def pair(name: str, folder: Path) -> tuple[PreTrainedModel, VisionEncoder]:
    model = build_model(name)
    return model, load_own(name, model, folder)


def logits(model: PreTrainedModel, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def generated(model: PreTrainedModel, inputs: dict[str, Any]) -> list[list[int]]:
    return model.generate(**inputs, max_new_tokens=12, do_sample=False).tolist()


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", QWENS)
def test_a_swapped_tower_keeps_logits_and_tokens(name: str, wrapped: bool, tmp_path: Path) -> None:
    model, encoder = pair(name, tmp_path)
    prompt = make_prompt(encoder, IMAGES, videos_beside_images(name), LIMITS)
    wanted, tokens = logits(model, **prompt.whole), generated(model, prompt.whole)
    tower = GraphedEncoder(encoder, [64, 128], backend="static") if wrapped else encoder
    as_vision_tower(tower).put_into(model)
    assert relative(logits(model, **prompt.whole), wanted) <= 1e-5
    assert generated(model, prompt.whole) == tokens
    assert wrapped is False or tower.stats().to_dict()["budgets"]


@pytest.mark.parametrize("name", ["glm4v", "glm_ocr"])
def test_a_swapped_tower_of_glm_keeps_logits_of_videos(name: str, tmp_path: Path) -> None:
    model, encoder = pair(name, tmp_path)
    prompt = make_prompt(encoder, [], VIDEOS, LIMITS)
    wanted = logits(model, **prompt.whole)
    model.model.visual = as_vision_tower(encoder)
    assert relative(logits(model, **prompt.whole), wanted) <= 1e-5


@pytest.mark.parametrize("name", QWENS)
def test_a_model_with_swapped_tower_saves_and_reloads(name: str, tmp_path: Path) -> None:
    model, encoder = pair(name, tmp_path / "first")
    prompt = make_prompt(encoder, IMAGES, [], LIMITS)
    keys = list(model.state_dict())
    wanted = logits(model, **prompt.whole)
    model.model.visual = as_vision_tower(encoder)
    assert set(model.state_dict()) == set(keys)
    model.save_pretrained(tmp_path / "second")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "second").eval()
    assert type(again.model.visual) is not type(model.model.visual)
    assert torch.equal(logits(again, **prompt.whole), wanted)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_features_encoded_before_generate_give_its_tokens(name: str, tmp_path: Path) -> None:
    model, encoder = pair(name, tmp_path)
    limits = limits_of(name)
    videos = videos_beside_images(name)
    prompt = make_prompt(encoder, IMAGES, videos, limits)
    tokens = generated(model, prompt.whole)
    given = mm_encoder_outputs(encoder, IMAGES, videos, **limits)
    wanted = logits(model, **prompt.whole)
    assert relative(logits(model, **prompt.text, mm_encoder_outputs=dict(given)), wanted) <= 1e-5
    assert generated(model, {**prompt.text, "mm_encoder_outputs": given}) == tokens


@pytest.mark.parametrize("name", list(CONFIGS))
def test_features_serve_several_returned_sequences(name: str, tmp_path: Path) -> None:
    model, encoder = pair(name, tmp_path)
    limits = limits_of(name)
    prompt = make_prompt(encoder, IMAGES, [], limits)
    given = mm_encoder_outputs(encoder, IMAGES, **limits)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    wanted = generated(model, {**prompt.whole, **beams})
    assert generated(model, {**prompt.text, **beams, "mm_encoder_outputs": given}) == wanted


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_logits_of_these_models_depend_on_the_pixels(name: str, tmp_path: Path) -> None:
    """Otherwise the tests above would pass with any tower."""
    model, encoder = pair(name, tmp_path)
    prompt = make_prompt(encoder, IMAGES, [], limits_of(name))
    others = {key: -pixels for key, pixels in prompt.pixels.items()}
    given = [logits(model, **prompt.text, **pixels)[:, -1] for pixels in (prompt.pixels, others)]
    assert relative(*given) > 0.01


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", QWENS)
def test_a_swapped_tower_trains_as_the_original_does(
    name: str, checkpointing: bool, tmp_path: Path
) -> None:
    model, encoder = pair(name, tmp_path)
    prompt = make_prompt(encoder, IMAGES, [], LIMITS)
    swapped = copy.copy(model)
    swapped._modules = dict(model._modules)
    swapped.model = copy.copy(model.model)
    swapped.model._modules = {
        **model.model._modules,
        "visual": as_vision_tower(encoder.requires_grad_(True)),
    }
    swapped.model.visual.gradient_checkpointing = checkpointing
    assert encoder.gradient_checkpointing is checkpointing
    labels = prompt.text["input_ids"]
    grads = []
    for one in (model, swapped):
        one(**prompt.whole, labels=labels).loss.backward()
        grads.append({key: p.grad for key, p in one.model.visual.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    assert max(relative(grads[1][key], grads[0][key]) for key in grads[0]) <= 1e-4


def test_a_copied_model_has_a_tower_of_its_own(tmp_path: Path) -> None:
    model, encoder = pair("qwen3_vl", tmp_path)
    prompt = make_prompt(encoder, IMAGES, [], LIMITS)
    model.model.visual = as_vision_tower(encoder)
    wanted = logits(model, **prompt.whole)
    other = copy.deepcopy(model)
    with torch.no_grad():
        encoder.merger.linear_fc2.weight.zero_()
    assert torch.equal(logits(other, **prompt.whole), wanted)
    assert not torch.equal(logits(model, **prompt.whole), wanted)


def test_a_tower_moved_with_its_model_moves_the_encoder(tmp_path: Path) -> None:
    model, encoder = pair("qwen2_vl", tmp_path)
    model.model.visual = tower = as_vision_tower(encoder)
    model.double()
    assert tower.dtype == torch.float64
    assert next(encoder.parameters()).dtype == torch.float64
    grid = torch.tensor([[1, 4, 6]])
    output = tower(torch.randn(24, *encoder.row_shape), grid)
    assert output.pooler_output.dtype == torch.float64
    assert output.last_hidden_state.shape == (24, 48)
    assert isinstance(tower(torch.randn(24, *encoder.row_shape), grid, return_dict=False), tuple)


def test_what_cannot_serve_a_language_model_is_refused(tmp_path: Path) -> None:
    _, encoder = pair("qwen3_vl", tmp_path / "qwen")
    graphed = GraphedEncoder(encoder, backend="static", outputs=["pooler_output"])
    with pytest.raises(ValueError, match="no deepstack_features"):
        mm_encoder_outputs(graphed, IMAGES, **LIMITS)
    with pytest.raises(ValueError, match="no deepstack_features"):
        as_vision_tower(graphed)
    graphed = GraphedEncoder(encoder, backend="static", outputs=["last_hidden_state"])
    with pytest.raises(ValueError, match="no pooler_output"):
        mm_encoder_outputs(graphed, IMAGES, **LIMITS)
    assert mm_encoder_outputs(encoder) == {}


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "vitgraph.integrations.transformers"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers.modeling_outputs", None)
    with pytest.raises(ImportError, match="pip install 'transformers"):
        importlib.import_module(name)
