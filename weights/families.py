"""The families: which encoder reads which ``model_type``, and completing a sparse config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from encoders import (
    InternViT,
    InternViTConfig,
    Qwen2_5VLConfig,
    Qwen2_5VLEncoder,
    Qwen2VLConfig,
    Qwen2VLEncoder,
    Qwen3VLConfig,
    Qwen3VLEncoder,
    VisionEncoder,
)

from .errors import CheckpointError, shown

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Fields: TypeAlias = dict[tuple[str, ...], Any]
"""Config fields, by all the names that published configs give them."""

SECTIONS = ("vision_config", "thinker_config.vision_config", "vlm_config.vision_config")
"""Where a published config keeps the tower's part; a lone tower's config is all tower."""

TIMM_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "vit_intern300m_patch14_448": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "qkv_bias": True,
        "qk_normalization": False,
        "norm_type": "layer_norm",
    },
}
"""The timm architectures that are towers of ours; timm publishes a name instead of sizes."""

_TIMM_ARGUMENTS = {
    "embed_dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "img_size": "image_size",
}


class EncoderConfig(Protocol):
    """What all config classes share."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Family:
    """One encoder, and the published models that it is."""

    name: str
    title: str
    encoder: Callable[..., VisionEncoder]
    config: type[EncoderConfig]
    model_types: tuple[str, ...]
    video: str
    """How a clip enters the tower."""
    fields: Callable[[Shapes], Fields]
    """Config fields that the shapes of the tower's tensors determine."""

    def on_meta(self, config: Any) -> VisionEncoder:
        """The encoder that ``config`` makes, with tensors that have shapes and no memory."""
        with torch.device("meta"), _WithoutInit():
            return self.encoder(config)


_INIT = {
    init.normal_,
    init.trunc_normal_,
    init.uniform_,
    init.kaiming_uniform_,
    init.xavier_uniform_,
}


class _WithoutInit(TorchFunctionMode):
    """Skips initialisation, which fills nothing on meta.

    There, ``torch.randn`` and the initialisation of ``nn.Embedding`` would import 500 and 900
    modules of torch's compiler (0.9 s and 36 MB, 1.9 s and 149 MB).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INIT:
            return args[0] if args else kwargs["tensor"]
        return (torch.empty if func is torch.randn else func)(*args, **kwargs)


def _depth(shapes: Shapes, blocks: str) -> int:
    """One more than the highest number of a block; names without one are left over, and listed."""
    words = [name.split(".")[1] for name in shapes if name.startswith(blocks)]
    return max((int(word) for word in words if _NUMBER.fullmatch(word)), default=-1) + 1


_NUMBER = re.compile(r"[0-9]{1,3}")
"""Of a block; no tower has a thousand."""


def _fields(shapes: Shapes, **wanted: tuple[str, int]) -> dict[str, int]:
    """The sizes named, each one axis of one tensor, as far as the tensors are there."""
    return {
        field: shapes[name][axis]
        for field, (name, axis) in wanted.items()
        if len(shapes.get(name, ())) > (axis if axis >= 0 else -axis - 1)
    }


def _intern_vit_fields(shapes: Shapes) -> Fields:
    sizes = _fields(
        shapes,
        hidden_size=("embeddings.class_embedding", -1),
        intermediate_size=("layers.0.mlp.fc1.weight", 0),
        patch_size=("embeddings.patch_embedding.weight", -1),
        rows=("embeddings.position_embedding", 1),
    )
    rows = sizes.pop("rows", None)
    fields: Fields = {(name,): size for name, size in sizes.items()}
    if rows is not None and "patch_size" in sizes:
        fields["image_size",] = round((rows - 1) ** 0.5) * sizes["patch_size"]
    if depth := _depth(shapes, "layers."):
        fields["num_hidden_layers",] = depth
        fields["qkv_bias", "attention_bias"] = "layers.0.attn.qkv.bias" in shapes
        fields["qk_normalization", "use_qk_norm"] = "layers.0.attn.q_norm.weight" in shapes
        fields["norm_type",] = "layer_norm" if "layers.0.norm1.bias" in shapes else "rms_norm"
    return fields


def _qwen2_vl_fields(shapes: Shapes) -> Fields:
    sizes = _fields(
        shapes,
        embed_dim=("patch_embed.proj.weight", 0),
        hidden_size=("merger.mlp.2.weight", 0),
        mlp=("blocks.0.mlp.fc1.weight", 0),
    )
    fields = _qwen_fields(shapes)
    fields.update({(name,): sizes[name] for name in ("embed_dim", "hidden_size") if name in sizes})
    if "mlp" in sizes and "embed_dim" in sizes:
        fields["mlp_ratio",] = sizes["mlp"] / sizes["embed_dim"]
    return fields


def _qwen2_5_vl_fields(shapes: Shapes) -> Fields:
    sizes = _fields(
        shapes,
        hidden_size=("patch_embed.proj.weight", 0),
        out_hidden_size=("merger.mlp.2.weight", 0),
        intermediate_size=("blocks.0.mlp.gate_proj.weight", 0),
    )
    return _qwen_fields(shapes) | {(name,): size for name, size in sizes.items()}


def _qwen3_vl_fields(shapes: Shapes) -> Fields:
    sizes = _fields(
        shapes,
        hidden_size=("patch_embed.proj.weight", 0),
        out_hidden_size=("merger.linear_fc2.weight", 0),
        intermediate_size=("blocks.0.mlp.linear_fc1.weight", 0),
        num_position_embeddings=("pos_embed.weight", 0),
    )
    fields = _qwen_fields(shapes) | {(name,): size for name, size in sizes.items()}
    if shapes and _depth(shapes, "deepstack_merger_list.") == 0:
        fields["deepstack_visual_indexes",] = []
    return fields


def _qwen_fields(shapes: Shapes) -> Fields:
    depth = _depth(shapes, "blocks.")
    fields: Fields = {("depth", "num_hidden_layers"): depth} if depth else {}
    patch = _fields(
        shapes, frames=("patch_embed.proj.weight", 2), side=("patch_embed.proj.weight", 4)
    )
    if patch:
        fields["temporal_patch_size",] = patch["frames"]
        fields["patch_size", "spatial_patch_size"] = patch["side"]
    return fields


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "intern_vit", "InternViT", InternViT, InternViTConfig,
            ("intern_vit_6b", "internvl_vision", "internvl_chat", "internvl"),
            "one tile a frame", _intern_vit_fields,
        ),
        Family(
            "qwen2_vl", "Qwen2-VL", Qwen2VLEncoder, Qwen2VLConfig,
            ("qwen2_vl", "qwen2_vl_vision", "colqwen2"),
            "frame pairs", _qwen2_vl_fields,
        ),
        Family(
            "qwen2_5_vl", "Qwen2.5-VL", Qwen2_5VLEncoder, Qwen2_5VLConfig,
            (
                "qwen2_5_vl", "qwen2_5_vl_vision", "qwen2_5_omni", "qwen2_5_omni_thinker",
                "qwen2_5_omni_vision_encoder",
            ),
            "frame pairs", _qwen2_5_vl_fields,
        ),
        Family(
            "qwen3_vl", "Qwen3-VL", Qwen3VLEncoder, Qwen3VLConfig,
            (
                "qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision",
                "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_vision_encoder",
                "qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision",
            ),
            "frame pairs", _qwen3_vl_fields,
        ),
    )
}  # fmt: skip
"""Every family, by name."""


def find_family(config: Mapping[str, Any], names: Iterable[str], label: str) -> Family:
    """The family that ``config`` says it is, or, where it says nothing, that the tensor names show.

    Raises:
        CheckpointError: a model type, or a timm architecture, that no encoder reads.
    """
    section, parents = vision_section(config)
    types = [
        kind for part in (section, *parents) if isinstance(kind := part.get("model_type"), str)
    ]
    architecture = config.get("architecture")
    if not types and isinstance(architecture, str):
        if architecture in TIMM_ARCHITECTURES:
            return FAMILIES["intern_vit"]
        raise _unsupported(label, f"timm architecture {shown(architecture)!r}")
    if types:
        for family in FAMILIES.values():
            if types[0] in family.model_types:
                return family
        raise _unsupported(label, f"model_type {shown(types[0])!r}")
    return _sniff(names, label)


def _unsupported(label: str, what: str) -> CheckpointError:
    known = ", ".join(kind for family in FAMILIES.values() for kind in family.model_types)
    return CheckpointError(
        f"{label}: {what} is not supported; supported model types: {known}; "
        f"timm architectures: {', '.join(TIMM_ARCHITECTURES)}"
    )


_SIGNS = (
    ("qwen3_vl", ("blocks.0.mlp.linear_fc1.weight", "pos_embed.weight")),
    ("qwen2_5_vl", ("blocks.0.mlp.gate_proj.weight", "merger.ln_q.weight")),
    ("qwen2_vl", ("blocks.0.mlp.fc1.weight", "merger.ln_q.weight")),
    ("intern_vit", ("encoder.layers.0.ls1", "embeddings.class_embedding")),
    ("intern_vit", ("encoder.layer.0.lambda_1", "embeddings.cls_token")),
)
"""Pairs of names that no other model type has together."""


def _sniff(names: Iterable[str], label: str) -> Family:
    names = list(names)
    for family, signs in _SIGNS:
        if all(any(name.endswith(sign) for name in names) for sign in signs):
            return FAMILIES[family]
    raise _unsupported(label, "a config.json without model_type, with tensors of no known tower,")


def vision_section(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The tower's part of a config, and the parts around it from the inside out."""
    for path in SECTIONS:
        parents: list[Mapping[str, Any]] = [config]
        for name in path.split("."):
            inner = parents[0].get(name)
            if not isinstance(inner, Mapping):
                break
            parents.insert(0, inner)
        else:
            return parents[0], parents[1:]
    return config, []


def build_config(family: Family, config: Mapping[str, Any], shapes: Shapes, label: str) -> Any:
    """The encoder's config: what is published, completed from the tensors where it is silent.

    A field that the published config states is taken from there, and tensors that disagree are
    reported as wrong shapes; only InternVL's projector goes by its tensors alone.

    Args:
        family: of the checkpoint.
        config: the whole ``config.json``.
        shapes: the tower's tensors, by our names.
        label: what errors call the checkpoint.

    Raises:
        CheckpointError: a value that the encoder does not implement, or sizes that disagree.
    """
    try:
        if family.name == "intern_vit":
            return _intern_vit_config(family, config, shapes)
        return family.config.from_hf(_completed(family, config, shapes))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{label}: config.json: {error}") from error


def _completed(family: Family, config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """``config`` with what its vision part leaves out, that part where encoders look first."""
    section, parents = vision_section(config)
    full = _timm_section(config) or dict(section)
    for aliases, value in family.fields(shapes).items():
        if all(full.get(name) is None for name in aliases):
            full[aliases[0]] = value
    return {**config, "vision_config": full} if parents else full


def _intern_vit_config(family: Family, config: Mapping[str, Any], shapes: Shapes) -> Any:
    """The projector is there if its tensors are, as wide as the config or else they say."""
    width = shapes["mlp1.3.weight"][0] if shapes.get("mlp1.3.weight") else None
    whole = _completed(family, config, shapes)
    if "vision_config" in whole and not _language_width(config):
        whole["llm_config"] = {"hidden_size": width or 1}
    built = family.config.from_hf(whole)
    if not any(name.startswith("mlp1.") for name in shapes):
        return replace(built, out_hidden_size=None)
    return built if built.out_hidden_size else replace(built, out_hidden_size=width)


def _language_width(config: Mapping[str, Any]) -> bool:
    parts = (config.get("llm_config"), config.get("text_config"))
    part = next((part for part in parts if isinstance(part, Mapping)), {})
    return part.get("hidden_size") is not None


def _timm_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The tower of a timm repo: its architecture's sizes, and ``model_args`` where it departs."""
    architecture = str(config.get("architecture"))
    if "model_type" in config or architecture not in TIMM_ARCHITECTURES:
        return {}
    sizes = dict(TIMM_ARCHITECTURES[architecture])
    arguments = config.get("model_args")
    if isinstance(arguments, Mapping):
        sizes |= {
            ours: arguments[name] for name, ours in _TIMM_ARGUMENTS.items() if name in arguments
        }
    return sizes | {"intermediate_size": 4 * sizes["hidden_size"]}
