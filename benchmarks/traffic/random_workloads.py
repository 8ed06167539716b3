"""Random workloads, different in every run, so that speed is not tuned to a table's image sizes."""

from __future__ import annotations

import math
import random

from benchmarks.towers import Tower
from encoders.inputs.sizes import best_tiling
from tests.oracles import Grids

SIDES = {"patches": (200, 1600), "tiles": (300, 3000)}
"""The shortest and longest side of an image in pixels, for towers over patches and over tiles.
Sides are log-uniform: each doubling is equally likely."""
MOST_TOKENS, MOST_TILES = 8192, 64
SINGLES, BATCHES, MOST_IMAGES = 3, 2, 16


def random_workloads(tower: Tower, seed: int) -> dict[str, Grids]:
    """Make five random workloads: three single images, and two batches of 2 to 16 images.

    Args:
        tower: the tower to make them for; its name is part of the seed.
        seed: the same seed gives the same workloads.

    Returns:
        The patch grids of the images of each workload, by a name that has their sizes.
    """
    chance = random.Random(f"{seed} {tower.name}")
    drawn: dict[str, Grids] = {}
    while len(drawn) < SINGLES:
        width, height = _size(tower, chance)
        drawn[f"random {width}x{height}"] = [_grid(tower, width, height)]
    while len(drawn) < SINGLES + BATCHES:
        grids = _batch(tower, chance)
        drawn[f"random batch {len(drawn) - SINGLES + 1} of {len(grids)}"] = grids
    return drawn


def _batch(tower: Tower, chance: random.Random) -> Grids:
    """Return a random batch of images, at most as many as fit the largest token budget."""
    wanted = chance.randint(2, MOST_IMAGES)
    grids: Grids = []
    while len(grids) < wanted:
        grids.append(_grid(tower, *_size(tower, chance)))
        if not _fits(tower, grids):
            return grids[:-1] if len(grids) > 2 else _batch(tower, chance)
    return grids


def _fits(tower: Tower, grids: Grids) -> bool:
    if _tiled(tower):
        return sum(tiles for tiles, _, _ in grids) <= MOST_TILES
    return sum(t * h * w // 4 for t, h, w in grids) <= MOST_TOKENS


def _size(tower: Tower, chance: random.Random) -> tuple[int, int]:
    low, high = map(math.log, SIDES["tiles" if _tiled(tower) else "patches"])
    width, height = (round(math.exp(chance.uniform(low, high))) for _ in range(2))
    return width, height


def _grid(tower: Tower, width: int, height: int) -> list[int]:
    """Return the patch grid of an image rounded to whole tokens or, for InternVL, of its tiles."""
    if not _tiled(tower):
        return tower.grid(width, height)
    columns, rows = best_tiling(width, height, 1, 12, 448)
    return [columns * rows + (columns * rows > 1), 32, 32]


def _tiled(tower: Tower) -> bool:
    return tower.family.startswith("intern")
