"""A toy encoder whose forward fails at some sizes, and the errors of a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from encoders.contract import EncoderOutput
from graphwrap import GraphedEncoder

from ..towers.toy_encoder import ToyEncoder
from .cases import static
from .outputs import EVERY_FIELD


class FailingEncoder(ToyEncoder):
    """A toy whose forward fails at some sizes: as if memory ran out, or somebody interrupted."""

    def __init__(self, error: BaseException, fails: Callable[[int], bool]) -> None:
        super().__init__()
        self.error, self.fails = error, fails

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        if self.fails(len(pixel_values)):
            raise self.error
        return super().forward(pixel_values, *args, **kwargs)


ERRORS = {
    "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "allocator assertion": RuntimeError(
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1016\nsecond line"
    ),
}


def failing(error: BaseException, fails: Callable[[int], bool], **settings: Any) -> GraphedEncoder:
    encoder = FailingEncoder(error, fails)
    return static(encoder, [4, 8, 16], max_frames_per_batch=4, outputs=EVERY_FIELD, **settings)
