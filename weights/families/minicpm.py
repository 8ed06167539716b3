"""The towers of MiniCPM-V 4.6 and 4.7 and of MiniCPM-OCR, as OpenBMB publishes them.

Source of the names: ``MiniCPMV4_6Model`` of transformers 5.23.0 and its conversion of names.
"""

from __future__ import annotations

from encoders import MiniCPMVConfig, MiniCPMVEncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from .family import Family, TransformersClass, block_count, length, square, with_vision
from .siglip import QKV, siglip_names

_WINDOWS = "vit_merger"
_LAYOUT = Layout(
    name="minicpm-v",
    prefixes=(Prefix("model.", "vision_tower."), Prefix("", "vision_tower."), Prefix("", "")),
    marks=("embeddings.patch_embedding.",),
    projector=("merger.",),
    joins={
        "blocks.N.attn.qkv": QKV,
        "window_merger.attn.qkv": tuple(f"{_WINDOWS}.self_attn.{part}_proj" for part in "qkv"),
    },
    renames={
        **siglip_names("", "patch_embed.proj"),
        f"{_WINDOWS}.layer_norm1": "window_merger.norm1",
        f"{_WINDOWS}.self_attn.out_proj": "window_merger.attn.proj",
        f"{_WINDOWS}.pre_norm": "window_merger.norm2",
        f"{_WINDOWS}.linear_1": "window_merger.fc1",
        f"{_WINDOWS}.linear_2": "window_merger.fc2",
        "merger.mlp.0": "merger",
    },
    processor_files=family_facts("minicpm_v").processors["minicpm-v"],
)
_RESAMPLER = "a resampler follows its tower, which makes 64 tokens of each slice"


def _class(module: str, name: str, *, auto: bool = True) -> TransformersClass:
    """Return the class of a tower, which has the number of the block before the merger."""
    own = {"insert_layer_id": "insert_layer_id"}  # published outside the tower's part
    return TransformersClass(module, name, f"{module}_vision", auto=auto, fields=own)


MINICPM_V = Family(
    name="minicpm_v",
    encoder=MiniCPMVEncoder,
    config=MiniCPMVConfig,
    model_types=with_vision("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"),
    signs=(
        ("vit_merger.linear_1.weight", "embeddings.patch_embedding.weight"),
        ("merger.mlp.0.linear_1.weight", "vit_merger.pre_norm.weight"),
    ),
    layouts=(_LAYOUT,),
    classes={
        "minicpm-v": _class("minicpmv4_6", "MiniCPMV4_6VisionModel", auto=False),
        "minicpmv4_7": _class("minicpmv4_7", "MiniCPMV4_7VisionModel"),
        "minicpm_ocr": _class("minicpm_ocr", "MiniCPMOcrVisionModel"),
    },
    fields={  # the number of heads cannot be inferred from shapes
        ("hidden_size",): length("patch_embed.proj.weight", 0),
        ("intermediate_size",): length("blocks.0.mlp.fc1.weight", 0),
        ("num_hidden_layers",): block_count("blocks."),
        ("patch_size",): length("patch_embed.proj.weight", 3),
        ("image_size",): square("pos_embed", 0, "patch_embed.proj.weight", extra=0),
    },
    outer_fields={("text_config.hidden_size",): length("merger.linear_2.weight", 0)},
    refusals=dict.fromkeys(("minicpmv", "minicpmo"), _RESAMPLER),
)
