"""The sizes in a config: positive, the heads divide the width, and no field is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

import encoders
from encoders import (
    BlockSizes,
    Gemma4Config,
    Lfm2VLConfig,
    Llama4Config,
    PixtralConfig,
    Qwen3VLConfig,
    Siglip2Config,
    SiglipConfig,
)
from encoders.deepseek.sam import SamSizes
from weights import FAMILIES as RECORDS
from weights.published import PUBLISHED

CONFIGS: dict[type, Any] = {
    type(config): config
    for model in PUBLISHED
    for config in [RECORDS[model.family].config.from_hf(model.config)]
}
"""A published config of each class."""
SIZES: dict[type, Any] = {type(x): x for config in CONFIGS.values() for x in vars(config).values()}
CONFIGS |= {kind: SIZES[kind] for kind in (BlockSizes, SamSizes)}


def sizes_of(config: Any) -> Iterator[str]:
    for field in fields(config):
        if type(getattr(config, field.name)) is int and field.name != "select_layer":
            yield field.name


def test_every_config_is_checked() -> None:
    public = {getattr(encoders, name) for name in encoders.__all__ if name.endswith("Config")}
    protocols = {encoders.EncoderConfig, encoders.PatchConfig, encoders.TileConfig}
    assert public - protocols - {encoders.VisionConfig} <= {*CONFIGS}


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_no_size_is_zero_or_negative(kind: type) -> None:
    for name in sizes_of(CONFIGS[kind]):
        for value in (0, -4):
            if (name, value) != ("num_key_value_heads", 0):  # which stands for num_heads
                with pytest.raises(ValueError, match=f"{name}={value} must be at least 1"):
                    replace(CONFIGS[kind], **{name: value})


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_heads_divide_the_width_of_a_tower(kind: type) -> None:
    names = {*sizes_of(CONFIGS[kind])}
    if {"hidden_size", "num_heads"} <= names and "head_size" not in names:
        heads = CONFIGS[kind].hidden_size - 1
        with pytest.raises(ValueError, match=r"hidden_size=\d+ must be a multiple of num_heads"):
            replace(CONFIGS[kind], num_heads=heads)


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_an_image_has_at_least_one_patch(kind: type) -> None:
    config = CONFIGS[kind]
    # Pixtral's size is that of the longest side, which is rounded up to whole patches.
    if kind is not PixtralConfig and {"image_size", "patch_size"} <= {*sizes_of(config)}:
        with pytest.raises(ValueError, match=r"image_size|patches per side"):
            replace(config, image_size=config.patch_size - 1)


def test_a_published_image_smaller_than_a_patch_is_refused() -> None:
    with pytest.raises(ValueError, match="patches per side=0 must be at least 1"):
        SiglipConfig.from_hf({"image_size": 8})


@pytest.mark.parametrize("kind", [SiglipConfig, Siglip2Config, Lfm2VLConfig])
def test_a_field_without_default_is_said_to_be_missing(kind: Any) -> None:
    with pytest.raises(ValueError, match="the vision config has no num_attention_heads"):
        kind.from_hf({"hidden_size": 1024})


@pytest.mark.parametrize(
    ("kind", "config", "missing"),
    [
        (Gemma4Config, {"num_attention_heads": 8}, "num_key_value_heads; its default 12"),
        (Llama4Config, {"hidden_size": 1024}, "intermediate_size; its default 5632"),
    ],
)
def test_a_default_that_does_not_fit_is_named_as_one(
    kind: Any, config: dict[str, int], missing: str
) -> None:
    with pytest.raises(ValueError, match=f"config has no {missing} is not implemented"):
        kind.from_hf({"vision_config": config})


def test_a_nested_list_is_no_size() -> None:
    config = {"patch_size": [[14], [14]]}
    with pytest.raises(ValueError, match=r"patch_size=\[14\]: must be an integer"):
        Qwen3VLConfig.from_hf(config)
