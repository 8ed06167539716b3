"""A toy encoder with an accelerated form, whose kernels and derived weights tests can observe."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from encoders.contract import EncoderOutput, GridLike, Metadata

from .toy_encoder import ToyEncoder

NAMES = ("auto", "triton", "flash4")


class FakeAccelerator:
    """An accelerator that multiplies results by a number derived from the weight in ``refresh``.

    Eager runs refresh the number themselves unless ``follows`` is False.
    """

    def __init__(self, kernels: str, precision: str, weight: Tensor) -> None:
        self.asked, self.source = (kernels, precision), weight
        self.derived = 4 * weight[:1]
        self.refreshes = 0
        self.follows = True
        self.loaded: Mapping[str, Any] | None = None
        self.kernels_used = "reference"
        self.because: str | None = None

    @property
    def nbytes(self) -> int:
        return 3 * 2**20

    def refresh(self) -> bool:
        self.refreshes += 1
        written = not torch.equal(self.derived, 4 * self.source[:1])
        self.derived.copy_(4 * self.source[:1])
        return written

    def choices(self) -> dict[str, Any]:
        return {"kernels": self.asked[0], "rows": [16], "reference_because": self.because}

    def load_choices(self, choices: Mapping[str, Any]) -> None:
        if choices["kernels"] not in NAMES:
            raise ValueError(f"kernel {choices['kernels']!r} is not installed here")
        self.loaded = choices


class FastToy(ToyEncoder):
    """A toy encoder with an accelerated form, whose results tell which form ran."""

    accelerator: FakeAccelerator | None = None

    def accelerated(self, kernels: str = "auto", precision: str = "bf16") -> FastToy:
        if kernels not in NAMES:
            raise ValueError(f"kernels={kernels!r}: must be one of {', '.join(NAMES)}")
        view = copy.copy(self)
        view.accelerator = FakeAccelerator(kernels, precision, self.weight)
        return view

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        output = super().forward(pixel_values, grid_thw, encoder_metadata=encoder_metadata)
        if self.accelerator is None:
            return output
        self.accelerator.kernels_used = "triton" if len(pixel_values) <= 16 else "flash4"
        if self.accelerator.follows:
            self.accelerator.refresh()
        scale = self.accelerator.derived
        hidden, pooled, deepstack, *_ = output
        return EncoderOutput(hidden * scale, pooled * scale, tuple(x * scale for x in deepstack))
