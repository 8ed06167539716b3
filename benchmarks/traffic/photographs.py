"""Photographs of given sizes, cut from the sample images of scikit-learn and matplotlib."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TypeAlias

from PIL import Image

from vitgraph.commands.demo_pictures import sample_photographs

Box: TypeAlias = tuple[int, int, int, int]


def cut_photographs(sizes: Sequence[tuple[int, int]], seed: int = 0) -> Iterator[Image.Image]:
    """Yield one photograph per (width, height): a random crop of a sample image, resized.

    The photographs are made in threads on all cores; the same ``seed`` gives the same crops.
    """
    chance = random.Random(seed)
    sources = [Image.open(path).convert("RGB") for path in sample_photographs().values()]

    def draw(size: tuple[int, int]) -> tuple[Image.Image, tuple[int, int], Box]:
        source, (width, height) = chance.choice(sources), size
        scale = chance.uniform(0.5, 1) * min(source.width / width, source.height / height)
        w, h = round(width * scale), round(height * scale)
        x, y = chance.randint(0, source.width - w), chance.randint(0, source.height - h)
        return source, size, (x, y, x + w, y + h)

    with ThreadPoolExecutor() as pool:
        yield from pool.map(_cut, [draw(size) for size in sizes])


def _cut(drawn: tuple[Image.Image, tuple[int, int], Box]) -> Image.Image:
    source, size, box = drawn
    return source.crop(box).resize(size, Image.Resampling.BICUBIC)


def write_jpegs(folder: Path, images: Iterable[Image.Image]) -> list[Path]:
    """Write images into ``folder`` as JPEG files of quality 90, and return their paths."""

    def write(number: int, image: Image.Image) -> Path:
        path = folder / f"{number:05d}.jpg"
        image.save(path, quality=90)
        return path

    with ThreadPoolExecutor() as pool:
        return list(pool.map(write, count(), images))
