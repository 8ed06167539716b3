"""Qwen3-VL-MoE of vLLM with a vision tower of this library."""

from __future__ import annotations

from vllm.model_executor.models import qwen3_vl_moe

from ..replacing import ReplacesTower


class Qwen3VLMoeForConditionalGeneration(
    ReplacesTower, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration
):
    """The model class of vLLM, its tower replaced."""

    family = "qwen3_vl"
