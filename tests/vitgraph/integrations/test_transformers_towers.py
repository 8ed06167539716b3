"""Encoders in the place of the tower and the projector of transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel, SiglipConfig, SiglipModel

from encoders import Lfm2VLEncoder
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, build_pair, slow
from tests.oracles.references import minimax_m3
from tests.oracles.versions import skip_without
from tests.support.language_models.projected import CASES, build
from vitgraph.integrations.model_towers.records import CALLS, NO_MODEL, REFUSED
from vitgraph.integrations.transformers import as_vision_tower
from weights import FAMILIES, build_config

KINDS = [kind if kind in ("mistral3", "gemma3", "internvl") else slow(kind) for kind in CASES]
"""All models; three of them run in a plain pytest."""


def logits(model: PreTrainedModel, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def graphs(encoder: Any) -> GraphedEncoder:
    budgets: Any = [64, 192]
    if isinstance(encoder, Lfm2VLEncoder):
        budgets = {"image": budgets, "tiles": [256]}
    return GraphedEncoder(encoder, budgets, backend="static")


OLDER = {
    "minimax_m3_vl": minimax_m3.OLDER,
    "smolvlm": ("transformers", "5.21", "its features come in rows of the patch's size"),
}
"""Models that an older transformers computes otherwise."""


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replaced_tower_and_projector_keep_logits_and_tokens(kind: str, wrapped: bool) -> None:
    if kind in OLDER:
        skip_without(*OLDER[kind])
    model, encoder, prompt = build(kind)
    wanted = logits(model, **prompt)
    written = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    tower = graphs(encoder) if wrapped else encoder
    as_vision_tower(tower).put_into(model)
    assert relative(logits(model, **prompt), wanted) <= 1e-5
    assert model.generate(**prompt, max_new_tokens=8, do_sample=False).equal(written)
    others = {**prompt, "pixel_values": -prompt["pixel_values"]}
    assert relative(logits(model, **others), wanted) > 0.01  # so the pixels matter
    assert wrapped is False or tower.stats().to_dict()["eager_calls"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_the_weights_of_the_replacing_tower_alone(kind: str) -> None:
    model, encoder, _ = build(kind)
    before = sum(weight.numel() for weight in model.parameters())
    as_vision_tower(encoder).put_into(model)
    assert sum(weight.numel() for weight in model.parameters()) == before
    model.double()
    assert encoder.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_a_replaced_tower(kind: str) -> None:
    grads = []
    for replaced in (False, True):
        model, encoder, prompt = build(kind)
        if replaced:
            as_vision_tower(encoder.requires_grad_(True)).put_into(model)
        pixels = prompt["pixel_values"].requires_grad_(True)
        model(**prompt, labels=prompt["input_ids"]).loss.backward()
        assert pixels.grad is not None
        grads.append(pixels.grad)
    assert relative(grads[1], grads[0]) <= 1e-4
    assert all(weight.grad is not None for weight in encoder.parameters() if weight.ndim > 1)


@pytest.mark.slow
def test_clips_of_gemma_4_keep_their_features() -> None:
    model, encoder, prompt = build("gemma4")
    clip = {
        "pixel_values_videos": prompt["pixel_values"],
        "video_position_ids": prompt["image_position_ids"],
        "num_frames_per_video": torch.tensor([2]),
    }
    with torch.no_grad():
        (wanted,) = model.model.get_video_features(**clip).pooler_output
        as_vision_tower(encoder).put_into(model)
        (found,) = model.model.get_video_features(**clip).pooler_output
    assert relative(found, wanted) <= 1e-5


@pytest.mark.parametrize("head", [False, True])
def test_a_replaced_tower_of_siglip_keeps_tokens_and_vectors(head: bool) -> None:
    encoder, reference = build_pair(
        BY_NAME["siglip"], {**BY_NAME["siglip"].tiny, "vision_use_head": head}
    )
    vision = reference.config.to_dict()
    text = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 8}
    text |= {"num_attention_heads": 4, "vocab_size": 8, "projection_size": 64}
    model = SiglipModel(SiglipConfig(vision_config=vision, text_config=text)).eval()
    model.vision_model = reference
    pixels = torch.randn(2, *encoder.row_shape)
    with torch.no_grad():
        wanted = model.vision_model(pixel_values=pixels)
        as_vision_tower(encoder).put_into(model)
        found = model.get_image_features(pixels)
    assert relative(found.last_hidden_state, wanted.last_hidden_state) <= 1e-5
    if head:
        assert relative(found.pooler_output, wanted.pooler_output) <= 1e-5


def test_a_model_with_a_replaced_projector_is_not_saved(tmp_path: Path) -> None:
    model, encoder, _ = build("gemma3")
    as_vision_tower(encoder).put_into(model)
    with pytest.raises(ValueError, match=r"vision_tower.*other names.* save the model before"):
        model.save_pretrained(tmp_path)


def test_a_tower_is_put_into_a_model_that_calls_it_alone() -> None:
    _, encoder, _ = build("gemma3")
    model = build("llama4").model
    with pytest.raises(ValueError, match=r"Gemma3Encoder is not the tower of .*'llama4'.* gemma3"):
        as_vision_tower(encoder).put_into(model)
    model = build("gemma3").model
    model.config.text_config.hidden_size = 50
    with pytest.raises(ValueError, match="tokens of width 48, and this model's are 50 wide"):
        as_vision_tower(encoder).put_into(model)


def test_padded_tiles_of_idefics3_are_refused() -> None:
    model, encoder, prompt = build("idefics3")
    as_vision_tower(encoder).put_into(model)
    prompt["pixel_attention_mask"][0, 0, 56:] = False
    with pytest.raises(ValueError, match=r"patches are padding.*do_image_splitting=True"):
        logits(model, **prompt)


def test_every_encoder_replaces_a_tower_or_says_why_not() -> None:
    assert not CALLS.keys() & REFUSED.keys()
    for family in FAMILIES.values():
        if family.encoder not in CALLS:
            model = family.facts.published[0]
            encoder = family.on_meta(build_config(family, model.config, None, model.repo_id))
            with pytest.raises(ValueError, match=REFUSED.get(family.encoder, NO_MODEL)):
                as_vision_tower(encoder)


def test_every_model_type_is_one_of_transformers() -> None:
    kinds = [kind for call in CALLS.values() for kind in call.models]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) <= set(CONFIG_MAPPING)
