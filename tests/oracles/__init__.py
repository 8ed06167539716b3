"""The reference models that our towers are held against, with the same weights in both.

A :class:`Family` is one line of the parity tables: the config as published, our encoder, the
reference from transformers, and the key map between them. The maps are written here once more,
apart from ``weights``, so that a mistake there cannot hide itself.
"""

from __future__ import annotations

from .configs import Config, edited
from .drawn import (
    build_encoder,
    build_pair,
    distance,
    distances,
    draw_pixels,
    draw_weights,
    fields_of,
    tiny,
)
from .families import BY_NAME, FAMILIES, Family
from .keys import timm_keys
from .lift import NO_LIFT, LiftFloat32
from .references import Grids, window_walk

__all__ = [
    "BY_NAME",
    "FAMILIES",
    "NO_LIFT",
    "Config",
    "Family",
    "Grids",
    "LiftFloat32",
    "build_encoder",
    "build_pair",
    "distance",
    "distances",
    "draw_pixels",
    "draw_weights",
    "edited",
    "fields_of",
    "timm_keys",
    "tiny",
    "window_walk",
]
