"""The references of DeepSeek-VL, Janus and DeepSeek-OCR, which are models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekVLConfig,
    DeepseekVLHybridConfig,
    DeepseekVLHybridModel,
    DeepseekVLModel,
)
from transformers.models.janus import configuration_janus, modeling_janus

from encoders.contract import EncoderOutput
from encoders.deepseek.deepseek_ocr import DeepseekOCRTower
from encoders.deepseek.deepseek_ocr2 import DeepseekOCR2Tower
from encoders.deepseek.deepseek_vl import LowResolution
from weights import FAMILIES

from ..configs import Config, vision_of
from ..family import make_row
from ..keys import State, renamed, split_qkv
from ..versions import DEEPSEEK_OCR2, UNLIMITED_OCR, skip_without

NARROW = {"width": 64, "heads": 4, "intermediate_size": 112}
SAM_NARROW = {
    "width": 48,
    "heads": 3,
    "intermediate_size": 84,
    "neck_channels": 24,
    "window_size": 5,
    "downsample_channels": [48, 96],
}
STACK_NARROW = {"dim": 64, "heads": 4, "num_key_value_heads": 2, "intermediate_size": 112}
SAM_TINY = {**SAM_NARROW, "layers": 3, "global_attn_indexes": [1], "image_size": 128}
"""Sizes of small towers, by the names of DeepSeek's configs."""


def _published(name: str) -> Any:
    return FAMILIES[name].facts.published[0].config["vision_config"]


def siglip(**changes: Any) -> Config:
    """Return changes to the sizes of DeepSeek-VL's tower, whose config names it alone."""
    return {"params": {**_published("deepseek_vl")["params"], **changes}}


def hybrid(low: Config, high: Config) -> Config:
    """Return changes to the sizes of both towers of the DeepSeek-VL that has two."""
    params = _published("deepseek_vl_hybrid")["params"]
    changed = {"low_res_cfg": low, "high_res_cfg": high}
    return {"params": params | {name: params[name] | new for name, new in changed.items()}}


def ocr(clip: Config, sam: Config) -> Config:
    """Return changes to the sizes of both towers of DeepSeek-OCR."""
    towers = _published("deepseek_ocr")["width"]
    changed = {"clip-l-14-224": clip, "sam_vit_b": sam}
    return {"width": {name: towers[name] | new for name, new in changed.items()}}


def ocr2(stack: Config, sam: Config) -> Config:
    """Return changes to the sizes of SAM and of the blocks of DeepSeek-OCR-2."""
    towers = _published("deepseek_ocr2")["width"]
    changed = {"qwen2-0-5b": stack, "sam_vit_b": sam}
    return {"width": {name: towers[name] | new for name, new in changed.items()}}


_STUB = {
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def _siglip(params: Mapping[str, Any]) -> dict[str, Any]:
    width = params.get("width", 1024)
    return {
        "hidden_size": width,
        "num_hidden_layers": params.get("layers", 24),
        "num_attention_heads": params.get("heads", 16),
        "intermediate_size": params.get("intermediate_size", 4 * width),
        "image_size": params.get("image_size", 384),
        "patch_size": 16,
        "hidden_act": "gelu",  # transformers' default is the tanh form
        "vision_use_head": False,
    }


def _sam(params: Mapping[str, Any]) -> dict[str, Any]:
    width = params.get("width", 768)
    return {
        "hidden_size": width,
        "num_hidden_layers": params.get("layers", 12),
        "num_attention_heads": params.get("heads", 12),
        "mlp_dim": params.get("intermediate_size", 4 * width),
        "output_channels": params.get("neck_channels", 256),
        "image_size": params.get("image_size", 1024),
        "window_size": params.get("window_size", 14),
        "global_attn_indexes": list(params.get("global_attn_indexes", (2, 5, 8, 11))),
    }


def vl_reference(config: Config) -> nn.Module:
    """Build transformers' DeepseekVLModel with a stub for its language model."""
    width = config["aligner_config"]["params"]["n_embed"]
    vision = _siglip(config["vision_config"]["params"])
    text = {"model_type": "llama", "hidden_size": width, **_STUB}
    wrapped = DeepseekVLConfig(vision_config=vision, text_config=text)
    model = DeepseekVLModel._from_config(wrapped, attn_implementation="sdpa")
    model.language_model = nn.Identity()
    return model


def janus_reference(config: Config) -> nn.Module:
    """Build the tower and the aligner of transformers' JanusModel."""
    wrapped = configuration_janus.JanusVisionConfig(**vision_of(config))
    tower = modeling_janus.JanusVisionModel._from_config(wrapped, attn_implementation="sdpa")
    aligner = modeling_janus.JanusVisionAlignerMLP(wrapped)
    return nn.ModuleDict({"tower": tower, "aligner": aligner})


def hybrid_reference(config: Config) -> nn.Module:
    """Build transformers' DeepseekVLHybridModel with a stub for its language model."""
    params = config["vision_config"]["params"]
    width = config["aligner_config"]["params"]["n_embed"]
    wrapped = DeepseekVLHybridConfig(
        vision_config=_siglip(params["low_res_cfg"]),
        high_res_vision_config=_sam(params["high_res_cfg"]),
        text_config={"model_type": "llama", "hidden_size": width, **_STUB},
    )
    model = DeepseekVLHybridModel._from_config(wrapped, attn_implementation="sdpa")
    model.language_model = nn.Identity()
    return model


def hybrid_low_reference(config: Config) -> nn.Module:
    """Build the part of the hybrid for its path "image", which alone takes views of any size."""
    model: Any = hybrid_reference(config)
    low = {"vision_model": model.vision_model, "vision_proj": model.aligner.vision_proj}
    return nn.ModuleDict(low)


def ocr_reference(config: Config) -> nn.Module:
    """Build transformers' UnlimitedOcrModel, which is DeepSeek-OCR's encoder before another model.

    Its language model is a stub. The import stands here because older versions of
    transformers lack the model, and the other references run with them.
    """
    skip_without(*UNLIMITED_OCR)
    from transformers.models.unlimited_ocr.configuration_unlimited_ocr import UnlimitedOcrConfig
    from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrModel

    towers = config["vision_config"]["width"]
    sam, clip = towers["sam_vit_b"], towers["clip-l-14-224"]
    wrapped = UnlimitedOcrConfig(
        vision_config={
            "sam_config": {
                **_sam({"image_size": config["vision_config"]["image_size"], **sam}),
                "downsample_channels": sam["downsample_channels"],
            },
            "encoder_config": {
                "hidden_size": clip["width"],
                "intermediate_size": clip.get("intermediate_size", 4 * clip["width"]),
                "num_hidden_layers": clip["layers"],
                "num_attention_heads": clip["heads"],
            },
        },
        text_config={"hidden_size": config["projector_config"]["n_embed"], **_STUB},
    )
    model = UnlimitedOcrModel._from_config(wrapped, attn_implementation="sdpa")
    model.language_model = nn.Identity()
    return model


def ocr2_reference(config: Config) -> nn.Module:
    """Build transformers' tower of DeepSeek-OCR-2, with its projector and separator beside it.

    Its queries have a fixed number of rows, so that those of smaller views take their place.
    """
    skip_without(*DEEPSEEK_OCR2)
    from transformers.models.deepseek_ocr2 import configuration_deepseek_ocr2 as configs
    from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2VisionModel

    vision = config["vision_config"]
    sam, stack = vision["width"]["sam_vit_b"], vision["width"]["qwen2-0-5b"]
    wrapped = configs.DeepseekOcr2VisionConfig(
        sam_config={
            **_sam({"image_size": vision["image_size"], **sam}),
            "downsample_channels": sam["downsample_channels"],
        },
        encoder_config={
            "hidden_size": stack["dim"],
            "intermediate_size": stack.get("intermediate_size", 4864),
            "num_hidden_layers": stack.get("layers", 24),
            "num_attention_heads": stack.get("heads", 14),
            "num_key_value_heads": stack.get("num_key_value_heads", 2),
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
    )
    model = DeepseekOcr2VisionModel._from_config(wrapped, attn_implementation="sdpa")
    for name, side in ocr2_sides(vision["image_size"]).items():
        setattr(model, f"query_{name}_resolution", nn.Embedding((side // 64) ** 2, stack["dim"]))
    width = config["projector_config"]["n_embed"]
    whole = nn.ModuleDict({"tower": model, "projector": nn.Linear(stack["dim"], width)})
    whole.register_parameter("separator", nn.Parameter(torch.zeros(width)))
    return whole


def ocr2_sides(image_size: int) -> dict[str, int]:
    """Return the sides of views in pixels, by the published ones that name the queries."""
    return {"768": image_size * 3 // 4, "1024": image_size}


_SIGLIP_NAMES = [
    (r"vision\.pos_embed$", "vision.embeddings.position_embedding.weight"),
    (r"vision\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"vision\.blocks\.", "vision.encoder.layers."),
    (r"vision\.norm\.", "vision.post_layernorm."),
    (r"\.norm(\d)\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.out_proj."),
    (r"\.attn\.", ".self_attn."),
]
_NECK_NAMES = [
    (r"\.0\.weight$", ".conv1.weight"),
    (r"\.1\.(weight|bias)$", r".layer_norm1.\1"),
    (r"\.2\.weight$", ".conv2.weight"),
    (r"\.3\.(weight|bias)$", r".layer_norm2.\1"),
]
_SAM_NAMES = [
    (r"patch_embed\.proj\.", "patch_embed.projection."),
    (r"blocks\.", "layers."),
    (r"\.norm(\d)\.", r".layer_norm\1."),
    (r"\.mlp\.fc(\d)\.", r".mlp.lin\1."),
]


def _part(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}


def _under(prefix: str, state: State) -> State:
    return {f"{prefix}{key}": x for key, x in state.items()}


def _siglip_keys(state: State) -> State:
    split = renamed(split_qkv(state, ("q_proj", "k_proj", "v_proj")), _SIGLIP_NAMES)
    return {
        key.replace("vision.", "vision_model.", 1): x[0] if "position_embedding" in key else x
        for key, x in split.items()
    }


def _sam_keys(state: State) -> State:
    neck = {key: x for key, x in state.items() if key.startswith("neck.")}
    rest = {key: x for key, x in state.items() if key not in neck}
    return renamed(rest, _SAM_NAMES) | renamed(neck, _NECK_NAMES)


def vl_keys(state: State) -> State:
    """Map to transformers' DeepseekVLModel."""
    names = [
        (r"^aligner\.layers\.0\.", "aligner.linear1."),
        (r"^aligner\.layers\.2\.", "aligner.linear2."),
    ]
    return renamed(_siglip_keys(state), names)


def janus_keys(state: State) -> State:
    """Map to the tower and the aligner of transformers' JanusModel."""
    names = [
        (r"^vision_model\.", "tower."),
        (r"\.out_proj\.", ".projection_layer."),
        (r"^aligner\.layers\.0\.", "aligner.fc1."),
        (r"^aligner\.layers\.2\.", "aligner.hidden_layers.0."),
    ]
    return renamed(_siglip_keys(state), names)


def hybrid_low_keys(state: State) -> State:
    """Map the path "image" to the part of the hybrid for it."""
    return renamed(_siglip_keys(state), [(r"^aligner\.", "vision_proj.")])


def hybrid_keys(state: State) -> State:
    """Map to transformers' DeepseekVLHybridModel."""
    high = _part(state, "high.")
    return {
        **_siglip_keys(_under("vision.", _part(state, "low.vision."))),
        **_under("high_res_vision_model.vision_encoder.", _sam_keys(_part(high, "sam."))),
        **renamed(_under("high_res_vision_neck.", _part(high, "neck_hd.")), _NECK_NAMES),
        "high_res_vision_proj.conv1.weight": high["downsamples.0.weight"],
        "high_res_vision_proj.conv2.weight": high["downsamples.1.weight"],
        "high_res_vision_alpha": high["hd_alpha_downsamples"],
        **_under("aligner.vision_proj.", _part(state, "low.aligner.")),
        **_under("aligner.high_res_vision_proj.", _part(high, "aligner.")),
        **_under("aligner.proj.", _part(state, "aligner.")),
    }


def ocr_keys(state: State) -> State:
    """Map to transformers' UnlimitedOcrModel."""
    sam, clip = _part(state, "sam_model."), _part(state, "vision_model.")
    nothing = torch.zeros_like(state["projector.layers.bias"])  # one path has no learned tokens
    nets = {"net_2.weight": "proj.conv1.weight", "net_3.weight": "proj.conv2.weight"}
    clip = renamed(
        split_qkv(clip, ("q_proj", "k_proj", "v_proj")),
        [
            (r"position_embedding$", "position_embedding.weight"),
            (r"^blocks\.", "encoder.layers."),
            (r"\.norm(\d)\.", r".layer_norm\1."),
            (r"\.attn\.proj\.", ".self_attn.out_proj."),
            (r"\.attn\.", ".self_attn."),
        ],
    )
    body = {key: x for key, x in sam.items() if key not in nets}
    return {
        **_under("vision_tower.sam_encoder.", _sam_keys(body)),
        **{f"vision_tower.sam_encoder.{nets[key]}": sam[key] for key in nets},
        **_under("vision_tower.vision_encoder.", clip),
        "multi_modal_projector.weight": state["projector.layers.weight"],
        "multi_modal_projector.bias": state["projector.layers.bias"],
        "image_newline": state.get("image_newline", nothing),
        "view_separator": state.get("view_seperator", nothing),
    }


def ocr2_keys(state: State) -> State:
    """Map to transformers' DeepseekOcr2VisionModel, and the layers beside it."""
    sam = _part(state, "sam_model.")
    nets = {"net_2.weight": "proj.conv1.weight", "net_3.weight": "proj.conv2.weight"}
    blocks = renamed(
        _under("layers.", _part(state, "blocks.")),
        [
            (r"\.norm1\.", ".input_layernorm."),
            (r"\.norm2\.", ".post_attention_layernorm."),
            (r"\.attn\.", ".self_attn."),
        ],
    )
    return {
        **_under("tower.sam_encoder.", _sam_keys({k: x for k, x in sam.items() if k not in nets})),
        **{f"tower.sam_encoder.{nets[key]}": sam[key] for key in nets},
        **_under("tower.vision_encoder.", blocks),
        "tower.vision_encoder.norm.weight": state["norm.weight"],
        "tower.query_768_resolution.weight": state["query_768.weight"],
        "tower.query_1024_resolution.weight": state["query_1024.weight"],
        **_under("projector.", _part(state, "projector.layers.")),
        "separator": state["view_seperator"],
    }


def vl_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' DeepSeek-VL on views."""
    out = reference.get_image_features(pixels, interpolate_pos_encoding=True)
    return EncoderOutput(out.last_hidden_state, out.pooler_output.flatten(0, 1), ())


def janus_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run the tower and the aligner of transformers' Janus on views."""
    hidden = reference["tower"](pixels, interpolate_pos_encoding=True).last_hidden_state
    return EncoderOutput(hidden, reference["aligner"](hidden).flatten(0, 1), ())


def hybrid_low_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run SigLIP and its projection of transformers' hybrid on views."""
    out = reference["vision_model"](pixels, interpolate_pos_encoding=True)
    hidden = out.last_hidden_state
    return EncoderOutput(hidden, reference["vision_proj"](hidden).flatten(0, 1), ())


def ocr_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower and projector on views of one size."""
    hidden = reference.vision_tower(pixels).last_hidden_state
    return EncoderOutput(hidden, reference.multi_modal_projector(hidden).flatten(0, 1), ())


def ocr2_output(reference: Any, pixels: Tensor, grid_thw: Tensor) -> EncoderOutput:
    """Run transformers' tower without its last norm, then norm and projector, on views of one size.

    transformers takes the queries for 768 pixels if there are up to 144 cells of a view.
    """
    tower = reference["tower"]
    cells = -(-pixels.shape[2] // 64) * -(-pixels.shape[3] // 64)
    small, norm = tower.query_768_resolution, tower.vision_encoder.norm
    large = tower.query_1024_resolution
    tower.query_768_resolution = large if cells == len(large.weight) else small
    tower.vision_encoder.norm = nn.Identity()
    try:
        hidden = tower(pixels).last_hidden_state
    finally:
        tower.query_768_resolution, tower.vision_encoder.norm = small, norm
    return EncoderOutput(hidden, reference["projector"](norm(hidden)).flatten(0, 1), ())


ROWS = [
    make_row(
        "deepseek_vl", "deepseek-ai/deepseek-vl-1.3b-chat", vl_reference, vl_keys, vl_output,
        shallow=siglip(layers=1),
        narrow={**siglip(width=64, heads=4, intermediate_size=112), "llm_width": 48},
        tiny={
            **siglip(width=64, heads=4, intermediate_size=112, layers=3, image_size=128),
            "llm_width": 48,
        },
        variant=True,
        eager=True,
        six=siglip(layers=6),
    ),
    make_row(
        "janus", "deepseek-community/Janus-Pro-1B", janus_reference, janus_keys, janus_output,
        shallow={"num_hidden_layers": 1},
        narrow={"hidden_size": 64, "num_attention_heads": 4, "projection_dim": 48},
        tiny={
            "hidden_size": 64, "num_attention_heads": 4, "mlp_ratio": 1.75, "projection_dim": 48,
            "num_hidden_layers": 3, "image_size": 128,
        },
        variant=True,
        eager=True,
    ),
    make_row(
        "deepseek_vl_hybrid", "deepseek-ai/deepseek-vl-7b-chat", hybrid_low_reference,
        hybrid_low_keys, hybrid_low_output,
        shallow=hybrid(low={"layers": 1}, high={"layers": 1, "global_attn_indexes": [0]}),
        narrow={**hybrid(low=NARROW, high=SAM_NARROW), "llm_width": 48},
        tiny={
            **hybrid(low={**NARROW, "layers": 3, "image_size": 128}, high=SAM_TINY),
            "llm_width": 48,
        },
        variant=True,
        tower=LowResolution,
        slow=True,
        eager=True,
        six=hybrid(low={"layers": 6}, high={"layers": 1, "global_attn_indexes": [0]}),
    ),
    make_row(
        "deepseek_ocr", "deepseek-ai/DeepSeek-OCR", ocr_reference, ocr_keys, ocr_output,
        shallow=ocr(clip={"layers": 1}, sam={"layers": 2, "global_attn_indexes": [1]}),
        narrow={**ocr(clip=NARROW, sam={**SAM_NARROW, "downsample_channels": [40, 64]}),
                "llm_width": 48},
        tiny={
            **ocr(clip={**NARROW, "layers": 3}, sam={**SAM_TINY, "downsample_channels": [40, 64]}),
            "image_size": 128, "llm_width": 48,
        },
        variant=True,
        tower=DeepseekOCRTower,
        side=128,
        eager=True,
        six=ocr(clip={"layers": 6}, sam={"layers": 6, "global_attn_indexes": [2, 5]}),
    ),
    make_row(
        "deepseek_ocr2", "deepseek-ai/DeepSeek-OCR-2", ocr2_reference, ocr2_keys, ocr2_output,
        shallow={
            **ocr2(stack={"layers": 1}, sam={"layers": 2, "global_attn_indexes": [1]}),
            "image_size": 256,
        },
        narrow={
            **ocr2(stack=STACK_NARROW, sam={**SAM_NARROW, "downsample_channels": [40, 64]}),
            "image_size": 256, "llm_width": 48,
        },
        tiny={
            **ocr2(
                stack={**STACK_NARROW, "layers": 3},
                sam={**SAM_TINY, "image_size": 256, "downsample_channels": [40, 64]},
            ),
            "image_size": 256, "llm_width": 48,
        },
        variant=True,
        tower=DeepseekOCR2Tower,
    ),
]  # fmt: skip
