"""The classes of transformers that read the folder of a tower alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from vitgraph.seeded import SEEDED

from .checkpoints import first_of_each

TRANSFORMERS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen2_5_omni": ("qwen2_5_omni", "Qwen2_5OmniVisionEncoder"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVisionModel"),
    "cosmos3": ("qwen3_vl", "Qwen3VLVisionModel"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeVisionModel"),
    "qwen3_omni": ("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder"),
    "qwen3_5": ("qwen3_5", "Qwen3_5VisionModel"),
    "qwen4_exp": ("qwen4_exp", "Qwen4ExpVisionModel"),
    "qwen_drive": ("qwen3_5", "Qwen3_5VisionModel"),
    "cohere_compass": ("cohere_compass", "CohereCompassVisionModel"),
    "exaone4_5": ("exaone4_5", "Exaone4_5_VisionModel"),
    "glm4v": ("glm4v", "Glm4vVisionModel"),
    "glm4v_moe": ("glm4v_moe", "Glm4vMoeVisionModel"),
    "glm_ocr": ("glm_ocr", "GlmOcrVisionModel"),
    "glm5_next": ("glm5_next", "Glm5NextVisionModel"),
    "intern_vit_hf": ("internvl", "InternVLVisionModel"),
    "deepseek_vl_hf": ("siglip", "SiglipVisionModel"),
    "paddleocr_vl": ("paddleocr_vl", "PaddleOCRVisionModel"),
    "idefics3": ("idefics3", "Idefics3VisionTransformer"),
    "smolvlm": ("smolvlm", "SmolVLMVisionTransformer"),
    "clip": ("clip", "CLIPVisionModel"),
    "metaclip_2": ("metaclip_2", "MetaClip2VisionModel"),
    "llava": ("clip", "CLIPVisionModel"),
    "siglip": ("siglip", "SiglipVisionModel"),
    "siglip2": ("siglip2", "Siglip2VisionModel"),
    "dinov2": ("dinov2", "Dinov2Model"),
    "dinov2_registers": ("dinov2_with_registers", "Dinov2WithRegistersModel"),
    "dinov2_giant": ("dinov2", "Dinov2Model"),
    "dinov3": ("dinov3_vit", "DINOv3ViTModel"),
    "dinov3_plus": ("dinov3_vit", "DINOv3ViTModel"),
    "sam3": ("sam3", "Sam3VisionModel"),
    "c_radio": ("radio", "RadioModel"),
    "c_radio_hf": ("radio", "RadioModel"),
    "lfm2_vl": ("siglip2", "Siglip2VisionModel"),
    "lfm2_5_vl": ("siglip2", "Siglip2VisionModel"),
    "gemma3": ("siglip", "SiglipVisionModel"),
    "pixtral": ("pixtral", "PixtralVisionModel"),
    "ministral3": ("pixtral", "PixtralVisionModel"),
    "lighton_ocr": ("pixtral", "PixtralVisionModel"),
    "gemma4": ("gemma4", "Gemma4VisionModel"),
    "gemma4_e2b": ("gemma4", "Gemma4VisionModel"),
    "kimi_k25_hf": ("kimi_k25", "Kimi_K25VisionModel"),
    "llama4": ("llama4", "Llama4VisionModel"),
    "ernie4_5_vl": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionTransformerPretrainedModel"),
    "ernie4_5_vl_hf": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionTransformerPretrainedModel"),
    "step3_vl": ("step3p7", "Step3p7VisionModel"),
    "step3_vl_hf": ("step3p7", "Step3p7VisionModel"),
}
"""Recipe -> the module and class of transformers that is its tower alone."""


TRANSFORMERS_TOWERS = first_of_each(TRANSFORMERS, lambda name: SEEDED[name].family.name)
"""One per family runs in a plain pytest."""


DINO = {"dinov2", "dinov2_registers", "dinov2_giant", "dinov3", "dinov3_plus"}
RENAMED = {"step3_vl", "step3_vl_hf", "c_radio", "c_radio_hf", *DINO}
"""Recipes whose tensors transformers renames, or permutes, while it reads them."""


_OF_CONFIG = {"input_conditioner.norm_mean", "input_conditioner.norm_std", "summary_idxs"}
FILLED = {"c_radio": _OF_CONFIG, "c_radio_hf": _OF_CONFIG}
"""Recipe -> buffers that the class of transformers fills from the config, and that the folder of a
tower lacks. The class saves them, and scales of 1, in a folder that it writes."""
RESAVED = first_of_each(
    {name: found for name, found in TRANSFORMERS.items() if name not in FILLED},
    lambda name: SEEDED[name].family.name,
)
"""The recipes whose towers have the same tensors after transformers read and saved them."""


def misread(info: Mapping[str, Iterable[object]], recipe: str) -> set[object]:
    """Return what ``output_loading_info`` of transformers lists, but what the class fills."""
    return {found for listed in info.values() for found in listed} - FILLED.get(recipe, set())


AUTO = {
    *("qwen2_5_vl", "exaone4_5", "qwen3_vl", "cosmos3", "qwen3_vl_moe", "qwen3_5", "qwen4_exp"),
    *("qwen_drive", "cohere_compass", "intern_vit_hf", "deepseek_vl_hf"),
    *("glm4v", "glm4v_moe", "glm_ocr", "glm5_next"),
    *("clip", "llava"),
    *("siglip", "siglip2", "lfm2_vl", "lfm2_5_vl", "gemma3", "idefics3", "smolvlm"),
    *("pixtral", "ministral3", "lighton_ocr", "gemma4", "gemma4_e2b"),
    *("kimi_k25_hf", "sam3", "c_radio", "c_radio_hf", *DINO),
}
"""Recipes whose towers ``AutoModel`` of transformers builds."""


def stored_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a tower's folder."""
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def transformers_class(family: str) -> Any:
    module, name = TRANSFORMERS[family]
    found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return vars(found)[name]
