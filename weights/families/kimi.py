"""Kimi-VL, Kimi-K2.5, K2.6 and K3: checkpoints as Moonshot publishes them, and transformers' names.

Sources: ``Kimi_K25Model`` of transformers 5.23.0 and its conversion of names; ``kimi_vl.py``,
``kimi_k25.py`` and ``models/kimi_k3`` of vLLM 0.33.0.
"""

from __future__ import annotations

from encoders import MoonViTConfig, MoonViTEncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, Fields, Shapes, TransformersClass, block_count, length, with_vision

_FACTS = family_facts("moonvit")
_BLOCK = "encoder.blocks.N"
_PREFIXES = (Prefix("", "vision_tower."), Prefix("", ""))
_TABLE = {"pos_embed.weight": "s² d -> s s d"}
_NAMES = {
    "patch_embed.pos_emb.weight": "pos_embed.weight",
    f"{_BLOCK}.norm0": "blocks.N.norm1",
    f"{_BLOCK}.norm1": "blocks.N.norm2",
    f"{_BLOCK}.wqkv": "blocks.N.attn.qkv",
    f"{_BLOCK}.wo": "blocks.N.attn.proj",
    f"{_BLOCK}.mlp.fc0": "blocks.N.mlp.fc1",
    f"{_BLOCK}.mlp.fc1": "blocks.N.mlp.fc2",
    "encoder.final_layernorm": "norm",
}
_KIMI_VL = Layout(
    name="kimi-vl",
    prefixes=_PREFIXES,
    marks=("encoder.blocks.0.wqkv.",),
    projector=("multi_modal_projector.",),
    needed=("multi_modal_projector.",),
    renames={**_NAMES, "multi_modal_projector": "projector"},
    reshapes=_TABLE,
    processor_files=_FACTS.processors["kimi-vl"],
    images_only=_FACTS.images_only["kimi-vl"],
)
_PROJECTOR = {
    "mm_projector.proj.0": "projector.linear_1",
    "mm_projector.proj.2": "projector.linear_2",
}
_KIMI_K3 = Layout(
    name="kimi-k3",
    prefixes=_PREFIXES,
    marks=_KIMI_VL.marks,
    projector=("mm_projector.",),
    needed=("mm_projector.post_norm.",),
    renames={**_NAMES, **_PROJECTOR, "mm_projector.post_norm": "projector.post_norm"},
    reshapes=_TABLE,
    processor_files=_FACTS.processors["kimi-k3"],
)
_KIMI_K25 = Layout(
    name="kimi-k25",
    prefixes=_PREFIXES,
    marks=_KIMI_VL.marks,
    projector=("mm_projector.",),
    renames={**_NAMES, **_PROJECTOR, "mm_projector.pre_norm": "projector.pre_norm"},
    reshapes=_TABLE,
    processor_files=_FACTS.processors["kimi-k25"],
)
_HF_QKV = tuple(f"layers.N.attn.{part}_proj" for part in "qkv")
_KIMI_K25_HF = Layout(  # ``Kimi_K25Model`` of transformers 5.23.0 permutes queries' and keys' rows
    name="kimi-k25-hf",
    prefixes=(Prefix("model.", "vision_tower."), *_PREFIXES),
    marks=("layers.0.attn.q_proj.", "patch_embed.pos_emb.position_embeddings"),
    projector=("mm_projector.",),
    joins={"blocks.N.attn.qkv": _HF_QKV},
    rotary_halves=_HF_QKV[:2],
    renames={
        "patch_embed.pos_emb.position_embeddings": "pos_embed.weight",
        "layers.N.norm1": "blocks.N.norm1",
        "layers.N.norm2": "blocks.N.norm2",
        "layers.N.attn.proj": "blocks.N.attn.proj",
        "layers.N.mlp": "blocks.N.mlp",
        "final_layernorm": "norm",
        "mm_projector.pre_norm": "projector.pre_norm",
        "mm_projector.in_proj": "projector.linear_1",
        "mm_projector.out_proj": "projector.linear_2",
    },
    reshapes=_TABLE,
    processor_files=_FACTS.processors["kimi-k25-hf"],
)


def _side(shapes: Shapes) -> int:
    return round(float(shapes["pos_embed.weight"][0] ** 0.5))


_PATCH = "patch_embed.proj.weight"
_CONFIG_FIELDS: Fields = {  # the number of heads cannot be inferred from shapes
    ("vt_num_hidden_layers", "num_hidden_layers"): block_count("blocks."),
    ("vt_hidden_size", "hidden_size"): length(_PATCH, 0),
    ("vt_intermediate_size", "intermediate_size"): length("blocks.0.mlp.fc1.weight", 0),
    ("qkv_hidden_size",): length("blocks.0.attn.proj.weight", 1),
    ("patch_size",): length(_PATCH, 3),
    ("init_pos_emb_height", "pos_emb_height"): _side,
}

_CLASS = TransformersClass(
    "kimi_k25",
    "Kimi_K25VisionModel",
    "kimi_k25_vision",
    fields={
        "vt_hidden_size": "hidden_size",
        "vt_intermediate_size": "intermediate_size",
        "vt_num_attention_heads": "num_attention_heads",
        "vt_num_hidden_layers": "num_hidden_layers",
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
        "init_pos_emb_time": "pos_emb_time",
    },
)
MOONVIT = Family(
    name="moonvit",
    encoder=MoonViTEncoder,
    config=MoonViTConfig,
    model_types=("moonvit", "kimi_vl", *with_vision("kimi_k25", "kimi_k3")),
    signs=(
        ("encoder.blocks.0.wqkv.weight", "encoder.final_layernorm.weight"),
        ("patch_embed.pos_emb.position_embeddings", "final_layernorm.weight"),
    ),
    layouts=(_KIMI_VL, _KIMI_K3, _KIMI_K25, _KIMI_K25_HF),
    classes={"kimi-k25-hf": _CLASS},
    fields=_CONFIG_FIELDS,
    outer_fields={("text_config.hidden_size",): length("projector.linear_2.weight", 0)},
    refusals={
        "locateanything": "its projector normalises the 2x2 patches of a token together",
    },
)
