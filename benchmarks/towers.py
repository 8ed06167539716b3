"""The vision towers, of real size with random weights, and the workloads of GPU benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.measuring.torch_flash import attend_by_torch
from encoders import Encoder
from encoders.base.vision_encoder import VisionEncoder
from tests.oracles import BY_NAME, Grids
from weights.published import PUBLISHED

SIZES_MIX8 = (
    (224, 224),
    (640, 480),
    (480, 640),
    (1280, 720),
    (1024, 1024),
    (336, 336),
    (512, 896),
    (768, 768),
)


@dataclass(frozen=True)
class Tower:
    """A published vision tower: its name, and its entry in the tables of ``tests/oracles``."""

    name: str
    family: str
    repo_id: str

    def build(self, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> VisionEncoder:
        """Build this library's encoder like :meth:`build_encoder`, for towers with one input path.

        An input path takes one kind of view of an image, such as "image" or "tiles".
        """
        encoder = self.build_encoder(dtype, device)
        assert isinstance(encoder, VisionEncoder)
        return encoder

    def build_encoder(self, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Encoder:
        """Build this library's encoder in its real size with random weights, on a device."""
        family = BY_NAME[self.family]
        torch.manual_seed(0)
        with torch.device(device):
            encoder = family.encoder_class(family.config_class.from_hf(self.config))
        return encoder.to(dtype).eval().requires_grad_(False)

    def reference(self, encoder: Encoder, attention: str = "sdpa") -> nn.Module:
        """Build transformers' tower with the weights and dtype of ``encoder``.

        Args:
            encoder: this library's encoder.
            attention: transformers' name of an attention implementation, or "flash2" for the
                flash-attention 2 kernels that torch contains.
        """
        family = BY_NAME[self.family]
        dtype = next(encoder.parameters()).dtype
        with torch.device("cuda"):
            reference = family.reference(dict(self.config)).to(dtype)
        reference.load_state_dict(family.keys(encoder.state_dict()), strict=True)
        if attention != "sdpa":
            assert isinstance(reference, PreTrainedModel)
            if attention == "flash2":
                attend_by_torch(reference)
            else:
                reference.set_attn_implementation(attention)
        return reference.eval().requires_grad_(False)

    @property
    def config(self) -> Mapping[str, Any]:
        """The vision config of the tower's Hugging Face repo."""
        return next(model.config for model in PUBLISHED if model.repo_id == self.repo_id)

    @property
    def patch(self) -> int:
        """The side of a patch in pixels."""
        return 16 if self.family.startswith("qwen3") else 14

    @property
    def workloads(self) -> dict[str, Grids]:
        """The patch grids of the images of each workload, by its name: square images, alone and in
        batches, and eight images of mixed sizes.
        """
        if self.family.startswith("intern"):
            return {f"{n} tile{'s' * (n > 1)}": [[n, 32, 32]] for n in (1, 4, 13, 64)}
        mixed = [self.grid(*size) for size in SIZES_MIX8]
        square = {side: self.grid(side, side) for side in (224, 448, 1024)}
        return {
            "1x224": [square[224]],
            "1x448": [square[448]],
            "1x1024": [square[1024]],
            "8x448": [square[448]] * 8,
            "32x448": [square[448]] * 32,
            "mix8": mixed,
        }

    def grid(self, width: int, height: int) -> list[int]:
        """Return the patch grid (t, h, w) of an image whose sides are rounded to whole tokens."""
        side = 2 * self.patch
        return [1, round(height / side) * 2, round(width / side) * 2]


TOWERS = {
    tower.name: tower
    for tower in (
        Tower("Qwen3-VL-8B", "qwen3_vl", "Qwen/Qwen3-VL-8B-Instruct"),
        Tower("Qwen2.5-VL-7B", "qwen2_5_vl", "Qwen/Qwen2.5-VL-7B-Instruct"),
        Tower("Qwen2-VL-7B", "qwen2_vl", "Qwen/Qwen2-VL-7B-Instruct"),
        Tower("InternViT-300M", "intern_vit_300m", "OpenGVLab/InternVL3-1B"),
        Tower("Qwen3-VL-2B", "qwen3_vl", "Qwen/Qwen3-VL-2B-Instruct"),
        Tower("Qwen2.5-VL-72B", "qwen2_5_vl", "Qwen/Qwen2.5-VL-72B-Instruct"),
        Tower("Qwen3.5-0.8B", "qwen3_5", "Qwen/Qwen3.5-0.8B"),
        Tower("GLM-4.1V-9B", "glm4v", "zai-org/GLM-4.1V-9B-Thinking"),
        Tower("GLM-OCR", "glm_ocr", "zai-org/GLM-OCR"),
        Tower("InternViT-6B", "intern_vit_6b", "OpenGVLab/InternVL3-38B"),
    )
}
