"""Attention maps of preprocessed inputs, for the package ``vitgraph``."""

from __future__ import annotations

from torch import Tensor

from .base.encoder import Encoder
from .base.map_settings import MapSettings
from .data import VisionInputs

__all__ = ["attention_maps"]


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
