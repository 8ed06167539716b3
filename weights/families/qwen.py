"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, with Omni, 3.5, 3.6 and 3.8, as Qwen publishes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from encoders import (
    Qwen2_5VLConfig,
    Qwen2_5VLEncoder,
    Qwen2VLConfig,
    Qwen2VLEncoder,
    Qwen3VLConfig,
    Qwen3VLEncoder,
)

from ..layouts import Layout, Place
from .family import (
    Family,
    Fields,
    PublishedModel,
    Shapes,
    Sizes,
    SmallCheckpoint,
    count_blocks,
    read_sizes,
)
from .qwen_aliases import LIKE_QWEN2_5_VL, LIKE_QWEN3_VL, TIMM, TIMM_LAYOUT

# --- layouts and processor files ------------------------------------------------------------------

_PLACES = (
    Place("thinker.", "visual."),
    Place("vlm.model.", "visual."),
    Place("vlm.", "visual."),
    Place("model.language_model.", "visual."),
    Place("model.", "visual."),
    Place("", "visual."),
    Place("", "vision_tower."),  # OpenCUA
    Place("", ""),
)
_IGNORED = ("rotary_pos_emb.inv_freq", "blocks.N.attn.rotary_emb.inv_freq", "attn_pool")
_PATCHES = {"temporal_patch_size": 2, "merge_size": 2}
_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", **_PATCHES}
_BOUNDS = {"min_pixels": 3136, "max_pixels": 12845056}
_HALF = {"patch_size": 16, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_CLIP = {"patch_size": 14, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD}
_QWEN2_FILES = {"preprocessor_config": {**_IMAGES, **_BOUNDS, **_CLIP}}
_IMAGE_SIZE = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}}
_VIDEO_SIZE = {"size": {"longest_edge": 25165824, "shortest_edge": 4096}}
_VIDEOS = {"video_processor_type": "Qwen3VLVideoProcessor", **_PATCHES}
_QWEN3_FILES = {
    "preprocessor_config": {**_IMAGES, **_HALF, **_IMAGE_SIZE},
    "video_preprocessor_config": {**_VIDEOS, **_HALF, **_VIDEO_SIZE},
}
_QWEN2 = Layout("qwen", _PLACES, ("blocks.",), ignored=_IGNORED, processor_files=_QWEN2_FILES)
_QWEN3 = replace(_QWEN2, processor_files=_QWEN3_FILES)
_OMNI_2_5 = Layout(  # queries, keys and values apart
    name="qwen2.5-omni",
    places=_PLACES,
    marks=("blocks.0.attn.q.", "blocks.0.attn.k.", "blocks.0.attn.v."),
    joins={"blocks.N.attn.qkv": ("blocks.N.attn.q", "blocks.N.attn.k", "blocks.N.attn.v")},
    ignored=_IGNORED,
    processor_files=_QWEN2_FILES,
)
_OMNI_3 = Layout(  # other names in the mergers
    name="qwen3-omni",
    places=_PLACES,
    marks=("merger.ln_q.", "merger.mlp.", "merger_list."),
    renames={
        "merger.ln_q": "merger.norm",
        "merger.mlp.0": "merger.linear_fc1",
        "merger.mlp.2": "merger.linear_fc2",
        "merger_list.N.ln_q": "deepstack_merger_list.N.norm",
        "merger_list.N.mlp.0": "deepstack_merger_list.N.linear_fc1",
        "merger_list.N.mlp.2": "deepstack_merger_list.N.linear_fc2",
    },
    ignored=_IGNORED,
    processor_files={"preprocessor_config": {**_IMAGES, **_BOUNDS, **_HALF}},
)

# --- config ------------------------------------------------------------------------------------

_PATCH = "patch_embed.proj.weight"
_SHARED: Sizes = {
    (_PATCH, 2): ("temporal_patch_size",),
    (_PATCH, 4): ("patch_size", "spatial_patch_size"),
}
_SIZES: Sizes = {
    **_SHARED,
    (_PATCH, 0): ("hidden_size",),
    ("blocks.0.mlp.gate_proj.weight", 0): ("intermediate_size",),  # Qwen2.5-VL
    ("blocks.0.mlp.linear_fc1.weight", 0): ("intermediate_size",),  # Qwen3-VL
    ("merger.mlp.2.weight", 0): ("out_hidden_size",),  # Qwen2.5-VL
    ("merger.linear_fc2.weight", 0): ("out_hidden_size",),  # Qwen3-VL
    ("pos_embed.weight", 0): ("num_position_embeddings",),  # Qwen3-VL
}
_QWEN2_SIZES: Sizes = {
    **_SHARED,
    (_PATCH, 0): ("embed_dim",),
    ("merger.mlp.2.weight", 0): ("hidden_size",),
    ("blocks.0.mlp.fc1.weight", 0): ("mlp",),
}


def _qwen2_vl_fields(shapes: Shapes) -> Fields:
    fields = _with_depth(shapes, read_sizes(shapes, _QWEN2_SIZES))
    mlp, width = fields.pop(("mlp",), None), fields.get(("embed_dim",))
    return fields if mlp is None or width is None else {**fields, ("mlp_ratio",): mlp / width}


def _qwen2_5_vl_fields(shapes: Shapes) -> Fields:
    return _with_depth(shapes, read_sizes(shapes, _SIZES))


def _qwen3_vl_fields(shapes: Shapes) -> Fields:
    fields = _with_depth(shapes, read_sizes(shapes, _SIZES))
    if shapes and count_blocks(shapes, "deepstack_merger_list.") == 0:
        fields["deepstack_visual_indexes",] = []
    return fields


def _with_depth(shapes: Shapes, fields: Fields) -> Fields:
    depth = count_blocks(shapes, "blocks.")
    return {**fields, ("depth", "num_hidden_layers"): depth} if depth else fields


# --- published checkpoints ---------------------------------------------------------------------

_KINDS = {
    "qwen2_vl": ("qwen2_vl", "qwen", "visual."),
    "qwen2_5_vl": ("qwen2_5_vl", "qwen", "visual."),
    "qwen2_5_omni": ("qwen2_5_vl", "qwen2.5-omni", "thinker.visual."),
    "qwen3_vl": ("qwen3_vl", "qwen", "model.visual."),
    "qwen3_vl_moe": ("qwen3_vl", "qwen", "model.visual."),
    "qwen3_omni_moe": ("qwen3_vl", "qwen3-omni", "thinker.visual."),
    "qwen3_5": ("qwen3_vl", "qwen", "model.visual."),
    "qwen3_5_moe": ("qwen3_vl", "qwen", "model.visual."),
    "qwen4_exp": ("qwen3_vl", "qwen", "model.visual."),
}
"""Model type -> family, layout and prefix of the published repos."""


def _model(repo: str, parameters: int, kind: str, vision: dict[str, Any]) -> PublishedModel:
    family, layout, prefix = _KINDS[kind]
    omni = prefix.startswith("thinker")
    vision = {"model_type": f"{kind}_vision_encoder" if omni else kind, **vision}
    part: dict[str, Any] = {"vision_config": vision}
    config = {"model_type": kind, **({"thinker_config": part} if omni else part)}
    return PublishedModel(f"Qwen/{repo}", family, layout, prefix, parameters, 0, config)


def _qwen2_vl(repo: str, parameters: int, width: int, stated: dict[str, Any]) -> PublishedModel:
    vision = {"hidden_size": width, "in_chans": 3, "spatial_patch_size": 14, **stated}
    return _model(repo, parameters, "qwen2_vl", vision)


def _qwen2_5_vl(
    repo: str, parameters: int, width: int, mlp: int = 3420, kind: str = "qwen2_5_vl"
) -> PublishedModel:
    vision = (
        {"depth": 32, "hidden_size": 1280, "intermediate_size": mlp, "num_heads": 16}
        | {"out_hidden_size": width, "hidden_act": "silu", "in_chans": 3, "patch_size": 14}
        | {"spatial_patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
        | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
        | {"tokens_per_second": 25 if kind == "qwen2_5_omni" else 2}
    )
    return _model(repo, parameters, kind, vision)


def _qwen3_vl(
    repo: str, parameters: int, width: int, tower: dict[str, int], kind: str = "qwen3_vl"
) -> PublishedModel:
    deepstack = kind.startswith(("qwen3_vl", "qwen3_omni"))
    indexes = _DEEPSTACK[tower["depth"]] if deepstack else []
    vision = (
        {**tower, "out_hidden_size": width, "hidden_act": "gelu_pytorch_tanh"}
        | {"in_channels": 3, "patch_size": 16, "num_position_embeddings": 2304}
        | {"spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": indexes}
    )
    return _model(repo, parameters, kind, vision)


_PATCHES_7B = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN2_7B = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, **_PATCHES_7B}
_TINY = {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072}
_SMALL = {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}
_LARGE = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304}
_DEEPSTACK = {24: [5, 11, 17], 27: [8, 16, 24]}
_QWEN2_VL = (
    _qwen2_vl("Qwen2-VL-2B-Instruct", 665_271_296, 1536, {}),
    _qwen2_vl("Qwen2-VL-7B-Instruct", 675_759_104, 3584, _QWEN2_7B),
    _qwen2_vl("Qwen2-VL-72B-Instruct", 699_356_672, 8192, {}),
)
_QWEN2_5_VL = (
    _qwen2_5_vl("Qwen2.5-VL-3B-Instruct", 668_684_288, 2048),
    _qwen2_5_vl("Qwen2.5-VL-7B-Instruct", 676_550_144, 3584),
    _qwen2_5_vl("Qwen2.5-VL-32B-Instruct", 688_841_984, 5120, 3456),
    _qwen2_5_vl("Qwen2.5-VL-72B-Instruct", 704_573_696, 8192, 3456),
    _qwen2_5_vl("Qwen2.5-Omni-7B", 676_550_144, 3584, kind="qwen2_5_omni"),
    _qwen2_5_vl("Qwen2.5-Omni-3B", 668_684_288, 2048, kind="qwen2_5_omni"),
    *LIKE_QWEN2_5_VL,
)
_QWEN3_VL = (
    _qwen3_vl("Qwen3-VL-2B-Instruct", 406_957_056, 2048, _SMALL),
    _qwen3_vl("Qwen3-VL-4B-Instruct", 415_347_712, 2560, _SMALL),
    _qwen3_vl("Qwen3-VL-8B-Instruct", 576_388_336, 4096, _LARGE),
    _qwen3_vl("Qwen3-VL-32B-Instruct", 595_266_800, 5120, _LARGE),
    _qwen3_vl("Qwen3-VL-30B-A3B-Instruct", 538_631_408, 2048, _LARGE, "qwen3_vl_moe"),
    _qwen3_vl("Qwen3-VL-235B-A22B-Instruct", 576_388_336, 4096, _LARGE, "qwen3_vl_moe"),
    *(
        _qwen3_vl(f"Qwen3-VL-{use}-{size}", parameters, width, tower)
        for use in ("Embedding", "Reranker")
        for size, parameters, width, tower in (
            ("2B", 406_957_056, 2048, _SMALL),
            ("8B", 576_388_336, 4096, _LARGE),
        )
    ),
    _qwen3_vl("Qwen3-Omni-30B-A3B-Instruct", 538_631_408, 2048, _LARGE, "qwen3_omni_moe"),
    _qwen3_vl("Qwen3.5-0.8B", 100_592_896, 1024, _TINY, "qwen3_5"),
    _qwen3_vl("Qwen3.5-2B", 331_416_576, 2048, _SMALL, "qwen3_5"),
    _qwen3_vl("Qwen3.5-4B", 333_514_240, 2560, _SMALL, "qwen3_5"),
    _qwen3_vl("Qwen3.5-9B", 456_010_480, 4096, _LARGE, "qwen3_5"),
    _qwen3_vl("Qwen3.5-27B", 460_730_096, 5120, _LARGE, "qwen3_5"),
    _qwen3_vl("Qwen3.5-35B-A3B", 446_571_248, 2048, _LARGE, "qwen3_5_moe"),
    _qwen3_vl("Qwen3.5-122B-A10B", 451_290_864, 3072, _LARGE, "qwen3_5_moe"),
    _qwen3_vl("Qwen3.5-397B-A17B", 456_010_480, 4096, _LARGE, "qwen3_5_moe"),
    _qwen3_vl("Qwen3.6-27B", 460_730_096, 5120, _LARGE, "qwen3_5"),
    _qwen3_vl("Qwen3.6-35B-A3B", 446_571_248, 2048, _LARGE, "qwen3_5_moe"),
    _qwen3_vl("Qwen3.8-27B", 460_730_096, 5120, _LARGE, "qwen3_5"),
    _qwen3_vl("Qwen3.8-Flash-Next", 448_931_056, 2560, _LARGE, "qwen4_exp"),
    *LIKE_QWEN3_VL,
)

# --- records -----------------------------------------------------------------------------------

_REPLAYS = {"image": "yes", "video": "yes, by frame pair"}
QWEN2_VL = Family(
    name="qwen2_vl",
    title="Qwen2-VL",
    encoder=Qwen2VLEncoder,
    config=Qwen2VLConfig,
    model_types=("qwen2_vl", "qwen2_vl_vision", "colqwen2"),
    signs=(("blocks.0.mlp.fc1.weight", "merger.ln_q.weight"),),
    layouts=(_QWEN2,),
    fields=_qwen2_vl_fields,
    published=_QWEN2_VL,
    small={"qwen2_vl": SmallCheckpoint("Qwen/Qwen2-VL-7B-Instruct", "Qwen2-VL")},
    video="frame pairs",
    replays=_REPLAYS,
)
QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    title="Qwen2.5-VL",
    encoder=Qwen2_5VLEncoder,
    config=Qwen2_5VLConfig,
    model_types=(
        "qwen2_5_vl",
        "qwen2_5_vl_vision",
        "qwen2_5_omni",
        "qwen2_5_omni_thinker",
        "qwen2_5_omni_vision_encoder",
        "exaone4_5",
        "exaone4_5_vision",
    ),
    signs=(("blocks.0.mlp.gate_proj.weight", "merger.ln_q.weight"),),
    layouts=(_OMNI_2_5, _QWEN2),
    fields=_qwen2_5_vl_fields,
    published=_QWEN2_5_VL,
    small={
        "qwen2_5_vl": SmallCheckpoint("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL"),
        "qwen2_5_omni": SmallCheckpoint("Qwen/Qwen2.5-Omni-7B", "Qwen2.5-Omni"),
        "exaone4_5": SmallCheckpoint("LGAI-EXAONE/EXAONE-4.5-33B"),
    },
    video="frame pairs",
    replays=_REPLAYS,
)
QWEN3_VL = Family(
    name="qwen3_vl",
    title="Qwen3-VL",
    encoder=Qwen3VLEncoder,
    config=Qwen3VLConfig,
    model_types=(
        "qwen3_vl",
        "qwen3_vl_vision",
        "qwen3_vl_moe",
        "qwen3_vl_moe_vision",
        "qwen3_omni_moe",
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe_vision_encoder",
        "qwen3_5",
        "qwen3_5_vision",
        "qwen3_5_moe",
        "qwen3_5_moe_vision",
        "qwen4_exp",
        "qwen4_exp_vision",
        "cohere_compass",
        "cohere_compass_vision",
    ),
    signs=(("blocks.0.mlp.linear_fc1.weight", "pos_embed.weight"),),
    layouts=(TIMM_LAYOUT, _OMNI_3, _QWEN3),
    fields=_qwen3_vl_fields,
    published=_QWEN3_VL,
    small={
        "qwen3_vl": SmallCheckpoint("Qwen/Qwen3-VL-8B-Instruct", "Qwen3-VL"),
        "qwen3_vl_moe": SmallCheckpoint("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3-VL-MoE"),
        "qwen3_omni": SmallCheckpoint("Qwen/Qwen3-Omni-30B-A3B-Instruct", "Qwen3-Omni"),
        "qwen3_5": SmallCheckpoint("Qwen/Qwen3.5-27B", "Qwen3.5"),
        "qwen4_exp": SmallCheckpoint("Qwen/Qwen3.8-Flash-Next"),
        "qwen_drive": SmallCheckpoint("Qwen/Qwen-Drive-1.0-4B"),
        "cohere_compass": SmallCheckpoint("CohereLabs/North-Micro-Vision-Instruct"),
        "qwen3_timm": SmallCheckpoint("timm/qwen3_vit_416m_enc.qwen3_vl_8b"),
    },
    video="frame pairs",
    replays=_REPLAYS,
    timm=TIMM,
)
