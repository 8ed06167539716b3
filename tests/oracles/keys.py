"""Key maps: our names to the reference's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

State = dict[str, Tensor]


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
