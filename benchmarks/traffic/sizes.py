"""Image sizes to judge choices of token budgets: a fixed list of 1,000, and nine random lists.

The fixed list is the table below, whose rows are (width, height, number of landscape images, number
of portrait images). Its classes of images:

- phone: sensor sizes of 12 and 8 megapixel cameras, and their sizes after messengers shrink them
- camera: 24, 20 and 16 megapixel sensors, and pictures exported for the web
- web: the common widths of photographs, previews (1200x630), product and social media squares
- screenshot: the most used desktop and phone displays
- document: A4 and US letter at 72 to 200 dpi, slides
- icon: favicons to app icons

The random lists do not depend on the table. Each is 1,000 draws from a fixed seed:

- coco: the longer side 640, the other like COCO's: half of the time 480, else 427, 360, 425 or any
- log-uniform: both sides from 100 to 4,000, each doubling equally likely
- thumbnails: both sides from 200 to 500, uniform
- photographs: normal around 800x600, a standard deviation of 250x200
- screens: eleven displays, six of desktops and five of phones
- documents: A4 pages, and one in five US letter, scanned at 72 to 150 dpi
- frames: video from 360p to 2160p, one in four upright, 1080p most often
- crops: parts of a 12 megapixel photograph, each side from 30 to 100 % of its own
- icons: squares of the usual sides, 32 to 1,024
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Size = tuple[int, int]

TABLE: dict[str, list[tuple[int, int, int, int]]] = {
    "phone": [
        (4032, 3024, 24, 36),
        (3264, 2448, 14, 16),
        (4000, 2250, 8, 8),
        (2048, 1536, 14, 18),
        (1600, 1200, 22, 32),
        (1280, 960, 16, 20),
        (1600, 900, 6, 6),
    ],
    "camera": [
        (6000, 4000, 14, 6),
        (5472, 3648, 8, 4),
        (4608, 3456, 4, 2),
        (3000, 2000, 12, 6),
        (2048, 1365, 14, 8),
        (1920, 1280, 14, 8),
    ],
    "web": [
        (640, 480, 34, 12),
        (640, 427, 22, 8),
        (800, 600, 22, 8),
        (1024, 768, 20, 6),
        (1200, 800, 18, 6),
        (1200, 630, 20, 0),
        (600, 400, 14, 6),
        (500, 375, 16, 10),
        (400, 300, 6, 4),
        (300, 200, 8, 2),
        (1080, 1080, 16, 0),
        (500, 500, 10, 0),
        (1000, 1000, 6, 0),
        (1350, 1080, 2, 12),
        (1104, 736, 2, 10),
    ],
    "screenshot": [
        (1920, 1080, 36, 0),
        (1366, 768, 20, 0),
        (1440, 900, 12, 0),
        (1536, 864, 12, 0),
        (2560, 1440, 12, 0),
        (2880, 1800, 8, 0),
        (2532, 1170, 2, 14),
        (2400, 1080, 2, 14),
        (2796, 1290, 0, 8),
        (1792, 828, 2, 8),
    ],
    "document": [
        (842, 595, 2, 10),
        (1123, 794, 4, 16),
        (1169, 827, 2, 8),
        (1754, 1240, 2, 14),
        (2339, 1654, 2, 8),
        (792, 612, 0, 8),
        (1056, 816, 0, 10),
        (1650, 1275, 0, 8),
        (2200, 1700, 0, 6),
        (960, 540, 8, 0),
        (1280, 720, 12, 0),
    ],
    "icon": [
        (32, 32, 8, 0),
        (64, 64, 10, 0),
        (96, 96, 6, 0),
        (128, 128, 12, 0),
        (192, 192, 8, 0),
        (224, 224, 8, 0),
        (256, 256, 14, 0),
        (400, 400, 8, 0),
        (512, 512, 10, 0),
        (1024, 1024, 6, 0),
    ],
}
SCREENS = [
    (1366, 768),
    (1440, 900),
    (1536, 864),
    (1920, 1080),
    (2560, 1440),
    (3840, 2160),
    (750, 1334),
    (828, 1792),
    (1080, 2340),
    (1170, 2532),
    (1284, 2778),
]
FRAMES = [(640, 360), (854, 480), (1280, 720), (1920, 1080), (1920, 1080), (3840, 2160)]
ICONS = [32, 48, 64, 96, 128, 180, 192, 256, 384, 512, 1024]


def fixed_sizes() -> list[tuple[str, Size]]:
    """Return (class, (width, height)) of the 1,000 fixed sizes, in the order of the table."""
    return [
        (kind, size)
        for kind, rows in TABLE.items()
        for width, height, landscape, portrait in rows
        for size in [(width, height)] * landscape + [(height, width)] * portrait
    ]


def other_lists() -> dict[str, list[tuple[str, Size]]]:
    """Return, by the name of each random list, its 1,000 sizes as (name, (width, height))."""
    return {name: _drawn(name, draw) for name, draw in DRAWS.items()}


def _drawn(name: str, draw: Callable[[random.Random], Size]) -> list[tuple[str, Size]]:
    chance = random.Random(name)
    return [(name, draw(chance)) for _ in range(1000)]


def _coco(chance: random.Random) -> Size:
    anything = chance.randint(300, 640)
    short = chance.choices([480, 427, 360, 425, anything], weights=[50, 20, 5, 5, 20])[0]
    return _turned(chance, (640, short), upright=0.3)


def _log_uniform(chance: random.Random) -> Size:
    width, height = (math.exp(chance.uniform(math.log(100), math.log(4000))) for _ in range(2))
    return round(width), round(height)


def _thumbnail(chance: random.Random) -> Size:
    return chance.randint(200, 500), chance.randint(200, 500)


def _photograph(chance: random.Random) -> Size:
    return max(64, round(chance.gauss(800, 250))), max(64, round(chance.gauss(600, 200)))


def _screen(chance: random.Random) -> Size:
    return chance.choice(SCREENS)


def _document(chance: random.Random) -> Size:
    """Return the size in pixels of a randomly chosen scan of an A4 or US letter page."""
    width, height = (8.5, 11.0) if chance.random() < 0.2 else (8.27, 11.69)
    dpi = chance.uniform(72, 150)
    return round(width * dpi), round(height * dpi)


def _frame(chance: random.Random) -> Size:
    return _turned(chance, chance.choice(FRAMES), upright=0.25)


def _crop(chance: random.Random) -> Size:
    return round(4032 * chance.uniform(0.3, 1)), round(3024 * chance.uniform(0.3, 1))


def _icon(chance: random.Random) -> Size:
    side = chance.choice(ICONS)
    return side, side


def _turned(chance: random.Random, size: Size, upright: float) -> Size:
    width, height = size
    return (height, width) if chance.random() < upright else size


DRAWS: dict[str, Callable[[random.Random], Size]] = {
    "coco": _coco,
    "log-uniform": _log_uniform,
    "thumbnails": _thumbnail,
    "photographs": _photograph,
    "screens": _screen,
    "documents": _document,
    "frames": _frame,
    "crops": _crop,
    "icons": _icon,
}
