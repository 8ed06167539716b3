"""The model classes of vLLM whose vision tower this plug-in replaces, and how they use the tower.

Source: ``model_executor/models`` of vLLM 0.26.0, 0.32.0 and 0.33.0, and ``models`` of 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Record(NamedTuple):
    """A model class of vLLM, and the tower of this library that replaces its tower."""

    module: str
    """The module that defines the class: a name below ``vllm.model_executor.models``, or a full
    name that begins with ``vllm.``."""
    family: str
    """The name of the tower's family in :data:`weights.FAMILIES`."""
    tower: str = "visual"
    """The attribute of the model class that holds the tower."""
    projectors: tuple[str, ...] = ()
    """The attributes of the model class that hold projectors outside the tower.

    All are replaced, because an encoder of this library contains its projector.
    """
    reader: str = ""
    """The key in ``READERS`` of the function that reads a batch; empty if vLLM itself calls the
    tower."""
    name: str = ""
    """The name of the class, if it differs from the architecture in ``config.json``; else empty."""
    published_names: bool = False
    """Whether the encoder is filled with tensors by their names in the checkpoint, because vLLM's
    class renames tensors while it loads them."""
    block_norm_eps: float | None = None
    """The epsilon of the two norms of every block, if vLLM uses another one than the tower's config
    states; else None."""
    parameters: tuple[str, ...] = ()
    """The parameters of the model class itself that an encoder contains, too, under the same names;
    the encoder's take their place."""
    takes: str = "patches"
    """The key in ``TOWERS`` of the form in which vLLM itself calls the tower."""

    @property
    def path(self) -> str:
        """The full name of the module that defines the class."""
        is_full_name = self.module.startswith("vllm.")
        return self.module if is_full_name else f"vllm.model_executor.models.{self.module}"

    @property
    def sends_images(self) -> bool:
        """Whether vLLM's processor may send images as uint8, which the engine's process cuts."""
        if self.takes != "patches":
            return self.module == "internvl"
        if self.family == "nemotron":
            return False  # vLLM has a processor of its own for it
        return self.reader in ("", "images", "patches", "positions")


_VISION, _PROJECTOR = "vision_tower", ("multi_modal_projector",)
_PALIGEMMA = Record("paligemma", "paligemma", _VISION, _PROJECTOR, takes="tiles")
_COLQWEN3 = Record("colqwen3", "qwen3_vl", name="ColQwen3Model")
_IDEFICS3 = ("idefics3", "model.vision_model", ("model.connector",), "tiles")
_PIXTRAL = ("pixtral", _VISION, _PROJECTOR, "images")
_DEEPSEEK_V4 = ("deepseek_v4", "vision", ("aligner",), "ragged")
_DELIMITERS = ("image_start", "image_newline", "image_end")
_MINICPM_V = ("minicpm_v", "vpm", ("vit_merger", "merger"), "slices")
_NEMOTRON = Record(
    *("nano_nemotron_vl", "nemotron", "vision_model", ("mlp1",), "", "NemotronH_Nano_VL_V2"),
    published_names=True,
)
_STEP3_VL = ("step3_vl", "vision_model", ("vit_large_projector",), "views")

MODELS: Mapping[str, Record] = {
    "Qwen2VLForConditionalGeneration": Record("qwen2_vl", "qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": Record("qwen2_5_vl", "qwen2_5_vl"),
    "Exaone4_5_ForConditionalGeneration": Record("exaone4_5", "qwen2_5_vl"),
    "OpenCUAForConditionalGeneration": Record("opencua", "qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": Record("qwen3_vl", "qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": Record("qwen3_vl_moe", "qwen3_vl"),
    "Qwen3_5ForConditionalGeneration": Record("qwen3_5", "qwen3_vl"),
    "Qwen3_5MoeForConditionalGeneration": Record("qwen3_5", "qwen3_vl"),
    "ColQwen3": _COLQWEN3,
    "OpsColQwen3Model": _COLQWEN3,
    "Qwen3VLNemotronEmbedModel": _COLQWEN3,
    "ColQwen3_5": Record("colqwen3_5", "qwen3_vl", name="ColQwen3_5Model"),
    "InternS2PreviewForConditionalGeneration": Record("interns2_preview", "qwen3_vl"),
    "InternS2MobiusForConditionalGeneration": Record("interns2_mobius", "qwen3_vl"),
    "Qwen4ExpForConditionalGeneration": Record("vllm.models.qwen4_exp", "qwen3_vl"),
    "InternVLChatModel": Record("internvl", "intern_vit", "vision_model", ("mlp1",), takes="tiles"),
    "LlavaOnevisionForConditionalGeneration": Record(
        *("llava_onevision", "llava_onevision", _VISION, _PROJECTOR),
        takes="tiles",
        published_names=True,
        parameters=("image_newline",),
    ),
    "LlavaNextForConditionalGeneration": Record(
        *("llava_next", "llava_next", _VISION, _PROJECTOR),
        takes="tiles",
        published_names=True,
        parameters=("image_newline",),
    ),
    "PaliGemmaForConditionalGeneration": _PALIGEMMA,
    "ColPaliForRetrieval": _PALIGEMMA._replace(module="colpali", name="ColPaliModel"),
    "Molmo2ForConditionalGeneration": Record(
        "molmo2", "molmo2", "vision_backbone", takes="windows", published_names=True
    ),
    "Glm4vForConditionalGeneration": Record("glm4_1v", "glm4v"),
    "Glm4vMoeForConditionalGeneration": Record("glm4_1v", "glm4v"),
    "GlmOcrForConditionalGeneration": Record("glm_ocr", "glm_ocr"),
    "Glm5NextForConditionalGeneration": Record(
        "vllm.models.glm5next", "glm_ocr", block_norm_eps=1e-6
    ),
    "Gemma3ForConditionalGeneration": Record("gemma3_mm", "gemma3", _VISION, _PROJECTOR, "tiles"),
    "Mistral3ForConditionalGeneration": Record("mistral3", *_PIXTRAL),
    "LightOnOCRForConditionalGeneration": Record("lightonocr", *_PIXTRAL),
    "LlavaForConditionalGeneration": Record("llava", *_PIXTRAL),
    "Idefics3ForConditionalGeneration": Record("idefics3", *_IDEFICS3),
    "SmolVLMForConditionalGeneration": Record("smolvlm", *_IDEFICS3),
    "ColModernVBertForRetrieval": Record(
        *("colmodernvbert", "idefics3", "vision_model", ("connector",)),
        takes="tiles",
        published_names=True,
    ),
    "KimiVLForConditionalGeneration": Record("kimi_vl", "moonvit", _VISION, _PROJECTOR, "grids"),
    "KimiK25ForConditionalGeneration": Record(
        "kimi_k25", "moonvit", _VISION, ("mm_projector",), "chunks", published_names=True
    ),
    "KimiK3ForConditionalGeneration": Record(
        *("vllm.models.kimi_k3", "moonvit", _VISION, ("mm_projector",), "chunks"),
        published_names=True,
    ),
    "PaddleOCRVLForConditionalGeneration": Record(
        "paddleocr_vl", "paddleocr_vl", "visual", ("mlp_AR",), "patches"
    ),
    "Lfm2VlForConditionalGeneration": Record(
        "lfm2_vl", "lfm2_vl", _VISION, _PROJECTOR, "padded", "Lfm2VLForConditionalGeneration"
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Record(
        *("ernie45_vl", "ernie4_5_vl", "vision_model", ("resampler_model",), "patches"),
        published_names=True,
        block_norm_eps=1e-5,  # vLLM reads the language model's epsilon
    ),
    "Llama4ForConditionalGeneration": Record(
        "mllama4", "llama4", "vision_model", _PROJECTOR, "chunked tiles", published_names=True
    ),
    "MiniMaxM3SparseForConditionalGeneration": Record(
        *("vllm.models.minimax_m3", "minimax_m3", _VISION, (), "patches"), published_names=True
    ),
    "StepVLForConditionalGeneration": Record("step_vl", *_STEP3_VL, published_names=True),
    "Step3p7ForConditionalGeneration": Record("step3p7", *_STEP3_VL, published_names=True),
    "Step3VLForConditionalGeneration": Record(
        *("step3_vl", "step3", "vision_model"),
        ("vit_downsampler", "vit_downsampler2", "vit_large_projector"),
        "views",
        published_names=True,
    ),
    "DeepseekOCR2ForCausalLM": Record(
        *("deepseek_ocr2", "deepseek_ocr2", "sam_model", ("qwen2_model", "projector")),
        parameters=("view_seperator",),
        reader="crops",
        published_names=True,
    ),
    "DeepseekV4ForConditionalGeneration": Record(
        *("vllm.models.deepseek_v4", *_DEEPSEEK_V4),
        published_names=True,
        parameters=(*_DELIMITERS, "image_pad"),
    ),
    "DeepseekV41ForCausalLM": Record(
        *("vllm.models.deepseek_v41", *_DEEPSEEK_V4),
        published_names=True,
        parameters=_DELIMITERS,
    ),
    "DotsOCRForCausalLM": Record(
        *("dots_ocr", "dots_ocr", _VISION, (), "patches"), published_names=True
    ),
    "MiniCPMV4_6ForConditionalGeneration": Record("minicpmv4_6", *_MINICPM_V, published_names=True),
    "MiniCPMV4_7ForConditionalGeneration": Record("minicpmv4_7", *_MINICPM_V, published_names=True),
    "NemotronH_Nano_VL_V2": _NEMOTRON,
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronH_Super_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronH_Omni_Reasoning_V3": _NEMOTRON,
    "Gemma4ForConditionalGeneration": Record(
        "gemma4_mm", "gemma4", _VISION, ("embed_vision",), "positions"
    ),
}
"""Architecture in a ``config.json`` -> the model class of vLLM, and what replaces its tower."""
