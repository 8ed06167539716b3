"""The InternVL model class of vLLM, with a vision tower and projector of this library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.model_executor.models import internvl
from vllm.model_executor.models.vision import run_dp_sharded_vision_model

from ..replacing import ReplacesTower


class InternVLChatModel(ReplacesTower, internvl.InternVLChatModel):
    """The InternVL model class of vLLM, with its tower and projector replaced."""

    family = "intern_vit"
    at = "vision_model"

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.vision_tower_ours:
            del self.mlp1  # our tower has a projector of its own

    def extract_feature(self, pixel_values: Tensor) -> Tensor:
        """Encode tiles [B, 3, side, side] to [B, tokens per tile, width of the language model]."""
        if not self.vision_tower_ours:
            return super().extract_feature(pixel_values)
        if self.use_data_parallel:
            return run_dp_sharded_vision_model(pixel_values, self.our_tower)
        return self.our_tower(pixel_values)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights of the whole model; those of the projector go into our tower."""
        if self.vision_tower_ours:
            weights = (
                (f"vision_model.{name}" if name.startswith("mlp1.") else name, tensor)
                for name, tensor in weights
            )
        return super().load_weights(weights)
