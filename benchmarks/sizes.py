"""Image sizes that ladders are judged on: a fixed list of 1,000, and one drawn differently.

The fixed list is the table below, each row (width, height, times landscape, times portrait), so
that what it says about a ladder can be read off and argued with. Where the sizes come from:

- phone: sensor sizes of 12 and 8 megapixel cameras, and what messengers shrink them to
- camera: 24, 20 and 16 megapixel sensors, and exports for the web
- web: the common widths of photographs, previews (1200x630), product and social media squares
- screenshot: the most used desktop and phone displays
- document: A4 and US letter at 72 to 200 dpi, slides
- icon: favicons to app icons

The other list has the same classes in another mixture, and every size is jittered by up to 15 % a
side, so that no ladder can know it.
"""

from __future__ import annotations

import random

Size = tuple[int, int]

TABLE: dict[str, list[tuple[int, int, int, int]]] = {
    "phone": [
        (4032, 3024, 24, 36), (3264, 2448, 14, 16), (4000, 2250, 8, 8), (2048, 1536, 14, 18),
        (1600, 1200, 22, 32), (1280, 960, 16, 20), (1600, 900, 6, 6),
    ],
    "camera": [
        (6000, 4000, 14, 6), (5472, 3648, 8, 4), (4608, 3456, 4, 2), (3000, 2000, 12, 6),
        (2048, 1365, 14, 8), (1920, 1280, 14, 8),
    ],
    "web": [
        (640, 480, 34, 12), (640, 427, 22, 8), (800, 600, 22, 8), (1024, 768, 20, 6),
        (1200, 800, 18, 6), (1200, 630, 20, 0), (600, 400, 14, 6), (500, 375, 16, 10),
        (400, 300, 6, 4), (300, 200, 8, 2), (1080, 1080, 16, 0), (500, 500, 10, 0),
        (1000, 1000, 6, 0), (1350, 1080, 2, 12), (1104, 736, 2, 10),
    ],
    "screenshot": [
        (1920, 1080, 36, 0), (1366, 768, 20, 0), (1440, 900, 12, 0), (1536, 864, 12, 0),
        (2560, 1440, 12, 0), (2880, 1800, 8, 0), (2532, 1170, 2, 14), (2400, 1080, 2, 14),
        (2796, 1290, 0, 8), (1792, 828, 2, 8),
    ],
    "document": [
        (842, 595, 2, 10), (1123, 794, 4, 16), (1169, 827, 2, 8), (1754, 1240, 2, 14),
        (2339, 1654, 2, 8), (792, 612, 0, 8), (1056, 816, 0, 10), (1650, 1275, 0, 8),
        (2200, 1700, 0, 6), (960, 540, 8, 0), (1280, 720, 12, 0),
    ],
    "icon": [
        (32, 32, 8, 0), (64, 64, 10, 0), (96, 96, 6, 0), (128, 128, 12, 0), (192, 192, 8, 0),
        (224, 224, 8, 0), (256, 256, 14, 0), (400, 400, 8, 0), (512, 512, 10, 0),
        (1024, 1024, 6, 0),
    ],
}  # fmt: skip
OTHER_MIXTURE = {
    "phone": 150, "camera": 60, "web": 420, "screenshot": 120, "document": 200, "icon": 50,
}  # fmt: skip


def fixed_sizes() -> list[tuple[str, Size]]:
    """(class, (width, height)) of the 1,000 fixed sizes, in the order of the table."""
    return [
        (kind, size)
        for kind, rows in TABLE.items()
        for width, height, landscape, portrait in rows
        for size in [(width, height)] * landscape + [(height, width)] * portrait
    ]


def other_sizes(seed: int = 7) -> list[tuple[str, Size]]:
    """1,000 sizes drawn differently: other mixture, every side jittered by up to 15 %."""
    draw = random.Random(seed)
    by_class = {kind: [size for k, size in fixed_sizes() if k == kind] for kind in TABLE}
    return [
        (kind, (_jittered(width, draw), _jittered(height, draw)))
        for kind, count in OTHER_MIXTURE.items()
        for width, height in draw.choices(by_class[kind], k=count)
    ]


def _jittered(side: int, draw: random.Random) -> int:
    return max(round(side * draw.uniform(0.85, 1.15)), 1)
