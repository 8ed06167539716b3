"""Key maps from our names to the reference's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

State = dict[str, Tensor]


def same_keys(state: State) -> State:
    """Return ``state`` for a reference that has our names."""
    return state


def split_qkv(state: State, names: Sequence[str]) -> State:
    """Split every fused projection [Q; K; V] into three with the given names."""
    out: State = {}
    for key, value in state.items():
        if match := re.fullmatch(r"(.*attn)\.qkv\.(weight|bias)", key):
            for name, part in zip(names, value.chunk(3), strict=True):
                out[f"{match[1]}.{name}.{match[2]}"] = part
        else:
            out[key] = value
    return out


def renamed(state: State, rules: Sequence[tuple[str, str]]) -> State:
    """Apply the substitutions to every key in order."""
    out: State = {}
    for key, value in state.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        out[key] = value
    return out


def omni2_5_keys(state: State) -> State:
    """Map to Qwen2.5-Omni, which has separate q, k and v."""
    return split_qkv(state, ("q", "k", "v"))


def omni3_keys(state: State) -> State:
    """Map to Qwen3-Omni, whose mergers have Qwen2-VL's names, in a list ``merger_list``."""
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
    """Map InternVL's remote-code names to those of transformers' InternVLModel."""
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
    """Map InternViT's published names to timm's; timm has no projector."""
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
