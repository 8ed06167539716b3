"""DeepSeek-VL, DeepSeek-VL2 and DeepSeek-OCR, as deepseek-ai publishes them."""

from __future__ import annotations

from encoders import (
    DeepseekOCRConfig,
    DeepseekOCREncoder,
    DeepseekVL2Config,
    DeepseekVL2Encoder,
    DeepseekVLConfig,
    DeepseekVLEncoder,
    DeepseekVLHybridConfig,
    DeepseekVLHybridEncoder,
)

from ..layouts import Layout, Place
from ..published import PROCESSORS
from .family import Family, Fields, length

_ONE_VIEW = {"image": "yes, by view", "video": "no videos"}
_BY_PATH = {"image": "yes, each path by view", "video": "no videos"}


# --- DeepSeek-VL ---------------------------------------------------------------------------------

_VL_LAYOUT = Layout(
    name="deepseek-vl",
    places=(Place("", "vision_model.vision_tower."), Place("", "")),
    marks=("pos_embed",),
    projector=("aligner.",),
    renames={
        "pos_embed": "vision.pos_embed",
        "patch_embed": "vision.patch_embed",
        "blocks.N": "vision.blocks.N",
        "norm": "vision.norm",
    },
    ignored=("attn_pool",),  # pools to one vector, which the model does not use
    processor_files=PROCESSORS["deepseek-vl"],
)
_LOW, _HIGH = "vision_tower_low.vision_tower", "vision_tower_high.vision_tower"
_HYBRID_LAYOUT = Layout(
    name="deepseek-vl-hybrid",
    places=(Place("", "vision_model."), Place("", "")),
    marks=("vision_tower_high.",),
    projector=("aligner.",),
    renames={
        _LOW: "low.vision",
        f"{_HIGH}.neck_hd": "high.neck_hd",
        f"{_HIGH}.downsamples": "high.downsamples",
        f"{_HIGH}.hd_alpha_downsamples": "high.hd_alpha_downsamples",
        f"{_HIGH}.blocks.N.mlp.lin1": "high.sam.blocks.N.mlp.fc1",
        f"{_HIGH}.blocks.N.mlp.lin2": "high.sam.blocks.N.mlp.fc2",
        _HIGH: "high.sam",
        "aligner.low_up_proj": "low.aligner",
        "aligner.high_up_proj": "high.aligner",
        "aligner.layers.1": "aligner",
    },
    # HybridVisionTower makes two norms that its forward does not call.
    ignored=(f"{_LOW}.attn_pool", "high_layer_norm", "low_layer_norm"),
    processor_files=PROCESSORS["deepseek-vl-hybrid"],
)

DEEPSEEK_VL = Family(
    name="deepseek_vl",
    title="DeepSeek-VL",
    encoder=DeepseekVLEncoder,
    config=DeepseekVLConfig,
    model_types=("vision", "multi_modality"),
    signs=(("pos_embed", "aligner.layers.0.weight"),),
    layouts=(_VL_LAYOUT,),
    replays=_ONE_VIEW,
)
DEEPSEEK_VL_HYBRID = Family(
    name="deepseek_vl_hybrid",
    title="DeepSeek-VL (SAM and SigLIP)",
    encoder=DeepseekVLHybridEncoder,
    config=DeepseekVLHybridConfig,
    model_types=("vision", "multi_modality"),
    signs=(("neck_hd.0.weight", "aligner.high_up_proj.weight"),),
    layouts=(_HYBRID_LAYOUT,),
    replays=_BY_PATH,
)

# --- DeepSeek-VL2 --------------------------------------------------------------------------------

_VL2_LAYOUT = Layout(
    name="deepseek-vl2",
    places=(Place("", "vision."), Place("", "")),
    marks=("pos_embed",),
    projector=("projector.", "image_newline", "view_seperator"),
    renames=_VL_LAYOUT.renames,
    ignored=("attn_pool",),
    processor_files=PROCESSORS["deepseek-vl2"],
)
_VL2_FIELDS: Fields = {
    ("projector_config.n_embed",): length("projector.layers.2.weight", 0),
}
DEEPSEEK_VL2 = Family(
    name="deepseek_vl2",
    title="DeepSeek-VL2",
    encoder=DeepseekVL2Encoder,
    config=DeepseekVL2Config,
    model_types=("vision", "deepseek_vl_v2"),
    signs=(("projector.layers.2.weight", "view_seperator"),),
    layouts=(_VL2_LAYOUT,),
    replays=_BY_PATH,
    verified=False,
    outer_fields=_VL2_FIELDS,
)

# --- DeepSeek-OCR --------------------------------------------------------------------------------

_CLIP_LAYER = "vision_model.transformer.layers.N"
_OCR_LAYOUT = Layout(
    name="deepseek-ocr",
    places=(Place("model.", "sam_model."), Place("", "")),
    marks=("net_2.",),
    projector=("vision_model.", "projector.", "image_newline", "view_seperator"),
    renames={
        "pos_embed": "sam_model.pos_embed",
        "patch_embed": "sam_model.patch_embed",
        "blocks.N.mlp.lin1": "sam_model.blocks.N.mlp.fc1",
        "blocks.N.mlp.lin2": "sam_model.blocks.N.mlp.fc2",
        "blocks.N": "sam_model.blocks.N",
        "neck": "sam_model.neck",
        "net_2": "sam_model.net_2",
        "net_3": "sam_model.net_3",
        "vision_model.embeddings.position_embedding.weight": (
            "vision_model.embeddings.position_embedding"
        ),
        f"{_CLIP_LAYER}.layer_norm1": "vision_model.blocks.N.norm1",
        f"{_CLIP_LAYER}.layer_norm2": "vision_model.blocks.N.norm2",
        f"{_CLIP_LAYER}.self_attn.qkv_proj": "vision_model.blocks.N.attn.qkv",
        f"{_CLIP_LAYER}.self_attn.out_proj": "vision_model.blocks.N.attn.proj",
        _CLIP_LAYER: "vision_model.blocks.N",
    },
    # SAM's features take the place of CLIP's patches.
    ignored=("vision_model.embeddings.patch_embedding", "vision_model.embeddings.position_ids"),
    processor_files=PROCESSORS["deepseek-ocr"],
)
DEEPSEEK_OCR = Family(
    name="deepseek_ocr",
    title="DeepSeek-OCR",
    encoder=DeepseekOCREncoder,
    config=DeepseekOCRConfig,
    model_types=("vision", "deepseek_vl_v2"),
    signs=(("net_3.weight", "vision_model.pre_layrnorm.weight"),),
    layouts=(_OCR_LAYOUT,),
    replays=_BY_PATH,
)
