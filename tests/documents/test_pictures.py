"""Pictures of the documentation: their labels lie apart, and scripts draw them again."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

ROOT = Path(__file__).parents[2]
WIDE = "DejaVu Sans"  # wider than the fonts that the picture asks for
Box = tuple[float, float, float, float]


def label_box(label: ElementTree.Element) -> Box:
    """Return left, top, right and bottom of a label in a wide font."""
    size = float(label.get("font-size", 13))
    font = FontProperties(family=WIDE, weight=label.get("font-weight", "normal"))
    width = TextPath((0, 0), label.text or "", size=size, prop=font).get_extents().width
    x, y = float(label.attrib["x"]), float(label.attrib["y"])
    left = x - {"middle": width / 2, "end": width}.get(label.get("text-anchor", ""), 0)
    return left, y - 0.8 * size, left + width, y + 0.2 * size


def overlap(first: Box, second: Box) -> bool:
    across = first[0] < second[2] and second[0] < first[2]
    return across and first[1] < second[3] and second[1] < first[3]
