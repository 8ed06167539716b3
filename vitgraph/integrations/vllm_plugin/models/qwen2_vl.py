"""The Qwen2-VL model class of vLLM, with a vision tower of this library."""

from __future__ import annotations

from vllm.model_executor.models import qwen2_vl

from ..replacing import ReplacesTower


class Qwen2VLForConditionalGeneration(ReplacesTower, qwen2_vl.Qwen2VLForConditionalGeneration):
    """The Qwen2-VL model class of vLLM, with its vision tower replaced."""

    family = "qwen2_vl"
