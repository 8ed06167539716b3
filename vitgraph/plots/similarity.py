"""The similarity of the blocks of two towers as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..packages import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_similarity(
    similarity: Tensor,
    *,
    names: tuple[str, str] = ("block", "block"),
    low: float | None = 0.0,
    title: str | None = None,
) -> Figure:
    """Draw the result of ``similarity_of_blocks`` as a heat map.

    Args:
        similarity: [L, L'], one row per block of the first tower, one column per block of the
            second.
        names: label of the rows, and label of the columns.
        low: the value at the dark end of the colours; None takes the smallest in ``similarity``.
            The bright end is 1.
        title: title of the figure; None for none.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.

    Raises:
        ValueError: matplotlib is missing, or ``similarity`` is not a matrix with at least one
            value.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    if not isinstance(similarity, Tensor) or similarity.ndim != 2 or not similarity.numel():
        raise ValueError("similarity: must be a matrix [L, L'], as similarity_of_blocks returns it")
    rows, columns = similarity.shape
    figure = Figure((1.6 + 3.2 * columns / max(rows, columns), 3.9), layout="constrained")
    draw_similarity(figure, figure.subplots(), similarity, names, low)
    figure.suptitle(title or "", fontsize=11)
    return figure


def draw_similarity(
    figure: Figure, axes: Axes, similarity: Tensor, names: tuple[str, str], low: float | None
) -> None:
    """Draw a matrix of similarities into a panel, with its colour bar; see plot_similarity."""
    from matplotlib.ticker import MaxNLocator

    picture = axes.imshow(
        similarity.cpu().numpy(), vmin=low, vmax=1, cmap="viridis", origin="lower"
    )
    axes.set(ylabel=names[0], xlabel=names[1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(picture, ax=axes, label="linear CKA (1: equal up to rotation and scale)")
