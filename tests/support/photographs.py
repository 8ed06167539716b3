"""Photographs for tests, which come with scikit-learn and matplotlib."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from vitgraph.commands.demo_pictures import sample_photographs


@cache
def _sample(name: str) -> Image.Image:
    return Image.open(sample_photographs()[name]).convert("RGB")


def china() -> Image.Image:
    """Return the photograph of a Chinese temple, 640x427 pixels."""
    return _sample("pavilion")


def of_random_sizes(seed: int, count: int) -> list[Image.Image]:
    """Return the temple in ``count`` sizes from 1x1 to 700x700 pixels."""
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 700), rng.randint(1, 700)) for _ in range(count)]
    return [china().resize(size) for size in sizes]


def flower() -> Image.Image:
    """Return the photograph of a dahlia, 640x427 pixels."""
    return _sample("dahlia")


def hopper() -> Image.Image:
    """Return the portrait of Grace Hopper, 512x600 pixels."""
    return _sample("portrait")


def photographs() -> list[Image.Image]:
    """Return photographs and crops of them: large, small, odd, tall, wide, one pixel."""
    return [
        china(),
        flower().crop((10, 20, 311, 220)),
        hopper(),
        china().resize((1000, 700)),
        hopper().crop((200, 100, 233, 131)),
        flower().crop((0, 200, 640, 220)),
        china().crop((300, 0, 317, 427)),
        hopper().crop((250, 150, 251, 151)),
    ]


def panning_clip(frames: int, height: int = 90, width: int = 130) -> np.ndarray[Any, Any]:
    """Return a clip of a window that moves over a photograph, uint8 [F, H, W, 3]."""
    array = np.asarray(china())
    return np.stack([array[n : n + height, 3 * n : 3 * n + width] for n in range(frames)])
