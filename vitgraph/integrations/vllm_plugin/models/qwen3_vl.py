"""The Qwen3-VL model class of vLLM, with a vision tower of this library."""

from __future__ import annotations

from vllm.model_executor.models import qwen3_vl

from ..replacing import ReplacesTower


class Qwen3VLForConditionalGeneration(ReplacesTower, qwen3_vl.Qwen3VLForConditionalGeneration):
    """The Qwen3-VL model class of vLLM, with its vision tower replaced."""

    family = "qwen3_vl"
