"""The published tensor names in the towers of Step3-VL-10B, Step-3.7, Step5 and Step3."""

from __future__ import annotations

from dataclasses import replace

from encoders import Step3Config, Step3Encoder, Step3VLConfig, Step3VLEncoder

from ..layouts import Layout, Prefix
from ..published import family_facts
from ..strict_json import JsonObject
from .family import Family, Fields, Shapes, TransformersClass, block_count, length, square

_PREFIXES = (Prefix("", "vision_model."), Prefix("model.", "vision_model."), Prefix("", ""))
_BLOCK = "transformer.resblocks.N"
_STEP3_VL = Layout(  # stepfun-ai/Step3-VL-10B has no processor files: its code has the values
    name="step3-vl",
    prefixes=_PREFIXES,
    marks=("conv1.", "transformer.resblocks."),
    projector=("vit_large_projector.",),
    renames={
        f"{_BLOCK}.attn.in_proj_weight": f"{_BLOCK}.attn.in_proj.weight",
        f"{_BLOCK}.attn.in_proj_bias": f"{_BLOCK}.attn.in_proj.bias",
        f"{_BLOCK}.ls_1.gamma": f"{_BLOCK}.ls_1",
        f"{_BLOCK}.ls_2.gamma": f"{_BLOCK}.ls_2",
    },
)
_HF_QKV = tuple(f"layers.N.self_attn.{part}_proj" for part in "qkv")
_STEP3_VL_HF = Layout(  # ``Step3p7Model`` of transformers 5.23.0 permutes queries' and keys' rows
    name="step3-vl-hf",
    prefixes=_PREFIXES,
    marks=("embeddings.patch_embedding.", "layers.0.layernorm_before."),
    projector=("multi_modal_projector.",),
    joins={f"{_BLOCK}.attn.in_proj": _HF_QKV},
    rotary_halves=_HF_QKV[:2],
    renames={
        "embeddings.patch_embedding": "conv1",
        "embeddings.position_embedding.weight": "positional_embedding",
        "pre_layernorm": "ln_pre",
        "layers.N.layernorm_before": f"{_BLOCK}.ln_1",
        "layers.N.layernorm_after": f"{_BLOCK}.ln_2",
        "layers.N.lambda_1": f"{_BLOCK}.ls_1",
        "layers.N.lambda_2": f"{_BLOCK}.ls_2",
        "layers.N.self_attn.out_proj": f"{_BLOCK}.attn.out_proj",
        "layers.N.mlp.fc1": f"{_BLOCK}.mlp.c_fc",
        "layers.N.mlp.fc2": f"{_BLOCK}.mlp.c_proj",
        "downsampler1": "vit_downsampler1",
        "downsampler2": "vit_downsampler2",
        "multi_modal_projector": "vit_large_projector",
    },
    processor_files=family_facts("step3_vl").processors["step3-vl-hf"],
)
_STEP3 = Layout(
    name="step3",
    prefixes=_PREFIXES,
    marks=("embeddings.class_embedding", "transformer.layers."),
    projector=("vit_downsampler.", "vit_downsampler2.", "vit_large_projector."),
    renames={"embeddings.position_embedding.weight": "embeddings.position_embedding"},
)

_OUTER_FIELDS: Fields = {
    ("text_config.hidden_size",): length("vit_large_projector.weight", 0),
    ("projector_bias",): lambda shapes: "vit_large_projector.bias" in shapes,
}
_STEP3_VL_MLP = "transformer.resblocks.0.mlp.c_fc.weight"
_STEP3_VL_FIELDS: Fields = {
    ("width", "hidden_size"): length("conv1.weight", 0),
    ("patch_size",): length("conv1.weight", -1),
    ("image_size",): square("positional_embedding", 0, "conv1.weight", extra=0),
    ("mlp_ratio",): lambda shapes: shapes[_STEP3_VL_MLP][0] / shapes["conv1.weight"][0],
    ("layers", "num_hidden_layers"): block_count("transformer.resblocks."),
}
_POSITIONS, _PATCH = "embeddings.position_embedding", "embeddings.patch_embedding.weight"
_STEP3_FIELDS: Fields = {
    ("hidden_size",): length("embeddings.class_embedding", 1),
    ("patch_size",): length(_PATCH, -1),
    ("image_size",): square(_POSITIONS, 0, _PATCH, extra=1),
    ("num_hidden_layers",): block_count("transformer.layers."),
}


def _parse_step3(config: JsonObject, shapes: Shapes) -> Step3Config:
    """Return the encoder's config from a published one and the shapes of the tower's tensors.

    The widths of MLP and downsampler, and whether the projector has a bias, are taken from the
    tensors, because published configs repeat defaults of the config class that disagree with the
    checkpoint: MLPs of their width 3072 make 1.5 billion parameters, the model card says 5 billion.
    """
    built = Step3Config.from_hf(config)
    mlp = shapes.get("transformer.layers.0.mlp.fc1.weight")
    downsampler = shapes.get("vit_downsampler.weight")
    return replace(
        built,
        intermediate_size=mlp[0] if mlp else built.intermediate_size,
        downsampled_size=downsampler[0] if downsampler else built.downsampled_size,
        projector_bias="vit_large_projector.bias" in shapes,
    )


# ``Step3p7VisionModel`` reads both layouts: it renames and permutes tensors of the original one.
_STEP3_VL_CLASS = TransformersClass("step3p7", "Step3p7VisionModel", "step3p5_vision", auto=False)
STEP3_VL = Family(
    name="step3_vl",
    encoder=Step3VLEncoder,
    config=Step3VLConfig,
    model_types=("perception_encoder", "step3p5_vision", "step_robotics", "step3p7", "step5"),
    signs=(("conv1.weight", "vit_downsampler1.weight"), ("layers.0.lambda_1", "downsampler1.bias")),
    layouts=(_STEP3_VL, _STEP3_VL_HF),
    classes=dict.fromkeys(("step3-vl", "step3-vl-hf"), _STEP3_VL_CLASS),
    fields=_STEP3_VL_FIELDS,
    outer_fields=_OUTER_FIELDS,
)
STEP3 = Family(
    name="step3",
    encoder=Step3Encoder,
    config=Step3Config,
    model_types=("step3_vision_encoder", "step3_vl"),
    # Towers of CLIP have a class embedding, too, so both names are needed to tell a Step3 tower.
    signs=(("embeddings.class_embedding", "vit_downsampler.weight"),),
    layouts=(_STEP3,),
    fields=_STEP3_FIELDS,
    outer_fields=_OUTER_FIELDS,
    parse_config=_parse_step3,
)
