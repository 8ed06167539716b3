"""The accuracy of probes after each block, and the similarity of two towers, as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..analysis.probes import BlockScores
from ..packages import require_matplotlib
from .similarity import draw_similarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TICKS = 10
"""The most blocks whose numbers stand beside an axis of similarities."""
_PANELS = (("neighbours", "nearest neighbours"), ("probe", "linear probe"))
"""The fields of :class:`BlockScores` and the titles of their panels."""


def plot_probes(
    scores: Mapping[str, Sequence[BlockScores]],
    *,
    similarity: Tensor | None = None,
    chance: float | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the accuracy of probes after each block of one or several towers.

    Args:
        scores: name of a tower -> the result of ``vitgraph.probe_blocks``.
        similarity: [L, L'], linear CKA of the same blocks of the first two towers, drawn beside the
            accuracies; None for none.
        chance: the accuracy of guessing, drawn as a line; None for none.
        title: title of the figure; None for none.

    Returns:
        The figure; ``figure.savefig(path)`` writes it. The bands are 95 % intervals.

    Raises:
        ValueError: matplotlib is missing, or there is no score.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not scores or not all(scores.values()):
        raise ValueError("nothing to draw: pass the scores of at least one block")
    count = len(_PANELS) + (similarity is not None)
    figure = Figure((4.2 * count, 3.7), layout="constrained")
    panels = list(figure.subplots(1, count))
    for axes, (field, name) in zip(panels, _PANELS, strict=False):
        for tower, blocks in scores.items():
            numbers = [one.block for one in blocks]
            accuracies = [one.neighbours if field == "neighbours" else one.probe for one in blocks]
            (line,) = axes.plot(numbers, [one.value for one in accuracies], "o-", label=tower, ms=4)
            low, high = [one.low for one in accuracies], [one.high for one in accuracies]
            axes.fill_between(numbers, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        if chance is not None:
            axes.axhline(chance, color="tab:gray", linestyle=":", label="chance")
        axes.set(xlabel="block", ylabel="accuracy (share of 1), 95 % interval", ylim=(0, 1.02))
        axes.set_title(name, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=8)
    if similarity is not None:
        first, second, *_ = scores.items()
        draw_similarity(figure, panels[-1], similarity, (first[0], second[0]), low=None)
        for axis, (_, blocks) in ((panels[-1].yaxis, first), (panels[-1].xaxis, second)):
            step = -(-len(blocks) // MOST_TICKS)
            ticks = range(0, len(blocks), step)
            axis.set_ticks(ticks, [str(blocks[tick].block) for tick in ticks])
        panels[-1].set_title("similarity of blocks", fontsize=10)
    figure.suptitle(title or "", fontsize=11)
    return figure
