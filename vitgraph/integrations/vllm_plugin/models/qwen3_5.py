"""The Qwen3.5 model classes of vLLM, with a vision tower of this library."""

from __future__ import annotations

from vllm.model_executor.models import qwen3_5

from ..replacing import ReplacesTower


class Qwen3_5ForConditionalGeneration(ReplacesTower, qwen3_5.Qwen3_5ForConditionalGeneration):
    """The Qwen3.5 model class of vLLM, with its vision tower replaced."""

    family = "qwen3_vl"


class Qwen3_5MoeForConditionalGeneration(ReplacesTower, qwen3_5.Qwen3_5MoeForConditionalGeneration):
    """The Qwen3.5-MoE model class of vLLM, with its vision tower replaced."""

    family = "qwen3_vl"
