"""How published checkpoints name a tower's tensors, and the names of our modules for them.

A layout is data: what is not a plain rename first (``joins``), then one dict of renames that can be
held against a checkpoint's index. ``N`` stands for a number. Names that a layout does not mention
are the same on both sides. Every layout works in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .errors import CheckpointError, shown


@dataclass(frozen=True)
class Place:
    """Where a tower lies: ``root + tower`` before its names, ``root`` before its projector's."""

    root: str
    tower: str

    @property
    def prefix(self) -> str:
        """What stands before every name of the tower."""
        return self.root + self.tower


@dataclass(frozen=True)
class Layout:
    """One published way to name the tensors of a tower."""

    name: str
    family: str
    places: tuple[Place, ...]
    marks: tuple[str, ...]
    """Beginnings of names, after the prefix, that tell this layout from the family's later ones."""
    projector: tuple[str, ...] = ()
    """Names after the root that belong to the projector."""
    joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our module <- published modules whose rows are put one below the other, in this order."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Published module or parameter -> ours."""
    ignored: tuple[str, ...] = ()
    """Published names that no forward pass needs."""


@dataclass(frozen=True)
class Slot:
    """Where a published tensor goes: part ``part`` of ``parts`` equal ones of tensor ``name``."""

    name: str
    part: int = 0
    parts: int = 1


_QWEN_PLACES = (
    Place("thinker.", "visual."),
    Place("vlm.model.", "visual."),
    Place("vlm.", "visual."),
    Place("model.language_model.", "visual."),
    Place("model.", "visual."),
    Place("", "visual."),
    Place("", ""),
)
_QWEN_IGNORED = ("rotary_pos_emb.inv_freq", "blocks.N.attn.rotary_emb.inv_freq", "attn_pool")
_QWEN: dict[str, Any] = {"places": _QWEN_PLACES, "marks": ("blocks.",), "ignored": _QWEN_IGNORED}
_HF_PLACES = (Place("model.", "vision_tower."), Place("", "vision_tower."), Place("", ""))
_HF_RENAMES = {
    "embeddings.cls_token": "embeddings.class_embedding",
    "embeddings.position_embeddings": "embeddings.position_embedding",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
    "encoder.layer.N.layernorm_before": "layers.N.norm1",
    "encoder.layer.N.layernorm_after": "layers.N.norm2",
    "encoder.layer.N.lambda_1": "layers.N.ls1",
    "encoder.layer.N.lambda_2": "layers.N.ls2",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}

LAYOUTS: tuple[Layout, ...] = (
    # InternViT, original code: OpenGVLab/InternVL*, OpenGVLab/InternViT-* (bare).
    Layout(
        name="internvl",
        family="intern_vit",
        places=(Place("", "vision_model."), Place("", "")),
        marks=("embeddings.class_embedding", "encoder.layers."),
        projector=("mlp1.",),
        renames={"encoder.layers.N": "layers.N"},
    ),
    # InternViT, early conversions to transformers. Before the next one, which its marks include.
    Layout(
        name="internvl-hf-early",
        family="intern_vit",
        places=_HF_PLACES,
        marks=("encoder.layer.0.attention.attention.",),
        projector=("multi_modal_projector.",),
        joins={
            "layers.N.attn.qkv": (
                "encoder.layer.N.attention.attention.query",
                "encoder.layer.N.attention.attention.key",
                "encoder.layer.N.attention.attention.value",
            )
        },
        renames={
            **_HF_RENAMES,
            "encoder.layer.N.attention.output.dense": "layers.N.attn.proj",
            "encoder.layer.N.intermediate.dense": "layers.N.mlp.fc1",
            "encoder.layer.N.output.dense": "layers.N.mlp.fc2",
        },
    ),
    # InternViT, transformers: OpenGVLab/InternVL3-*-hf, OpenGVLab/InternVL3_5-*-HF.
    Layout(
        name="internvl-hf",
        family="intern_vit",
        places=_HF_PLACES,
        marks=("embeddings.cls_token", "encoder.layer."),
        projector=("multi_modal_projector.",),
        joins={
            "layers.N.attn.qkv": (
                "encoder.layer.N.attention.q_proj",
                "encoder.layer.N.attention.k_proj",
                "encoder.layer.N.attention.v_proj",
            )
        },
        renames={
            **_HF_RENAMES,
            "encoder.layer.N.attention.projection_layer": "layers.N.attn.proj",
            "encoder.layer.N.attention.q_norm": "layers.N.attn.q_norm",
            "encoder.layer.N.attention.k_norm": "layers.N.attn.k_norm",
            "encoder.layer.N.mlp": "layers.N.mlp",
        },
    ),
    # InternViT, timm: timm/vit_intern300m_patch14_448.*
    Layout(
        name="timm",
        family="intern_vit",
        places=(Place("", ""),),
        marks=("cls_token", "blocks."),
        renames={
            "cls_token": "embeddings.class_embedding",
            "pos_embed": "embeddings.position_embedding",
            "patch_embed.proj": "embeddings.patch_embedding",
            "blocks.N.ls1.gamma": "layers.N.ls1",
            "blocks.N.ls2.gamma": "layers.N.ls2",
            "blocks.N": "layers.N",
        },
        ignored=("attn_pool", "head"),
    ),
    Layout(name="qwen", family="qwen2_vl", **_QWEN),
    # Qwen2.5-Omni: queries, keys and values apart.
    Layout(
        name="qwen2.5-omni",
        family="qwen2_5_vl",
        places=_QWEN_PLACES,
        marks=("blocks.0.attn.q.", "blocks.0.attn.k.", "blocks.0.attn.v."),
        joins={"blocks.N.attn.qkv": ("blocks.N.attn.q", "blocks.N.attn.k", "blocks.N.attn.v")},
        ignored=_QWEN_IGNORED,
    ),
    Layout(name="qwen", family="qwen2_5_vl", **_QWEN),
    # Qwen3-Omni: other names in the mergers, and only there.
    Layout(
        name="qwen3-omni",
        family="qwen3_vl",
        places=_QWEN_PLACES,
        marks=("merger.ln_q.", "merger.mlp.", "merger_list."),
        renames={
            "merger.ln_q": "merger.norm",
            "merger.mlp.0": "merger.linear_fc1",
            "merger.mlp.2": "merger.linear_fc2",
            "merger_list.N.ln_q": "deepstack_merger_list.N.norm",
            "merger_list.N.mlp.0": "deepstack_merger_list.N.linear_fc1",
            "merger_list.N.mlp.2": "deepstack_merger_list.N.linear_fc2",
        },
        ignored=_QWEN_IGNORED,
    ),
    Layout(name="qwen", family="qwen3_vl", **_QWEN),
)  # fmt: skip
"""Every layout that can be read; of one family, the more particular first."""


def find_layout(family: str, names: Iterable[str], label: str) -> tuple[Layout, Place]:
    """The layout and place of the family's tower among the tensor ``names`` of a checkpoint.

    Raises:
        CheckpointError: no tower, or more than one.
    """
    names = list(names)
    candidates = [layout for layout in LAYOUTS if layout.family == family]
    for layout in candidates:
        starts = {
            place: tuple(place.prefix + mark for mark in layout.marks) for place in layout.places
        }
        found = [
            place for place in layout.places if any(n.startswith(starts[place]) for n in names)
        ]
        if len(found) > 1:
            raise CheckpointError(
                f"{label}: holds several towers, under "
                f"{' and '.join(repr(p.prefix) for p in found)}: keep one of them"
            )
        if found:
            return layout, found[0]
    prefixes = dict.fromkeys(p.prefix or "(none)" for layout in candidates for p in layout.places)
    first = ", ".join(shown(word) for word in sorted({name.split(".")[0] for name in names})[:12])
    raise CheckpointError(
        f"{label}: no {family} vision tower among its {len(names)} tensors: looked under the "
        f"prefixes {', '.join(prefixes)}; the names begin with {first or 'nothing'}"
    )


def local_name(layout: Layout, place: Place, name: str) -> str | None:
    """A checkpoint's name without its prefix; None if it belongs to neither tower nor projector."""
    rest = name.removeprefix(place.root)
    if name.startswith(place.root) and rest.startswith(layout.projector):
        return rest
    return name.removeprefix(place.prefix) if name.startswith(place.prefix) else None


def full_name(layout: Layout, place: Place, local: str) -> str:
    """The inverse of :func:`local_name`."""
    return (place.root if local.startswith(layout.projector) else place.prefix) + local


def is_ignored(layout: Layout, local: str) -> bool:
    """Whether the layout's list of names that nobody needs has this one."""
    return any(_pattern(template).fullmatch(local) for template in layout.ignored)


def to_ours(layout: Layout, local: str) -> Slot | None:
    """Where the published tensor ``local`` goes, or None if the layout has no such name."""
    for ours, parts in layout.joins.items():
        for part, published in enumerate(parts):
            if match := _pattern(published).fullmatch(local):
                return Slot(_fill(ours, match), part, len(parts))
    slot = Slot(_translate(layout.renames.items(), local))
    return slot if to_published(layout, slot.name) == [local] else None


def to_published(layout: Layout, ours: str) -> list[str]:
    """The published tensors (after the prefix) whose rows, in order, are our tensor ``ours``."""
    for module, parts in layout.joins.items():
        if match := _pattern(module).fullmatch(ours):
            return [_fill(published, match) for published in parts]
    return [_translate([(b, a) for a, b in layout.renames.items()], ours)]


def _translate(rules: Iterable[tuple[str, str]], name: str) -> str:
    for before, after in rules:
        if match := _pattern(before).fullmatch(name):
            return _fill(after, match)
    return name


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """``blocks.N.ls1`` as an expression: the number, and what follows the last word."""
    words = (r"(?P<number>0|[1-9]\d*)" if w == "N" else re.escape(w) for w in template.split("."))
    return re.compile(r"\.".join(words) + r"(?P<rest>\..+)?")


def _fill(template: str, match: re.Match[str]) -> str:
    number = match.groupdict().get("number") or ""
    words = (number if word == "N" else word for word in template.split("."))
    return ".".join(words) + (match.group("rest") or "")
