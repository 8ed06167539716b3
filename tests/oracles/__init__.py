"""The reference models that our towers are compared with, with equal weights in both.

A :class:`Family` is one row of the tests' table of towers: the published config, our encoder, the
reference from transformers, and the key map between them. The key maps are written here a second
time, apart from ``weights``, so that a mistake there shows. ``references`` has a module per family
or maker, which builds and runs its reference; the modules beside it are about all families.
"""

from __future__ import annotations

from .configs import Config, edited
from .drawn import (
    add_noise,
    build_encoder,
    build_pair,
    distance,
    distances,
    draw_pixels,
    draw_weights,
    fields_of,
    fresh,
    in_tokens_of,
    joined,
    tiny,
)
from .families import FAMILIES
from .family import Family, Grids
from .keys import timm_keys
from .lift import NO_LIFT, LiftFloat32
from .references.qwen import window_walk
from .towers import (
    BY_FAMILY,
    BY_NAME,
    EVERY_KIND,
    EVERY_TOWER,
    FEW_FAST,
    FRAME_BY_FRAME,
    JOINING_TOWERS,
    KINDS,
    MERGING_TOWERS,
    ONE_FAST,
    PATCH_TOWERS,
    TILE_TOWERS,
    TOWERS,
    WHOLE,
    grids_for,
    slow,
)

__all__ = [
    "BY_FAMILY",
    "BY_NAME",
    "EVERY_KIND",
    "EVERY_TOWER",
    "FAMILIES",
    "FEW_FAST",
    "FRAME_BY_FRAME",
    "JOINING_TOWERS",
    "KINDS",
    "MERGING_TOWERS",
    "NO_LIFT",
    "ONE_FAST",
    "PATCH_TOWERS",
    "TILE_TOWERS",
    "TOWERS",
    "WHOLE",
    "Config",
    "Family",
    "Grids",
    "LiftFloat32",
    "add_noise",
    "build_encoder",
    "build_pair",
    "distance",
    "distances",
    "draw_pixels",
    "draw_weights",
    "edited",
    "fields_of",
    "fresh",
    "grids_for",
    "in_tokens_of",
    "joined",
    "slow",
    "timm_keys",
    "tiny",
    "window_walk",
]
