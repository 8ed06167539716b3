"""Accelerated towers: an encoder's blocks, run with fused steps and fast attention kernels.

Nothing here is specific to a model: the blocks of an encoder list their layers by role (``qkv``,
``proj``, ..) as :class:`encoders.block_parts.BlockParts`.

- ``accelerator``: runs the blocks of an encoder, and keeps copies of its weights for the kernels
- ``fused_blocks``: the steps of a block; ``attention``: the steps and kernels of its attention
- ``fp8``: matrix products in e4m3, where a timing finds them faster
- ``derived``, ``aligned``: copies of weights in a layout that runs fast, kept equal to the weights
- ``obstacles``: the reasons why a tower or a block cannot be accelerated
- ``triton_kernels``: the kernels that are written here, in Triton
"""

from __future__ import annotations

from typing import get_args

import torch

from ..contract import Kernels, Precision, warn_caller
from .accelerator import FusedBlocks
from .attention.candidates import KERNELS
from .obstacles import fp8_obstacle, obstacle

__all__ = ["CHOICES", "PRECISIONS", "accelerate", "fp8_obstacle"]

CHOICES: tuple[Kernels, ...] = get_args(Kernels)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def accelerate(
    kernels: Kernels, precision: Precision, device: torch.device, dtype: torch.dtype
) -> FusedBlocks:
    """Make the accelerator that runs the blocks of an accelerated encoder.

    Args:
        kernels: "auto" (all attention kernels), "torch" (those that come with PyTorch) or the name
            of one kernel.
        precision: "bf16", which keeps the encoder's own dtype, or "fp8", which computes products
            of blocks in e4m3 where that is faster.
        device, dtype: device and dtype of the encoder's weights.

    Raises:
        ValueError: an unknown kernel or precision, or "fp8" where the device has no fast products
            in fp8 or the encoder is not bfloat16.

    Warns:
        UserWarning: the device is a CUDA device that cannot be accelerated, or a kernel was asked
            for by name on a device without CUDA. A named kernel that cannot run a shape is warned
            of in the first forward.
    """
    if kernels not in CHOICES:
        raise ValueError(f"kernels={kernels!r}: must be one of {', '.join(CHOICES)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: must be one of {', '.join(PRECISIONS)}")
    if precision == "fp8" and (reason := fp8_obstacle(device, dtype)) is not None:
        raise ValueError(
            f'precision="fp8": {reason}. Products in fp8 need a bfloat16 encoder, Triton, and a '
            "GPU of compute capability 9.0 or newer (H100, H200, B200): use "
            'precision="bf16" here'
        )
    because = obstacle(device, dtype)
    if because is not None and (device.type == "cuda" or kernels in KERNELS):
        warn_caller(f"the reference runs instead: {because}")
    return FusedBlocks(kernels, precision, because)
