"""The models of transformers whose vision tower an encoder can replace, and how each calls it.

The towers of Qwen and GLM include the merger, which projects to the language model's width. Other
models have a projector beside the tower, and an encoder replaces both.

Source: ``models/*/modeling_*.py`` of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from encoders import (
    ClipEncoder,
    Cosmos3EdgeEncoder,
    DeepseekOCR2Encoder,
    DeepseekV4Encoder,
    DeepseekVLEncoder,
    DeepseekVLHybridEncoder,
    Encoder,
    Ernie4_5VLEncoder,
    Gemma3Encoder,
    Gemma4Encoder,
    Glm4VEncoder,
    GlmOCREncoder,
    GraniteDoclingEncoder,
    HunyuanVLEncoder,
    Idefics3Encoder,
    InternViT,
    Lfm2VLEncoder,
    Llama4Encoder,
    LlavaEncoder,
    LlavaNextEncoder,
    LlavaOnevisionEncoder,
    MiniCPMVEncoder,
    MiniMaxM3Encoder,
    Molmo2Encoder,
    MoonViTEncoder,
    MuseGlimmerEncoder,
    PaddleOCRVLEncoder,
    PaliGemmaEncoder,
    PixtralEncoder,
    Qwen2_5VLEncoder,
    Qwen2VLEncoder,
    Qwen3VLEncoder,
    Sam3Encoder,
    Siglip2Encoder,
    SiglipEncoder,
    Step3VLEncoder,
    VisionEncoder,
)

from ..vllm_plugin.inputs import BatchInputs
from .calls import (
    Encode,
    run_flat,
    run_images,
    run_padded,
    run_patches,
    run_positions,
    run_shuffled_tiles,
    run_tiles,
    run_unpadded_tiles,
)


class TowerAttributes(NamedTuple):
    """The names of the attributes of a model that hold its tower and its projector.

    ``projector`` is empty if the tower includes the projection.
    """

    tower: str
    projector: str = ""


class Call(NamedTuple):
    """The models of transformers that have the same tower, and how they call it."""

    models: Mapping[str, TowerAttributes]
    """Model type in a config -> the attributes in which the model holds its tower."""
    run: Callable[[Encode, VisionEncoder, BatchInputs], Tensor] | None = None
    """A function that encodes the keywords with which a model calls its tower, and returns what the
    model expects back; None for Qwen and GLM, which expect an object with several fields."""


_VISION, _PROJECTOR = "vision_tower", "multi_modal_projector"
_BESIDE, _VISUAL = TowerAttributes(_VISION, _PROJECTOR), TowerAttributes("visual")
_IDEFICS = TowerAttributes("vision_model", "connector")

CALLS: Mapping[type[Encoder], Call] = {
    Qwen2VLEncoder: Call({"qwen2_vl": _VISUAL}),
    Qwen2_5VLEncoder: Call({"qwen2_5_vl": _VISUAL, "exaone4_5": _VISUAL}),
    Qwen3VLEncoder: Call(
        dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _VISUAL)
    ),
    Glm4VEncoder: Call({"glm4v": _VISUAL, "glm4v_moe": _VISUAL}),
    GlmOCREncoder: Call({"glm_ocr": _VISUAL, "glm5_next": _VISUAL}),
    PixtralEncoder: Call(
        {
            "mistral3": _BESIDE,
            "llava": _BESIDE,
            "lighton_ocr": TowerAttributes("vision_encoder", "vision_projection"),
        },
        run_images,
    ),
    Gemma3Encoder: Call({"gemma3": _BESIDE}, run_tiles),
    PaliGemmaEncoder: Call({"paligemma": _BESIDE}, run_tiles),
    SiglipEncoder: Call({"siglip": TowerAttributes("vision_model")}, run_tiles),
    Gemma4Encoder: Call({"gemma4": TowerAttributes(_VISION, "embed_vision")}, run_positions),
    DeepseekVLEncoder: Call({"deepseek_vl": TowerAttributes("vision_model", "aligner")}, run_tiles),
    Idefics3Encoder: Call({"idefics3": _IDEFICS, "smolvlm": _IDEFICS}, run_unpadded_tiles),
    MoonViTEncoder: Call({"kimi_k25": TowerAttributes(_VISION, "mm_projector")}, run_flat),
    PaddleOCRVLEncoder: Call({"paddleocr_vl": TowerAttributes("visual", "projector")}, run_flat),
    Lfm2VLEncoder: Call({"lfm2_vl": _BESIDE}, run_padded),
    Llama4Encoder: Call({"llama4": TowerAttributes("vision_model", _PROJECTOR)}, run_tiles),
    InternViT: Call({"internvl": _BESIDE}, run_shuffled_tiles),
    MiniMaxM3Encoder: Call({"minimax_m3_vl": _BESIDE}, run_patches),
    HunyuanVLEncoder: Call({"hunyuan_vl": TowerAttributes(_VISION)}, run_patches),
    Ernie4_5VLEncoder: Call(
        {"ernie4_5_vl_moe": TowerAttributes(_VISION, "resampler_model")}, run_flat
    ),
    Cosmos3EdgeEncoder: Call({"cosmos3_edge": TowerAttributes("visual", "projector")}, run_flat),
}
"""Class of an encoder that can replace a tower of transformers -> how models call that tower."""

NO_MODEL = "transformers has no model of images and text with this tower"
REFUSED: Mapping[type[Encoder], str] = {
    ClipEncoder: "its model in transformers projects the class token, not the tokens",
    MuseGlimmerEncoder: "its model in transformers normalises the tokens of its projector",
    MiniCPMVEncoder: "its model in transformers divides the tokens by view in its projector",
    Sam3Encoder: "its model in transformers reads all levels of the neck",
    GraniteDoclingEncoder: "the router of its model in transformers reads the rows of its tower",
    LlavaEncoder: "its model in transformers reads an inner layer of its tower",
    LlavaNextEncoder: "its model in transformers joins the tokens of the views itself",
    LlavaOnevisionEncoder: "its model in transformers joins the tokens of the views itself",
    Molmo2Encoder: "its model in transformers pools the tokens of the views itself",
    Siglip2Encoder: "the head of its model in transformers reads padded tokens",
    DeepseekVLHybridEncoder: "its projector in transformers takes what two towers return",
    DeepseekOCR2Encoder: "its model in transformers calls its tower once per kind of view",
    DeepseekV4Encoder: "its model in transformers has no vision tower",
    Step3VLEncoder: "its model in transformers calls its tower once per kind of view",
}
"""Class of an encoder that can replace no tower of transformers for a special reason -> the reason,
for the error. For other encoders outside :data:`CALLS` it is :data:`NO_MODEL`."""
