"""Patches of a photograph and the most similar patches of another photograph, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from encoders.inputs import ImageLike, to_rgb

from ..analysis.nearest import nearest_patches
from ..packages import require_matplotlib
from .figures import draw_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_nearest_patches(
    images: tuple[ImageLike, ImageLike],
    maps: tuple[Tensor, Tensor],
    points: Sequence[tuple[int, int]],
    *,
    title: str | None = None,
) -> Figure:
    """Draw two photographs, and lines from patches of the first to the most similar in the second.

    Args:
        images: the two photographs, as ``preprocess`` takes them.
        maps: the photographs' feature maps, [1, h, w, D] or [h, w, D], both of one encoder.
        points: (row, column) of patches in the first map, from 0.
        title: title of the figure; None for none.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.

    Raises:
        ValueError: matplotlib is missing, or a point lies outside of the first map.
    """
    require_matplotlib()
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import ConnectionPatch

    source, target = (features[0] if features.ndim == 4 else features for features in maps)
    height, width, _ = source.shape
    for row, column in points:
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(f"point ({row}, {column}) lies outside of the {height}x{width} map")
    points_of_image = [((row + 0.5) / height, (column + 0.5) / width) for row, column in points]
    matches = [
        matches_of_point[0]
        for matches_of_point in nearest_patches([source[None], target[None]], points_of_image)
    ]
    figure = Figure(figsize=(10, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, image in zip((left, right), images, strict=True):
        pixels = to_rgb(image).permute(1, 2, 0)
        draw_picture(
            axes, pixels, pixels.shape[:2], f"{pixels.shape[1]} x {pixels.shape[0]} pixels"
        )
    colours = colormaps["turbo"](torch.linspace(0.05, 0.95, len(points)).numpy())
    for point, match, colour in zip(points, matches, colours, strict=True):
        start = _centre(point, source.shape, left)
        end = _centre((match.row, match.column), target.shape, right)
        _dot(left, start, colour, "")
        _dot(right, end, colour, f"{match.cosine:.2f}")
        figure.add_artist(
            ConnectionPatch(start, end, "data", "data", axesA=left, axesB=right, color=colour)
        )
    left.set_title("chosen patches", fontsize=9)
    right.set_title("nearest patches (cosine similarity of features less their mean)", fontsize=9)
    figure.suptitle(title or "", fontsize=11)
    return figure


def _dot(axes: Axes, position: tuple[float, float], colour: object, label: str) -> None:
    axes.plot(*position, "o", color=colour, markeredgecolor="white", markersize=8)
    if label:
        axes.annotate(
            label,
            position,
            xytext=(6, 6),
            textcoords="offset points",
            color="white",
            fontsize=8,
            bbox={"facecolor": "black", "alpha": 0.5, "pad": 1},
        )


def _centre(point: Sequence[int], shape: Sequence[int], axes: Axes) -> tuple[float, float]:
    """Return (x, y) of the centre of a patch, in pixels of the photograph."""
    (_, width), (height, _) = axes.get_xlim(), axes.get_ylim()
    return (point[1] + 0.5) * width / shape[1], (point[0] + 0.5) * height / shape[0]
