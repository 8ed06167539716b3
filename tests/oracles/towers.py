"""The names of the towers that tests run over, and grids for them."""

from __future__ import annotations

from typing import Any

import pytest

from .families import FAMILIES
from .family import Grids


def slow(name: str) -> Any:
    """Return a parameter with which a test is a slow one."""
    return pytest.param(name, marks=pytest.mark.slow)


BY_NAME = {family.name: family for family in FAMILIES}
BY_FAMILY = {family.record.name: family for family in reversed(FAMILIES)}
"""The first row of each family, by the name of its record."""
TOWERS = [family.name for family in FAMILIES if not family.variant]
"""Names of the towers whose maths differ; most tests run over these."""
EVERY_TOWER = [BY_NAME[name] for name in TOWERS]
"""The same towers as rows, for tests that are fast with each of them: no name marks these slow."""
EVERY_KIND = [*TOWERS, "exaone4_5", "kimi_k3", "deepseek_ocr"]
"""The same, and of the others one with shared keys, one with heads that are wider together than the
tower, and one with relative positions (SAM)."""
WHOLE = [name for name in TOWERS if BY_NAME[name].tower_class is BY_NAME[name].encoder_class]
"""Names of the towers that are encoders by themselves and not a path of one."""
FEW_FAST = [name if name in ("intern_vit_300m", "qwen2_5_vl") else slow(name) for name in TOWERS]
"""The towers for tests that take a second or more each: two run in a plain pytest, all in CI."""
ONE_FAST = [name if name == "intern_vit_300m" else slow(name) for name in TOWERS]
"""The towers for tests that take some three seconds each: one runs in a plain pytest, all in CI."""
KINDS = ["intern_vit_300m", "qwen2_5_vl", "qwen3_vl", "gemma4"]
"""A tower of tiles, one of windows, one with taps and DeepStack, and one that pools and clamps.

For tests of what is no tower's own: the compiler's programs, wrapped layers, memory of any strides.
"""
PATCH_TOWERS = [name for name in TOWERS if not BY_NAME[name].tiled]
MERGING_TOWERS = [
    name for name in PATCH_TOWERS if BY_NAME[name].small_config().spatial_merge_size > 1
]
"""The towers over patches that merge 2x2 of them."""
JOINING_TOWERS = [name for name in TOWERS if BY_NAME[name].joins]
"""Towers that make one set of tokens of several rows of the grid, four frames or a pair."""
FRAME_BY_FRAME = [name for name in TOWERS if BY_NAME[name].segment_rows == 1]
"""Towers in which no row of the grid attends to another, or to none but that of its pair."""
TILE_TOWERS = [name for name in TOWERS if BY_NAME[name].tiled]


def grids_for(name: str) -> Grids:
    """Return two items for the tiny tower ``name``, the first of two frames."""
    return [[2, 8, 8], [1, 8, 8]] if BY_NAME[name].tiled else [[2, 4, 6], [1, 10, 6]]
