"""Every key of transformers' vision configs is followed, refused, or inert by name.

A followed key is changed in both models, which have to agree; an inert one changes neither. A key
that a new version of transformers adds makes a test fail until it stands in one of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.exaone4_5.configuration_exaone4_5 import Exaone4_5_VisionConfig
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
from transformers.models.internvl.configuration_internvl import InternVLVisionConfig
from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as omni2
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as omni3
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpVisionConfig
from transformers.models.sam.configuration_sam import SamVisionConfig
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig

from encoders import Gemma4Config, InternViTConfig, Step3VLConfig
from encoders.deepseek.deepseek_vl import DeepseekVLConfig, DeepseekVLHybridConfig
from encoders.qwen.qwen2_5_vl import Qwen2_5VLConfig
from encoders.qwen.qwen2_vl import Qwen2VLConfig
from encoders.qwen.qwen3_vl import Qwen3VLConfig
from tests.oracles import (
    BY_NAME,
    Config,
    build_encoder,
    build_pair,
    distance,
    draw_pixels,
    edited,
)
from tests.oracles.versions import needs

GRIDS = [[1, 8, 12], [2, 4, 8]]
ROPE = {"rope_type": "axial", "rope_theta": 100.0}
FLOAT32 = 1e-5


@dataclass(frozen=True)
class Keys:
    """What becomes of the keys of a config class of transformers, each with another value."""

    reads: type
    followed: Config
    refused: Config
    inert: Config
    base: Config = field(default_factory=dict)
    """A config that can be read."""
    under: tuple[str, ...] = ("vision_config",)
    beside: Config = field(default_factory=dict)
    """The other parts of the config."""

    def read(self, changes: Config) -> Any:
        config = {**self.base, **changes}
        for name in reversed(self.under):
            config = {name: config}
        return self.reads.from_hf({**self.beside, **config})  # type: ignore[attr-defined]


QWEN = {
    "depth": 2,
    "num_heads": 2,
    "in_channels": 1,
    "patch_size": 8,
    "spatial_merge_size": 4,
    "temporal_patch_size": 1,
    "rope_parameters": ROPE,
}
INERT = {"initializer_range": 0.5}
QWEN2_5 = {
    **QWEN,
    "hidden_size": 96,
    "intermediate_size": 100,
    "out_hidden_size": 40,
    "patch_size": 28,
    "window_size": 224,
    "fullatt_block_indexes": [0, 2],
}
QWEN3_5 = {
    **{key: value for key, value in QWEN.items() if key != "num_heads"},
    "num_heads": 6,
    "hidden_size": 48,
    "intermediate_size": 100,
    "out_hidden_size": 40,
    "num_position_embeddings": 144,
}
QWEN3 = {**QWEN3_5, "depth": 4, "deepstack_visual_indexes": [1]}
OTHER_ACT = {"hidden_act": "gelu"}
ALIASES = {"in_channels": "in_chans", "patch_size": "spatial_patch_size"}
"""Names that are published beside those that transformers reads."""
IN_TRAINING = {"attention_dropout": 0.5, "initializer_range": 0.5}

TABLE: dict[type[PreTrainedConfig], tuple[str, Keys]] = {
    Qwen2VLVisionConfig: (
        "qwen2_vl",
        Keys(
            Qwen2VLConfig,
            {**QWEN, "embed_dim": 96, "hidden_size": 40, "mlp_ratio": 3},
            {"hidden_act": "gelu"},
            INERT,
        ),
    ),
    Qwen2_5_VLVisionConfig: (
        "qwen2_5_vl",
        Keys(Qwen2_5VLConfig, QWEN2_5, OTHER_ACT, {**INERT, "tokens_per_second": 2}),
    ),
    omni2.Qwen2_5OmniVisionEncoderConfig: (
        "qwen2_5_omni",
        Keys(Qwen2_5VLConfig, QWEN2_5, OTHER_ACT, INERT),
    ),
    Exaone4_5_VisionConfig: (
        "exaone4_5",
        Keys(Qwen2_5VLConfig, {**QWEN2_5, "num_key_value_heads": 1}, OTHER_ACT, INERT),
    ),
    Qwen3VLVisionConfig: ("qwen3_vl", Keys(Qwen3VLConfig, QWEN3, OTHER_ACT, INERT)),
    omni3.Qwen3OmniMoeVisionEncoderConfig: (
        "qwen3_omni",
        Keys(Qwen3VLConfig, QWEN3, OTHER_ACT, INERT),
    ),
    Qwen3_5VisionConfig: ("qwen3_5", Keys(Qwen3VLConfig, QWEN3_5, OTHER_ACT, INERT)),
    Gemma4VisionConfig: (
        "gemma4",
        Keys(
            Gemma4Config,
            {
                "hidden_size": 96,
                "intermediate_size": 100,
                "num_hidden_layers": 2,
                "head_dim": 32,
                "patch_size": 8,
                "pooling_kernel_size": 4,
                "position_embedding_size": 100,
                "rms_norm_eps": 1e-2,
                "rope_parameters": {**ROPE, "rope_theta": 1e4},
                "standardize": False,
                "use_clipped_linears": True,
            },
            {
                "hidden_activation": "gelu",
                "attention_bias": True,
                "num_attention_heads": 6,  # queries share no keys
                "num_key_value_heads": 1,
            },
            {**IN_TRAINING, "max_position_embeddings": 100},
        ),
    ),
}
"""The families whose reference takes its config as it is published."""

LONE: dict[type[PreTrainedConfig], Keys] = {
    Qwen4ExpVisionConfig: Keys(
        Qwen3VLConfig,
        QWEN3_5,
        OTHER_ACT,
        INERT,
        base={"model_type": "qwen4_exp_vision", "num_heads": 4},
    ),
    InternVLVisionConfig: Keys(
        InternViTConfig,
        {
            "hidden_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "attention_bias": True,
            "use_qk_norm": True,
            "intermediate_size": 100,
            "norm_type": "rms_norm",
            "layer_norm_eps": 1e-5,
            "image_size": 224,
            "patch_size": 28,
            "num_channels": 1,
        },
        {
            "hidden_act": "silu",
            "use_mask_token": True,
            "use_absolute_position_embeddings": False,
            "use_mean_pooling": False,
        },
        {
            **IN_TRAINING,
            "hidden_dropout_prob": 0.5,
            "projection_dropout": 0.5,
            "layer_scale_init_value": 0.5,
        },
        base={"model_type": "internvl_vision"},
        beside={"text_config": {"hidden_size": 48}},
    ),
    Step3p7VisionConfig: Keys(
        Step3VLConfig,
        {
            "hidden_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_channels": 1,
            "image_size": 364,
            "patch_size": 28,
            "layer_norm_eps": 1e-6,
            "mlp_ratio": 2.0,
        },
        {"hidden_act": "gelu", "rope_parameters": ROPE},
        {  # its MLP has mlp_ratio, its rope any number of positions
            "attention_dropout": 0.5,
            "layer_scale_init_value": 0.5,
            "intermediate_size": 100,
            "max_position_embeddings": 100,
        },
    ),
    SiglipVisionConfig: Keys(
        DeepseekVLConfig,
        {
            "hidden_size": 384,
            "intermediate_size": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_channels": 1,
            "image_size": 448,
            "patch_size": 8,
        },
        {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-5},
        {"attention_dropout": 0.5, "vision_use_head": False},
        base={"hidden_act": "gelu"},
        beside={"text_config": {"hidden_size": 48}},
    ),
    SamVisionConfig: Keys(
        DeepseekVLHybridConfig,
        {
            "hidden_size": 384,
            "output_channels": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_channels": 1,
            "image_size": 512,
            "patch_size": 8,
            "mlp_ratio": 2.0,
            "window_size": 7,
            "global_attn_indexes": [1],
            "mlp_dim": 100,
        },
        {
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "qkv_bias": False,
            "use_abs_pos": False,
            "use_rel_pos": False,
        },
        {**IN_TRAINING, "num_pos_feats": 64},
        base={"global_attn_indexes": [0]},
        under=("high_res_vision_config",),
        beside={"text_config": {"hidden_size": 48}, "vision_config": {"hidden_act": "gelu"}},
    ),
}
"""The families whose configs transformers reads after a conversion."""
EVERY = {**{kind: keys for kind, (_, keys) in TABLE.items()}, **LONE}
ids: Any = {"ids": lambda value: value.__name__ if isinstance(value, type) else str(value)}


def own_keys(kind: type[PreTrainedConfig]) -> set[str]:
    """The keys that a config class adds to those of every config."""
    every = {entry.name for entry in fields(PreTrainedConfig)}  # type: ignore[arg-type]
    return {entry.name for entry in fields(kind)} - every  # type: ignore[arg-type]


def whole(kind: type[PreTrainedConfig]) -> Keys:
    """The keys of a family, on the base of its tiny tower where there is one."""
    if kind in LONE:
        return LONE[kind]
    name, keys = TABLE[kind]
    family = BY_NAME[name]
    config = edited(family.config, **family.tiny)
    vision = config.get("thinker_config", config)["vision_config"]
    vision = {key: value for key, value in vision.items() if key not in ALIASES.values()}
    return Keys(keys.reads, keys.followed, keys.refused, keys.inert, vision)


def with_age(kind: type[PreTrainedConfig]) -> Any:
    """The class of a config, skipped where an older transformers lacks a key of the table."""
    if kind is not SiglipVisionConfig:
        return kind
    return pytest.param(kind, marks=needs("transformers", "5.23", "no vision_use_head"))


@pytest.mark.parametrize("kind", [with_age(kind) for kind in EVERY], **ids)
def test_every_key_is_followed_refused_or_inert_by_name(kind: type[PreTrainedConfig]) -> None:
    keys = EVERY[kind]
    named = [*keys.followed, *keys.refused, *keys.inert]
    assert len(named) == len(set(named))
    assert set(named) == own_keys(kind)


@pytest.mark.parametrize("kind", EVERY, **ids)
def test_another_value_is_followed_refused_or_without_effect(kind: type[PreTrainedConfig]) -> None:
    keys = whole(kind)
    usual = keys.read({})
    for key, value in keys.followed.items():
        fits = (
            {"hidden_size": 384} if key == "num_attention_heads" and kind is SamVisionConfig else {}
        )
        assert keys.read({key: value, **fits}) != keys.read(fits), key
    for key, value in keys.refused.items():
        with pytest.raises(ValueError, match="is not implemented"):
            keys.read({key: value})
    for key, value in keys.inert.items():
        assert keys.read({key: value}) == usual, key


def tokens_of(output: Any) -> torch.Tensor:
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


@pytest.mark.parametrize("kind", TABLE, **ids)
@pytest.mark.parametrize("what", ["followed", "inert"])
def test_the_reference_does_the_same_with_each_key(kind: type[PreTrainedConfig], what: str) -> None:
    name, keys = TABLE[kind]
    family = BY_NAME[name]
    usual = build_encoder(family, family.tiny)
    for key, value in getattr(keys, what).items():
        ours, theirs = build_pair(family, {**family.tiny, ALIASES.get(key, key): value, key: value})
        pixels = draw_pixels(ours, GRIDS)
        output = ours(pixels, GRIDS)
        truth = family.output(theirs, pixels, torch.tensor(GRIDS))
        assert distance(tokens_of(output), tokens_of(truth)) <= FLOAT32, key
        if what == "inert":
            assert torch.equal(tokens_of(output), tokens_of(usual(pixels, GRIDS)))


# --- two names of one thing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2_vl", {"depth": 3, "num_hidden_layers": 5}),
        ("qwen2_5_vl", {"num_heads": 16, "num_attention_heads": 8}),
        ("qwen3_vl", {"in_channels": 3, "in_chans": 1}),
        ("step3_vl", {"width": 1536, "hidden_size": 768}),
    ],
)
def test_two_names_of_one_size_may_not_disagree(name: str, changes: Config) -> None:
    """transformers takes the one that its config class reads last."""
    family = BY_NAME[name]
    with pytest.raises(ValueError, match=r"=\d+ and \w+=\d+ are names of one thing: give it one"):
        family.config_class.from_hf(edited(family.config, **changes))
    same = dict.fromkeys(changes, next(iter(changes.values())))
    family.config_class.from_hf(edited(family.config, **same))


@pytest.mark.parametrize(
    ("reads", "name"),
    [(InternViTConfig, "attention_bias"), (Qwen3VLConfig, "num_attention_heads")],
)
def test_a_bad_value_is_reported_by_the_name_that_the_config_has(reads: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='x'"):
        reads.from_hf({name: "x"})


@pytest.mark.parametrize("ratio", ["4", [4], True, -1, 0, 1e9, float("nan")], ids=repr)
def test_a_ratio_that_makes_no_mlp_is_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match=r"mlp_ratio=.*must be a number above 0 and at most 64"):
        Qwen2VLConfig.from_hf({"mlp_ratio": ratio})
