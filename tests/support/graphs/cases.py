"""Helpers of the tests of graphs: towers of every family, calls, and graphed encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from encoders.base.vision_encoder import VisionEncoder
from graphwrap import Budget, GraphedEncoder, GraphStats
from graphwrap.budgets import BudgetSet
from graphwrap.replay import Executor
from tests.oracles import BY_NAME, TOWERS, Grids, build_encoder, draw_pixels, edited, in_tokens_of

from ..towers.toy_encoder import WIDTH, ToyEncoder
from .outputs import EVERY_FIELD

OURS = [*TOWERS, "qwen3_5"]
BUDGETS = [16, 48, 96]
"""Whole tiles of the tiny InternViT too: 16 tokens each. ``budgets_of`` gives those of a tower."""
NUMBERS = ["max_batch_size", "max_frames_per_batch", "min_budget", "max_budget", "max_graphs"]
"""The settings that are one number."""
SMALL: Grids = [[1, 1, 6]]
LARGE: Grids = [[1, 4, 10], [2, 2, 2]]
SPLIT: Grids = [[1, 8, 7], [1, 8, 6]]
OVER: Grids = [[1, 10, 10]]
ROUTES = {
    "replay": SMALL,
    "a replay of two": LARGE,
    "split": SPLIT,
    "eager": OVER,
    "both": [*SMALL, *OVER],
}
"""Calls of the toy encoder by what runs them."""
CALM = 0.5
"""Weights at which float32 noise stays below the bound of design: relative L2 of 2e-6."""


def is_tiled(name: str) -> bool:
    return BY_NAME[name].tiled


@cache
def tower(name: str) -> VisionEncoder:
    """Return a shared three-block tower, which tests must not change."""
    return new_tower(name)


def new_tower(name: str) -> VisionEncoder:
    """Build a three-block tower for one test; InternViT's projector is as narrow as the others'."""
    family = BY_NAME[name]
    if is_tiled(name):
        language = "llm_config" if "llm_config" in family.config else "text_config"
        family = replace(family, config={**family.config, language: {"hidden_size": 48}})
    return build_encoder(family, family.tiny, calm=CALM)


def at_true_size(name: str) -> VisionEncoder:
    """Build a tower in its published sizes on the meta device, so without weights."""
    family = BY_NAME[name]
    with torch.device("meta"):
        return family.build(family.config_class.from_hf(edited(family.config)))


def tokens(chosen: BudgetSet) -> list[int]:
    """Return the token counts of the chosen budgets, each once."""
    return sorted({budget.tokens for budget in chosen.budgets})


def mixes(name: str) -> dict[str, Grids]:
    """Return the grids of calls by name: an image, images, a clip, both; the last overflows."""
    if is_tiled(name):
        counts = {
            "one image": [2],
            "images": [1, 3, 2],
            "a clip": [4],
            "images and a clip": [1, 5, 1, 2],
            "with one over every budget": [1, 7, 2],
        }
        return {mix: tiles_of(name, *items) for mix, items in counts.items()}
    merged: dict[str, Grids] = {
        "one image": [[1, 6, 8]],
        "images": [[1, 4, 6], [1, 8, 8], [1, 2, 2], [1, 10, 6]],
        "a clip": [[3, 4, 6]],
        "images and a clip": [[1, 4, 6], [4, 6, 8], [1, 2, 8], [2, 4, 4], [1, 14, 12]],
        "with one over every budget": [[1, 4, 6], [1, 20, 20], [1, 2, 2]],
    }
    return {mix: in_tokens_of(tower(name), grids) for mix, grids in merged.items()}


def single(name: str) -> Grids:
    """Return the grids of items of which each fits a budget of ``budgets_of`` alone."""
    if is_tiled(name):
        return tiles_of(name, 1, 2, 6)
    return in_tokens_of(tower(name), [[1, 4, 6], [2, 6, 6], [1, 12, 14]])


def tiles_of(name: str, *counts: int) -> Grids:
    """Return grids of items with ``counts`` times the tiles that make the smallest budget.

    InternViT makes 16 tokens of one tile, Step3-VL of four; CLIP makes 64 of one.
    """
    return [[count * unit_of(name) // tile_tokens(name), 8, 8] for count in counts]


def tile_tokens(name: str) -> int:
    (spec,) = tower(name).item_specs([[1, 8, 8]])
    return spec.output_tokens


def unit_of(name: str) -> int:
    """Return the tokens of a tower's smallest budget: 16, or those of a tile where it has more."""
    return max(BUDGETS[0], tile_tokens(name)) if is_tiled(name) else BUDGETS[0]


def budgets_of(name: str) -> list[int]:
    """Return ``BUDGETS``, or as many whole tiles where one has more than 16 tokens."""
    return [tokens * unit_of(name) // BUDGETS[0] for tokens in BUDGETS]


def static(
    encoder: Any, budgets: Sequence[int] | None = BUDGETS, **settings: Any
) -> GraphedEncoder:
    """Wrap an encoder with the "static" backend, which needs no GPU for its bookkeeping."""
    return GraphedEncoder(encoder, budgets, backend="static", **settings)


def executor_of(graphed: GraphedEncoder) -> Executor:
    """Return the executor of an encoder with one path; capture first if that is not done."""
    captured = graphed.capture(progress=False)._captured
    assert captured is not None
    return captured.paths["image"]


def toy(budgets: Sequence[int] | None = (4, 8, 16, 32), **settings: Any) -> GraphedEncoder:
    """Return a graphed toy encoder whose results equal eager ones bit for bit."""
    return static(ToyEncoder(), budgets, outputs=EVERY_FIELD, **settings)


def pixels_for(encoder: Any, grids: Grids, seed: int = 0) -> Tensor:
    """Draw normalised pixels for ``grids``, of a tower or of the toy encoder."""
    if isinstance(encoder, ToyEncoder):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(sum(t * h * w for t, h, w in grids), WIDTH, generator=generator)
    return draw_pixels(encoder, grids, seed)


def budgets_hit(graphed: GraphedEncoder, stats: GraphStats | None = None) -> list[Budget]:
    """Return the budgets that were replayed since the last reset, once per replay."""
    counts = stats or graphed.stats()
    return [
        budget
        for entry in counts.budgets
        for budget in graphed.budgets
        if (entry.tokens, entry.segments) == (budget.tokens, budget.segments)
        for _ in range(entry.hits)
    ]
