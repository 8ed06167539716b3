"""The reference models that our towers are held against, with the same weights in both.

A :class:`Family` is one line of the parity tables: the config as published, our encoder, the reference
from transformers, and the key map between them. The maps are written here once more, apart from
``weights``, so that a mistake there cannot hide itself.

Weights are drawn so that a mistake shows: norm gains around 1, biases that are not zero, a position
table from N(0, 1), query and key weights large enough for the softmax to have peaks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import InternVLConfig, InternVLModel
from transformers.initialization import no_init_weights
from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as omni2_config
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni2
from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as qwen2_5_config
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import configuration_qwen2_vl as qwen2_config
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_5 import configuration_qwen3_5 as qwen3_5_config
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as omni3_config
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni3
from transformers.models.qwen3_vl import configuration_qwen3_vl as qwen3_config
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

from encoders.contract import EncoderOutput, VisionEncoder
from encoders.intern_vit import InternViT, InternViTConfig
from encoders.qwen2_5_vl import Qwen2_5VLConfig, Qwen2_5VLEncoder
from encoders.qwen2_vl import Qwen2VLConfig, Qwen2VLEncoder
from encoders.qwen3_vl import Qwen3VLConfig, Qwen3VLEncoder

Config = dict[str, Any]
Grids = list[list[int]]
State = dict[str, Tensor]


# --- published configs: the vision part as on the Hub, inert keys included ---------------------------

INTERN_300M: Config = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": {"hidden_size": 896, "model_type": "qwen2"},
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "ps_version": "v2",
    "select_layer": -1,
    "use_thumbnail": True,
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "attention_dropout": 0.0,
        "drop_path_rate": 0.1,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "image_size": 448,
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "model_type": "intern_vit_6b",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "qk_normalization": False,
        "qkv_bias": True,
        "use_flash_attn": True,
    },
}
INTERN_6B: Config = {
    **INTERN_300M,
    "llm_config": {"hidden_size": 5120, "model_type": "qwen2"},
    "vision_config": {
        **INTERN_300M["vision_config"],
        "hidden_size": 3200,
        "intermediate_size": 12800,
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "qk_normalization": True,
        "qkv_bias": False,
    },
}
QWEN2: Config = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}
QWEN2_5: Config = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3: Config = {
    "model_type": "qwen3_vl",
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3_OMNI: Config = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "vision_config": {
            **QWEN3["vision_config"],
            "apply_vit_abs_pos_embed": True,
            "image_size": 768,
            "model_type": "qwen3_omni_moe_vision_encoder",
            "out_hidden_size": 2048,
            "tokens_per_second": 2,
        }
    },
}
QWEN3_5: Config = {
    "model_type": "qwen3_5",
    "vision_config": {
        **QWEN3["vision_config"],
        "deepstack_visual_indexes": [],
        "model_type": "qwen3_5",
        "out_hidden_size": 5120,
    },
}
OMNI2_5: Config = {
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "vision_config": {
            **QWEN2_5["vision_config"],
            "embed_dim": 1280,
            "in_channels": 3,
            "model_type": "qwen2_5_omni_vision_encoder",
        }
    },
}


def vision_of(config: Config) -> Config:
    """The tower's part of a published config."""
    return config.get("thinker_config", config)["vision_config"]


CHAT_KEYS = ("force_image_size", "select_layer", "ps_version")


def edited(config: Config, **changes: Any) -> Config:
    """The same published config with other numbers in its vision part (or, CHAT_KEYS, beside it)."""
    if "thinker_config" in config:
        return {**config, "thinker_config": edited(config["thinker_config"], **changes)}
    chat = {key: value for key, value in changes.items() if key in CHAT_KEYS}
    vision = {key: value for key, value in changes.items() if key not in CHAT_KEYS}
    return {**config, **chat, "vision_config": {**config["vision_config"], **vision}}


# --- key maps: our names to the reference's ----------------------------------------------------------


def same_keys(state: State) -> State:
    """The reference module has the names of the published files."""
    return state


def split_qkv(state: State, names: Sequence[str]) -> State:
    """A fused projection [Q; K; V] as the three that the reference has."""
    out: State = {}
    for key, value in state.items():
        if match := re.fullmatch(r"(.*attn)\.qkv\.(weight|bias)", key):
            for name, part in zip(names, value.chunk(3), strict=True):
                out[f"{match[1]}.{name}.{match[2]}"] = part
        else:
            out[key] = value
    return out


def renamed(state: State, rules: Sequence[tuple[str, str]]) -> State:
    """Every key put through the substitutions in order."""
    out: State = {}
    for key, value in state.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        out[key] = value
    return out


def omni2_5_keys(state: State) -> State:
    """Qwen2.5-Omni keeps q, k and v apart."""
    return split_qkv(state, ("q", "k", "v"))


def omni3_keys(state: State) -> State:
    """Qwen3-Omni names the parts of its mergers as Qwen2-VL did, and the list ``merger_list``."""
    return renamed(
        state,
        [
            (r"^(deepstack_merger_list\.\d+|merger)\.norm\.", r"\1.ln_q."),
            (r"^(deepstack_merger_list\.\d+|merger)\.linear_fc1\.", r"\1.mlp.0."),
            (r"^(deepstack_merger_list\.\d+|merger)\.linear_fc2\.", r"\1.mlp.2."),
            (r"^deepstack_merger_list\.", "merger_list."),
        ],
    )


def intern_keys(state: State) -> State:
    """The published (remote-code) names of InternVL to those of transformers' InternVLModel."""
    return renamed(
        split_qkv(state, ("q_proj", "k_proj", "v_proj")),
        [
            (r"^mlp1\.0\.", "multi_modal_projector.layer_norm."),
            (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
            (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
            (r"^embeddings\.class_embedding$", "vision_tower.embeddings.cls_token"),
            (r"^embeddings\.position_embedding$", "vision_tower.embeddings.position_embeddings"),
            (
                r"^embeddings\.patch_embedding\.",
                "vision_tower.embeddings.patch_embeddings.projection.",
            ),
            (r"^layers\.", "vision_tower.encoder.layer."),
            (r"\.norm1\.", ".layernorm_before."),
            (r"\.norm2\.", ".layernorm_after."),
            (r"\.attn\.proj\.", ".attention.projection_layer."),
            (r"\.attn\.", ".attention."),
            (r"\.ls1$", ".lambda_1"),
            (r"\.ls2$", ".lambda_2"),
        ],
    )


def timm_keys(state: State) -> State:
    """The published names of InternViT to timm's; timm has no projector."""
    tower = {key: value for key, value in state.items() if not key.startswith("mlp1.")}
    return renamed(
        tower,
        [
            (r"^embeddings\.class_embedding$", "cls_token"),
            (r"^embeddings\.position_embedding$", "pos_embed"),
            (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
            (r"^layers\.", "blocks."),
            (r"\.ls([12])$", r".ls\1.gamma"),
        ],
    )


# --- references --------------------------------------------------------------------------------------


def qwen_reference(config_class: type, model_class: type) -> Callable[[Config], nn.Module]:
    """A Qwen tower of transformers, built from the published vision config."""

    def build(config: Config) -> nn.Module:
        fields = {k: v for k, v in vision_of(config).items() if k not in ("model_type", "in_chans")}
        return model_class._from_config(config_class(**fields), attn_implementation="sdpa")

    return build


def intern_reference(config: Config) -> nn.Module:
    """transformers' InternVLModel: tower, pixel shuffle and projector (its language model is a stub)."""
    vision, width = config["vision_config"], config["llm_config"]["hidden_size"]
    text = {
        "model_type": "qwen2", "hidden_size": width, "num_hidden_layers": 1, "vocab_size": 8,
        "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1,
    }  # fmt: skip
    tower = {
        "model_type": "internvl_vision",
        "attention_bias": vision["qkv_bias"],
        "use_qk_norm": vision["qk_normalization"],
        **{
            key: vision[key]
            for key in (
                "hidden_size", "intermediate_size", "norm_type", "layer_norm_eps", "hidden_act",
                "num_hidden_layers", "num_attention_heads", "num_channels", "image_size", "patch_size",
            )
        },
    }  # fmt: skip
    layer = config["select_layer"]
    wrapped = InternVLConfig(
        vision_config=tower,
        text_config=text,
        downsample_ratio=config["downsample_ratio"],
        vision_feature_layer=layer,
    )
    model = InternVLModel._from_config(wrapped, attn_implementation="sdpa")
    model.language_model = nn.Identity()
    return model


def qwen_output(reference: nn.Module, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a Qwen reference."""
    out = reference(pixels, grid_thw)
    return EncoderOutput(
        out.last_hidden_state, out.pooler_output, tuple(out.get("deepstack_features") or ())
    )


def qwen2_5_output(reference: nn.Module, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run a Qwen2.5 reference and bring its hidden state from window order to input order."""
    out = qwen_output(reference, pixels, grid_thw)
    order = torch.tensor(window_walk(grid_thw.tolist()), device=pixels.device)
    hidden = torch.empty_like(out.last_hidden_state)
    hidden.view(len(order), 4, -1)[order] = out.last_hidden_state.view(len(order), 4, -1)
    return out._replace(last_hidden_state=hidden)


def window_walk(grids: Grids, side: int = 4, merge: int = 2) -> list[int]:
    """Merged tokens in the order that windows visit them, by the plainest loops there are."""
    order, start = [], 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        for frame in range(t):
            for top in range(0, rows, side):
                for left in range(0, columns, side):
                    for r in range(top, min(top + side, rows)):
                        for c in range(left, min(left + side, columns)):
                            order.append(start + (frame * rows + r) * columns + c)
        start += t * rows * columns
    return order


def intern_output(reference: nn.Module, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' InternVL on tiles: tower, pixel shuffle v2, projector.

    ``get_image_features`` joins the three for square tiles; for others its parts are called in turn.
    """
    layer, (h, w) = reference.config.vision_feature_layer, grid_thw[0, 1:].tolist()
    keep = layer != -1
    if h == w:
        out = reference.get_image_features(
            pixels, vision_feature_layer=layer, vision_feature_select_strategy="default",
            output_hidden_states=keep,
        )  # fmt: skip
        hidden = out.hidden_states[layer] if keep else out.last_hidden_state
        return EncoderOutput(hidden, out.pooler_output.flatten(0, 1), ())
    out = reference.vision_tower(pixels, output_hidden_states=keep)
    hidden = out.hidden_states[layer] if keep else out.last_hidden_state
    tokens = reference.pixel_shuffle(hidden[:, 1:].unflatten(1, (h, w)), scale_factor=0.5)
    return EncoderOutput(hidden, reference.multi_modal_projector(tokens).flatten(0, 2), ())


# --- families ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One tower: how to build ours and the reference, and at which sizes."""

    name: str
    config: Config
    config_class: type
    encoder_class: type[VisionEncoder]
    reference: Callable[[Config], nn.Module]
    keys: Callable[[State], State]
    output: Callable[[nn.Module, Tensor, Tensor], EncoderOutput]
    shallow: Config
    """Changes that leave the published widths and cut the depth."""
    narrow: Config
    """Changes that leave the published depth and cut the widths."""
    tiny: Config
    """Changes for the many tests that need a tower and not its size."""

    @property
    def tiled(self) -> bool:
        """Whether ``pixel_values`` are tiles (InternViT) rather than patches."""
        return self.encoder_class is InternViT


INTERN_NARROW = {
    "hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4,
}  # fmt: skip
INTERN_TILE = {"image_size": 112, "force_image_size": 112}
QWEN2_NARROW = {"embed_dim": 64, "mlp_ratio": 2, "num_heads": 4, "hidden_size": 48}
QWEN2_5_NARROW = {
    "hidden_size": 64, "intermediate_size": 92, "num_heads": 4, "out_hidden_size": 48,
}  # fmt: skip
QWEN3_NARROW = {
    "hidden_size": 72, "intermediate_size": 140, "num_heads": 3, "out_hidden_size": 48,
}  # fmt: skip
QWEN3_SHALLOW = {"depth": 3, "deepstack_visual_indexes": [0, 2]}
QWEN2_5_SHALLOW = {"depth": 3, "fullatt_block_indexes": [1]}

FAMILIES = [
    Family(
        "intern_vit_300m", INTERN_300M, InternViTConfig, InternViT, intern_reference,
        intern_keys, intern_output,
        shallow={"num_hidden_layers": 2},
        narrow=INTERN_NARROW,
        tiny={**INTERN_NARROW, "num_hidden_layers": 3, **INTERN_TILE},
    ),
    Family(
        "intern_vit_6b", INTERN_6B, InternViTConfig, InternViT, intern_reference,
        intern_keys, intern_output,
        shallow={"num_hidden_layers": 1},
        narrow={**INTERN_NARROW, "hidden_size": 60, "num_attention_heads": 3},
        tiny={**INTERN_NARROW, "num_hidden_layers": 3, **INTERN_TILE},
    ),
    Family(
        "qwen2_vl", QWEN2, Qwen2VLConfig, Qwen2VLEncoder,
        qwen_reference(qwen2_config.Qwen2VLVisionConfig, qwen2.Qwen2VisionTransformerPretrainedModel),
        same_keys, qwen_output,
        shallow={"depth": 2},
        narrow=QWEN2_NARROW,
        tiny={**QWEN2_NARROW, "depth": 3},
    ),
    Family(
        "qwen2_5_vl", QWEN2_5, Qwen2_5VLConfig, Qwen2_5VLEncoder,
        qwen_reference(
            qwen2_5_config.Qwen2_5_VLVisionConfig, qwen2_5.Qwen2_5_VisionTransformerPretrainedModel
        ),
        same_keys, qwen2_5_output,
        shallow=QWEN2_5_SHALLOW,
        narrow=QWEN2_5_NARROW,
        tiny={**QWEN2_5_NARROW, **QWEN2_5_SHALLOW},
    ),
    Family(
        "qwen2_5_omni", OMNI2_5, Qwen2_5VLConfig, Qwen2_5VLEncoder,
        qwen_reference(
            omni2_config.Qwen2_5OmniVisionEncoderConfig, omni2.Qwen2_5OmniVisionEncoder
        ),
        omni2_5_keys, qwen2_5_output,
        shallow=QWEN2_5_SHALLOW,
        narrow=QWEN2_5_NARROW,
        tiny={**QWEN2_5_NARROW, **QWEN2_5_SHALLOW},
    ),
    Family(
        "qwen3_vl", QWEN3, Qwen3VLConfig, Qwen3VLEncoder,
        qwen_reference(qwen3_config.Qwen3VLVisionConfig, qwen3.Qwen3VLVisionModel),
        same_keys, qwen_output,
        shallow=QWEN3_SHALLOW,
        narrow=QWEN3_NARROW,
        tiny={**QWEN3_NARROW, **QWEN3_SHALLOW},
    ),
    Family(
        "qwen3_omni", QWEN3_OMNI, Qwen3VLConfig, Qwen3VLEncoder,
        qwen_reference(omni3_config.Qwen3OmniMoeVisionEncoderConfig, omni3.Qwen3OmniMoeVisionEncoder),
        omni3_keys, qwen_output,
        shallow=QWEN3_SHALLOW,
        narrow=QWEN3_NARROW,
        tiny={**QWEN3_NARROW, **QWEN3_SHALLOW},
    ),
    Family(
        "qwen3_5", QWEN3_5, Qwen3VLConfig, Qwen3VLEncoder,
        qwen_reference(qwen3_5_config.Qwen3_5VisionConfig, qwen3_5.Qwen3_5VisionModel),
        same_keys, qwen_output,
        shallow={"depth": 2},
        narrow=QWEN3_NARROW,
        tiny={**QWEN3_NARROW, "depth": 3},
    ),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}


# --- weights, pixels, distances ----------------------------------------------------------------------


def draw_weights(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every parameter from a seed, each at a scale at which its loss or misuse would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            weight.copy_(_at_scale(name, noise))
    return module


def _at_scale(name: str, noise: Tensor) -> Tensor:
    if re.search(r"pos_embed|position_embedding|class_embedding", name):
        return noise
    if name.endswith("bias"):
        return 0.2 * noise
    if re.search(r"\.ls[12]$", name):
        return 0.5 + 0.2 * noise
    if noise.ndim == 1:
        return 1.0 + 0.3 * noise
    gain = 1.3 if "qkv" in name else 1.0
    return gain * noise / noise[0].numel() ** 0.5


def build_encoder(family: Family, changes: Config, dtype: torch.dtype = torch.float32):
    """Our tower at the sizes of ``changes``, drawn weights, eval mode."""
    config = family.config_class.from_hf(edited(family.config, **changes))
    with no_init_weights():
        encoder = family.encoder_class(config).to(dtype)
    return draw_weights(encoder).eval().requires_grad_(False)


def build_pair(
    family: Family, changes: Config, dtype: torch.dtype = torch.float32
) -> tuple[VisionEncoder, nn.Module]:
    """Our tower and the reference with the same weights; every key of both must meet its twin."""
    encoder = build_encoder(family, changes, dtype)
    with no_init_weights():
        reference = family.reference(edited(family.config, **changes)).to(dtype)
    reference.load_state_dict(family.keys(encoder.state_dict()), strict=True)
    return encoder, reference.eval().requires_grad_(False)


@cache
def tiny(name: str, dtype: torch.dtype = torch.float32) -> VisionEncoder:
    """A shared three-block tower; tests must not change it."""
    return build_encoder(BY_NAME[name], BY_NAME[name].tiny, dtype)


def draw_pixels(
    encoder: VisionEncoder, grids: Grids, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normalised pixels for ``grids``: patches, or (InternViT) tiles of the grid's size."""
    generator = torch.Generator().manual_seed(seed)
    shape: tuple[int, ...]
    if isinstance(encoder, InternViT):
        (h, w), patch = grids[0][1:], encoder.config.patch_size
        shape = (sum(grid[0] for grid in grids), 3, h * patch, w * patch)
    else:
        shape = (sum(t * h * w for t, h, w in grids), *encoder.row_shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2, in float64."""
    ours, theirs = ours.double(), theirs.double()
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} against {tuple(theirs.shape)}"
    return float((ours - theirs).norm() / theirs.norm())


def distances(ours: EncoderOutput, theirs: EncoderOutput) -> dict[str, float]:
    """Relative L2 of every field, by name."""
    assert len(ours.deepstack_features) == len(theirs.deepstack_features)
    fields = {
        "last_hidden_state": (ours.last_hidden_state, theirs.last_hidden_state),
        "pooler_output": (ours.pooler_output, theirs.pooler_output),
    }
    pairs = zip(ours.deepstack_features, theirs.deepstack_features, strict=True)
    fields |= {f"deepstack_features[{n}]": pair for n, pair in enumerate(pairs)}
    return {name: distance(*pair) for name, pair in fields.items()}


# --- lifting float32 out of a reference --------------------------------------------------------------


class LiftFloat32(TorchFunctionMode):
    """Every float32 that a reference asks for by name becomes float64.

    transformers' towers drop to float32 in these places whatever their dtype, and at 1e-7 that hides
    what a float64 comparison is for:

    - rotary: ``torch.arange(..., dtype=torch.float)`` in ``inv_freq``, ``position_ids.float()``,
      ``inv_freq.to(dtype=torch.float)``, ``q.float()``, ``k.float()``, ``cos.float()``, ``sin.float()``
    - RMS norms: ``hidden_states.to(torch.float32)``
    - position interpolation: ``index.to(torch.float32)`` before the taps' weights; timm's ``.float()``
    - eager attention: ``softmax(..., dtype=torch.float32)``

    All of them name the dtype in a call, so one rule lifts all: in each torch call, ``float32`` as an
    argument is read as ``float64`` and ``Tensor.float`` as ``Tensor.double``. The default dtype is
    float64 meanwhile, which covers integer tensors divided or multiplied by Python floats.
    ``lifted`` counts the calls, so that a test can see that the lift took hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lifted: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            self.lifted["float"] += 1
            func = torch.Tensor.double
        named = [arg for arg in (*args, *kwargs.values()) if arg is torch.float32]
        if named:
            self.lifted[func.__name__] += 1
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {
                key: torch.float64 if value is torch.float32 else value
                for key, value in kwargs.items()
            }
        return func(*args, **kwargs)


@contextmanager
def float32_lifted() -> Iterator[Counter[str]]:
    """Build and run references in here for float64 throughout; yields what was lifted how often."""
    mode, default = LiftFloat32(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mode:
            yield mode.lifted
    finally:
        torch.set_default_dtype(default)
