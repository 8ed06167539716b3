"""Real pictures for tests: photographs that come with scikit-learn and matplotlib."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.cbook
import numpy as np
from PIL import Image


def _sample(name: str) -> Image.Image:
    """A picture of scikit-learn, which takes a second to import and two milliseconds to find."""
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    return Image.open(Path(spec.origin).parent / "datasets" / "images" / name).convert("RGB")


@cache
def china() -> Image.Image:
    """A temple, 640x427."""
    return _sample("china.jpg")


@cache
def flower() -> Image.Image:
    """A dahlia, 640x427."""
    return _sample("flower.jpg")


@cache
def hopper() -> Image.Image:
    """Grace Hopper, 512x600."""
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        return Image.open(file).convert("RGB")


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
    """Return uint8 [F, H, W, 3], a window that moves over a photograph."""
    array = np.asarray(china())
    return np.stack([array[n : n + height, 3 * n : 3 * n + width] for n in range(frames)])
