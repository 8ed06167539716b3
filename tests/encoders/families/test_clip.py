"""CLIP: its class token, its projection, its activation, and what a config may leave out."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, MetaClip2Config, MetaClip2Model

from encoders import ClipConfig, ClipEncoder
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, build_encoder, distance
from tests.oracles.references.clip import clip_keys
from tests.oracles.references.siglip import SIZES
from tests.support.photographs import china, flower, hopper

SMALL = {**SIZES, "num_hidden_layers": 2, "image_size": 112, "projection_dim": 24}
PHOTOS = [china(), flower().resize((64, 200)), hopper().resize((300, 90))]
ACTIVATIONS = ("quick_gelu", "gelu")


def small(**changes: Any) -> ClipEncoder:
    encoder = build_encoder(BY_NAME["clip"], {**SMALL, **changes})
    assert isinstance(encoder, ClipEncoder)
    return encoder


def published(encoder: ClipEncoder, kind: Any = CLIPModel, config: Any = CLIPConfig) -> Any:
    """The whole model of transformers with the weights of an encoder."""
    vision = {
        **SIZES,
        "num_hidden_layers": 2,
        "image_size": 112,
        "patch_size": 14,
        "hidden_act": encoder.config.activation,
    }
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 60}
    text["num_attention_heads"] = 2
    model = kind(config(vision_config=vision, text_config=text, projection_dim=24)).eval()
    found = model.load_state_dict(clip_keys(encoder.state_dict()), strict=False)
    assert not found.unexpected_keys
    assert all(name.startswith(("text_", "logit_")) for name in found.missing_keys)
    return model


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("kinds", [(CLIPModel, CLIPConfig), (MetaClip2Model, MetaClip2Config)])
def test_the_head_gives_the_image_features_of_transformers(act: str, kinds: Any) -> None:
    encoder = small(hidden_act=act)
    model = published(encoder, *kinds)
    pixels = encoder.preprocess(PHOTOS).pixel_values
    with torch.no_grad():
        theirs = model.get_image_features(pixels)
        tokens = model.vision_model(pixels).pooler_output
    heads = encoder.embed(PHOTOS, pool="head")
    classes = encoder.embed(PHOTOS, pool="cls")
    assert distance(heads, getattr(theirs, "pooler_output", theirs)) <= 1e-5
    assert distance(classes, tokens) <= 1e-5


def test_the_two_activations_differ_beyond_the_bound() -> None:
    quick = small()
    exact = small(hidden_act="gelu")
    exact.load_state_dict(quick.state_dict())
    heads = [one.embed(PHOTOS, pool="head") for one in (quick, exact)]
    assert distance(*heads) > 5e-5


@pytest.mark.parametrize("graphed", [False, True])
def test_embed_pools_by_the_head(graphed: bool) -> None:
    encoder = small()
    assert encoder.pooling_head is not None
    prefixes = [output["prefix"] for output in encoder.encode(PHOTOS)]
    wanted = torch.cat([encoder.pooling_head.apply([rows]) for rows in prefixes])
    caller = GraphedEncoder(encoder, backend="static", max_budget=1024) if graphed else encoder
    many = caller.embed(PHOTOS, pool="head")
    torch.testing.assert_close(many, wanted, rtol=1e-5, atol=1e-5)


def timm_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "class_embedding": "cls_token",
        "norm_pre.weight": "norm_pre.weight",
    }
    found = {names.get(name, name): value for name, value in state.items()}
    width = len(found["cls_token"])
    found["cls_token"] = found["cls_token"].view(1, 1, width)
    found["pos_embed"] = found["pos_embed"][None]
    return {**found, "head.bias": torch.zeros(len(found["head.weight"]))}


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_class_token_and_intermediates_are_those_of_timm(act: str) -> None:
    encoder = small(hidden_act=act)
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 1.75, "img_size": 112}
    name = f"vit_large_patch14_clip_{'quickgelu_' if act == 'quick_gelu' else ''}224"
    model = timm.create_model(name, num_classes=24, **sizes).eval()
    model.load_state_dict(timm_state(encoder.state_dict()), strict=True)
    pixels = encoder.preprocess(PHOTOS).pixel_values
    with torch.no_grad():
        rows, vectors = model.forward_features(pixels), model(pixels)
        last, states = model.forward_intermediates(pixels, return_prefix_tokens=True)
        raw = model.forward_intermediates(pixels, norm=True, intermediates_only=True)[-1]
    assert distance(encoder.embed(PHOTOS, pool="cls"), rows[:, 0]) <= 1e-5
    assert distance(encoder.embed(PHOTOS, pool="head"), vectors) <= 1e-5
    ours = encoder.forward_intermediates(pixels, [[3, 8, 8]])
    for mine, (maps, prefix) in zip(ours, states, strict=True):
        assert distance(mine[:, 1:], maps.flatten(2).transpose(1, 2)) <= 1e-5
        assert distance(mine[:, :1], prefix) <= 1e-5
    tokens = encoder(pixels, [[3, 8, 8]]).pooler_output
    assert distance(tokens.view(3, 64, 64), last[:, 1:]) <= 1e-5
    assert distance(tokens.view(3, 8, 8, 64), raw.permute(0, 2, 3, 1)) <= 1e-5


def test_a_config_with_two_towers_is_refused() -> None:
    same = {"hidden_size": 768, "model_type": "clip_vision_model"}
    config = {"vision_config": same, "vision_config_dict": {"hidden_size": 768}}
    assert ClipConfig.from_hf(config) == ClipConfig.from_hf({"vision_config": same})
    config["vision_config_dict"] = {"hidden_act": "gelu"}
    with pytest.raises(ValueError, match="vision_config_dict and vision_config describe different"):
        ClipConfig.from_hf(config)


def test_heads_are_never_guessed_from_the_width() -> None:
    assert ClipConfig.from_hf({"vision_config": {}}).num_heads == 12
    with pytest.raises(ValueError, match="has no num_attention_heads and there is no"):
        ClipConfig.from_hf({"vision_config": {"hidden_size": 1024}})


@pytest.mark.parametrize("act", ["gelu_new", "silu"])
def test_another_activation_is_refused(act: str) -> None:
    with pytest.raises(ValueError, match=f"hidden_act='{act}' is not implemented"):
        ClipConfig.from_hf({"vision_config": {"hidden_act": act}})
