"""What the tests of graphs share: cases of every family, and how outputs are compared."""

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
from graphwrap.graphs.replay import Executor
from oracles import BY_NAME, TOWERS, Grids, build_encoder, draw_pixels, edited, in_tokens_of

from ..towers.toy_encoder import WIDTH, ToyEncoder
from .outputs import EVERY_FIELD

OURS = [*TOWERS, "qwen3_5"]
BUDGETS = [16, 48, 96]
"""Whole tiles of the tiny InternViT too: 16 tokens each."""
NUMBERS = ["max_batch_size", "max_frames_per_batch", "min_budget", "max_budget", "max_graphs"]
"""The settings that are one number."""
CALM = 0.5
"""Weights at which float32 noise stays below the bound of design: relative L2 of 2e-6."""


def is_tiled(name: str) -> bool:
    return BY_NAME[name].tiled


@cache
def tower(name: str) -> VisionEncoder:
    """A shared three-block tower; tests must not change it."""
    return new_tower(name)


def new_tower(name: str) -> VisionEncoder:
    """A tower of one's own; InternViT's projector is cut to the width of the others."""
    family = BY_NAME[name]
    if is_tiled(name):
        language = "llm_config" if "llm_config" in family.config else "text_config"
        family = replace(family, config={**family.config, language: {"hidden_size": 48}})
    return build_encoder(family, family.tiny, calm=CALM)


def at_true_size(name: str) -> VisionEncoder:
    """The published tower without its weights."""
    family = BY_NAME[name]
    with torch.device("meta"):
        return family.build(family.config_class.from_hf(edited(family.config)))


def tokens(chosen: BudgetSet) -> list[int]:
    """The tokens of the budgets, each number once."""
    return sorted({budget.tokens for budget in chosen.budgets})


def mixes(name: str) -> dict[str, Grids]:
    """Calls by name: an image, images of several sizes, a clip, both; the last overflows."""
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
    """Items that each fit a budget of BUDGETS alone."""
    if is_tiled(name):
        return tiles_of(name, 1, 2, 6)
    return in_tokens_of(tower(name), [[1, 4, 6], [2, 6, 6], [1, 12, 14]])


def tiles_of(name: str, *counts: int) -> Grids:
    """Items of so many times the tiles that make 16 tokens: one of InternViT, four of Step3-VL."""
    (spec,) = tower(name).item_specs([[1, 8, 8]])
    return [[count * 16 // spec.output_tokens, 8, 8] for count in counts]


def static(
    encoder: Any, budgets: Sequence[int] | None = BUDGETS, **settings: Any
) -> GraphedEncoder:
    """The backend under which CPU tests exercise all of the bookkeeping."""
    return GraphedEncoder(encoder, budgets, backend="static", **settings)


def executor_of(graphed: GraphedEncoder) -> Executor:
    """What runs the calls of an encoder with one path, captured if it is not yet."""
    captured = graphed.capture(progress=False)._captured
    assert captured is not None
    return captured.paths["image"]


def toy(budgets: Sequence[int] | None = (4, 8, 16, 32), **settings: Any) -> GraphedEncoder:
    """A graphed toy whose results equal eager ones bit for bit."""
    return static(ToyEncoder(), budgets, outputs=EVERY_FIELD, **settings)


def pixels_for(encoder: Any, grids: Grids, seed: int = 0) -> Tensor:
    """Normalised pixels for ``grids``, of a tower or of the toy."""
    if isinstance(encoder, ToyEncoder):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(sum(t * h * w for t, h, w in grids), WIDTH, generator=generator)
    return draw_pixels(encoder, grids, seed)


def budgets_hit(graphed: GraphedEncoder, stats: GraphStats | None = None) -> list[Budget]:
    """The budgets that were replayed since the last reset, once per replay."""
    counts = stats or graphed.stats()
    return [
        budget
        for entry in counts.budgets
        for budget in graphed.budgets
        if (entry.tokens, entry.segments) == (budget.tokens, budget.segments)
        for _ in range(entry.hits)
    ]
