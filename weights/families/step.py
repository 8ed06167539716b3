"""Step3-VL-10B, Step-3.7 and Step5, and Step3: checkpoints as StepFun publishes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from encoders import Step3Config, Step3Encoder, Step3VLConfig, Step3VLEncoder

from ..layouts import Layout, Place
from .family import (
    NO_VIDEO,
    Family,
    Fields,
    PublishedModel,
    Shapes,
    Sizes,
    SmallCheckpoint,
    count_blocks,
    read_sizes,
)

# --- layouts and processor files -----------------------------------------------------------------

_PLACES = (Place("", "vision_model."), Place("model.", "vision_model."), Place("", ""))
_BLOCK = "transformer.resblocks.N"
_STEP3_VL = Layout(  # as published; StepFun's own code has the values of the preprocessing
    name="step3-vl",
    places=_PLACES,
    marks=("conv1.", "transformer.resblocks."),
    projector=("vit_large_projector.",),
    renames={
        f"{_BLOCK}.attn.in_proj_weight": f"{_BLOCK}.attn.in_proj.weight",
        f"{_BLOCK}.attn.in_proj_bias": f"{_BLOCK}.attn.in_proj.bias",
        f"{_BLOCK}.ls_1.gamma": f"{_BLOCK}.ls_1",
        f"{_BLOCK}.ls_2.gamma": f"{_BLOCK}.ls_2",
    },
)
_STEP3_VL_HF = Layout(  # as transformers names the tensors in memory, queries and keys permuted
    name="step3-vl-hf",
    places=_PLACES,
    marks=("embeddings.patch_embedding.", "layers.0.layernorm_before."),
    projector=("multi_modal_projector.",),
    joins={
        f"{_BLOCK}.attn.in_proj": (
            "layers.N.self_attn.q_proj",
            "layers.N.self_attn.k_proj",
            "layers.N.self_attn.v_proj",
        )
    },
    halves=("layers.N.self_attn.q_proj", "layers.N.self_attn.k_proj"),
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
    processor_files={
        "preprocessor_config": {
            "image_processor_type": "Step3p7ImageProcessor",
            "size": {"height": 728, "width": 728},
            "patch_size": 504,
            "max_image_size": 3024,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "resample": 2,
        }
    },
)
_STEP3 = Layout(
    name="step3",
    places=_PLACES,
    marks=("embeddings.class_embedding", "transformer.layers."),
    projector=("vit_downsampler.", "vit_downsampler2.", "vit_large_projector."),
    renames={"embeddings.position_embedding.weight": "embeddings.position_embedding"},
)

# --- config ------------------------------------------------------------------------------------

_STEP3_VL_SIZES: Sizes = {
    ("conv1.weight", 0): ("width", "hidden_size"),
    ("conv1.weight", -1): ("patch_size",),
    ("positional_embedding", 0): ("rows",),
    ("transformer.resblocks.0.mlp.c_fc.weight", 0): ("mlp",),
}
_STEP3_SIZES: Sizes = {
    ("embeddings.class_embedding", 1): ("hidden_size",),
    ("embeddings.patch_embedding.weight", -1): ("patch_size",),
    ("embeddings.position_embedding", 0): ("rows",),
}


def _step3_vl_fields(shapes: Shapes) -> Fields:
    fields = read_sizes(shapes, _STEP3_VL_SIZES)
    mlp, width = fields.pop(("mlp",), None), fields.get(("width", "hidden_size"))
    if mlp is not None and width is not None:
        fields["mlp_ratio",] = mlp / width
    _set_image_size(fields, fields.pop(("rows",), None))
    if depth := _depth(shapes, "resblocks."):
        fields["layers", "num_hidden_layers"] = depth
    return fields


def _step3_fields(shapes: Shapes) -> Fields:
    fields = read_sizes(shapes, _STEP3_SIZES)
    rows = fields.pop(("rows",), None)
    _set_image_size(fields, None if rows is None else rows - 1)
    if depth := _depth(shapes, "layers."):
        fields["num_hidden_layers",] = depth
    return fields


def _depth(shapes: Shapes, blocks: str) -> int:
    inner = {name.removeprefix("transformer."): shape for name, shape in shapes.items()}
    return count_blocks(inner, blocks)


def _set_image_size(fields: Fields, patches: int | None) -> None:
    """The side of the whole image, from the patches that the position table is for."""
    if patches is not None and ("patch_size",) in fields:
        fields["image_size",] = round(patches**0.5) * fields["patch_size",]


def _read_step3_vl(config: Mapping[str, Any], shapes: Shapes | None) -> Step3VLConfig:
    """Read a config; what describes the projector is read from the tensors where it is not said."""
    return Step3VLConfig.from_hf(_with_projector(config, shapes or {}))


def _read_step3(config: Mapping[str, Any], shapes: Shapes | None) -> Step3Config:
    """Read a config; the widths of MLP and downsampler and the projector's bias are the tensors'.

    Class defaults that published configs repeat disagree with the checkpoint: an MLP of 3072
    columns makes 1.5 billion parameters, where the model card says 5.
    """
    built = Step3Config.from_hf(_with_projector(config, shapes or {}))
    if not shapes:
        return built
    mlp = shapes.get("transformer.layers.0.mlp.fc1.weight")
    downsampler = shapes.get("vit_downsampler.weight")
    return replace(
        built,
        intermediate_size=mlp[0] if mlp else built.intermediate_size,
        downsampled_size=downsampler[0] if downsampler else built.downsampled_size,
        projector_bias="vit_large_projector.bias" in shapes,
    )


def _with_projector(config: Mapping[str, Any], shapes: Shapes) -> Mapping[str, Any]:
    """The config with the width and the bias of the projector, if it does not state them."""
    projector = shapes.get("vit_large_projector.weight")
    if projector is None:
        return config
    stated: dict[str, Any] = {"projector_bias": "vit_large_projector.bias" in shapes}
    language = config.get("text_config")
    if not isinstance(language, Mapping) or language.get("hidden_size") is None:
        stated["text_config"] = {"hidden_size": projector[0]}
        return {**stated, **config, "text_config": stated["text_config"]}
    return {**stated, **config}


# --- published checkpoints ---------------------------------------------------------------------

_PERCEPTION_ENCODER: dict[str, Any] = {
    "model_type": "perception_encoder",
    "image_size": 728,
    "patch_size": 14,
    "width": 1536,
    "layers": 47,
    "heads": 16,
    "mlp_ratio": 8960 / 1536,
    "num_channels": 3,
    "use_cls_token": False,
    "use_abs_posemb": True,
    "use_ln_pre": True,
    "use_ln_post": False,
    "use_rope2d": True,
    "ls_init_value": 0.1,
    "layer_norm_eps": 1e-05,
    "hidden_act": "quick_gelu",
    "output_dim": None,
    "pool_type": "none",
}


def _step3_vl(repo: str, model_type: str, architecture: str) -> PublishedModel:
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [architecture],
        "understand_projector_stride": 2,
        "projector_bias": False,
        "vision_config": _PERCEPTION_ENCODER,
        "text_config": {"hidden_size": 4096},
    }
    return PublishedModel(
        f"stepfun-ai/{repo}",
        "step3_vl",
        "step3-vl",
        "vision_model.",
        1_955_848_960,
        25_165_824,
        config,
    )


_STEP3_CONFIG: dict[str, Any] = {
    "model_type": "step3_vl",
    "architectures": ["Step3VLForConditionalGeneration"],
    "understand_projector_stride": 2,
    "projector_bias": False,
    "vision_config": {
        "model_type": "step3_vision_encoder",
        "hidden_size": 1792,
        "intermediate_size": 15360,
        "output_hidden_size": 4096,
        "num_hidden_layers": 63,
        "num_attention_heads": 16,
        "num_channels": 3,
        "image_size": 728,
        "patch_size": 14,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-05,
    },
    "text_config": {"hidden_size": 7168},
}

# --- records -----------------------------------------------------------------------------------

_REPLAYS = {"image": "yes, by path", "video": "no"}
STEP3_VL = Family(
    name="step3_vl",
    title="Step3-VL",
    encoder=Step3VLEncoder,
    config=Step3VLConfig,
    model_types=("perception_encoder", "step3p5_vision", "step_robotics", "step3p7", "step5"),
    signs=(("conv1.weight", "vit_downsampler1.weight"), ("layers.0.lambda_1", "downsampler1.bias")),
    layouts=(_STEP3_VL, _STEP3_VL_HF),
    fields=_step3_vl_fields,
    published=(
        _step3_vl("Step3-VL-10B", "step_robotics", "StepVLForConditionalGeneration"),
        _step3_vl("Step-3.7-Flash", "step3p7", "Step3p7ForConditionalGeneration"),
    ),
    small={
        "step3_vl": SmallCheckpoint("stepfun-ai/Step3-VL-10B", "Step3-VL"),
        "step3_vl_hf": SmallCheckpoint("stepfun-ai/Step-3.7-Flash", layout="step3-vl-hf"),
    },
    video=NO_VIDEO,
    replays=_REPLAYS,
    read_config=_read_step3_vl,
)
STEP3 = Family(
    name="step3",
    title="Step3",
    encoder=Step3Encoder,
    config=Step3Config,
    model_types=("step3_vision_encoder", "step3_vl"),
    signs=(("embeddings.class_embedding", "transformer.layers.0.layer_norm1.weight"),),
    layouts=(_STEP3,),
    fields=_step3_fields,
    published=(
        PublishedModel(
            "stepfun-ai/step3",
            "step3",
            "step3",
            "vision_model.",
            4_285_292_032,
            390_082_560,
            _STEP3_CONFIG,
        ),
    ),
    small={"step3": SmallCheckpoint("stepfun-ai/step3", "Step3")},
    video=NO_VIDEO,
    replays=_REPLAYS,
    verified=False,
    read_config=_read_step3,
)
