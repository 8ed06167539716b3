"""Helpers of encoders for the packages ``weights`` and ``vitgraph``; users do not need them.

Most are defined in the module of their subject, such as ``hf_config``, and exported here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base.encoder import Encoder
from .base.map_settings import MapSettings
from .base.saving import STORED_DTYPES, in_halves, in_pairs
from .data import VisionInputs
from .hf_config import read_ratio, read_size
from .layers.torch_internals import share_modules

__all__ = [
    "STORED_DTYPES",
    "attention_maps",
    "default_device",
    "in_halves",
    "in_pairs",
    "read_ratio",
    "read_size",
    "share_modules",
]


def attention_maps(
    encoder: Encoder, inputs: VisionInputs, settings: MapSettings
) -> list[list[Tensor]]:
    """Compute the attention maps of an encoder from inputs that are preprocessed already.

    Args:
        encoder: an encoder of one input path or of several.
        inputs: the result of ``encoder.preprocess``.
        settings: the blocks, queries, heads and input path to show.

    Returns:
        One list per item with a map [t, h, w] or, if all heads are shown, [H, t, h, w] per block.

    Raises:
        ValueError: an accelerated encoder, or blocks, queries, heads or a path that do not exist.
    """
    return encoder._maps_of_inputs(inputs, settings)


def default_device() -> torch.device:
    """Return the first CUDA device, else MPS, else the CPU; ``device="auto"`` means this."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
