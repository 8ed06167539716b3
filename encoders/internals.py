"""Helpers of encoders that ``weights`` and ``vitgraph`` use as well, and that users do not need.

Each is defined where its subject lies: reading configs, saving, attention maps, shared modules.
"""

from __future__ import annotations

from .base.attention_maps import attention_maps
from .base.saving import in_halves, in_pairs
from .hf_config import read_ratio, read_size
from .layers.torch_internals import share_modules

__all__ = [
    "attention_maps",
    "in_halves",
    "in_pairs",
    "read_ratio",
    "read_size",
    "share_modules",
]
