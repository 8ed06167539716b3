"""The Qwen3-VL-MoE model class of vLLM, with a vision tower of this library."""

from __future__ import annotations

from vllm.model_executor.models import qwen3_vl_moe

from ..replacing import ReplacesTower


class Qwen3VLMoeForConditionalGeneration(
    ReplacesTower, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration
):
    """The Qwen3-VL-MoE model class of vLLM, with its vision tower replaced."""

    family = "qwen3_vl"
