"""The Qwen2.5-VL model class of vLLM, with a vision tower of this library."""

from __future__ import annotations

from vllm.model_executor.models import qwen2_5_vl

from ..replacing import ReplacesTower


class Qwen2_5_VLForConditionalGeneration(
    ReplacesTower, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
):
    """The Qwen2.5-VL model class of vLLM, with its vision tower replaced."""

    family = "qwen2_5_vl"
