"""Functions that all figures share: write a figure to a file, and draw a picture in a panel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..devices import enough_disk

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_figure(figure: Figure, path: Path, dpi: int = 200) -> None:
    """Write a figure as a picture.

    Args:
        figure: a figure, such as the result of :func:`plot_feature_maps`.
        path: the file to write; its suffix names the format.
        dpi: pixels per inch.

    Raises:
        OSError: the file cannot be written, or the disk is full.
    """
    with enough_disk(path):
        figure.savefig(path, dpi=dpi)


def draw_picture(axes: Axes, pixels: Tensor, shape: Sequence[int], label: str) -> None:
    """Draw pixels or coloured patches into a panel without ticks.

    Args:
        axes: the panel.
        pixels: [h, w, 3], stretched to the size of the photograph.
        shape: (height, width) of the photograph in pixels, which become the panel's coordinates.
        label: text below the picture.
    """
    extent = (0, shape[1], shape[0], 0)
    axes.imshow(pixels.numpy(), extent=extent, interpolation="nearest", aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel(label, fontsize=8, color="dimgrey", labelpad=2)
    axes.spines[:].set_visible(False)
