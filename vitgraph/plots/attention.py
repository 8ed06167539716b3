"""Attention of the blocks of a tower over a photograph, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from encoders.inputs import ImageLike, to_rgb

from ..packages import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 5
"""The most panels (pictures with their axes) side by side in a row of a figure."""
PANEL_WIDTH = 2.2
"""The width of a panel in inches."""
_MARK = {"color": "white", "markeredgecolor": "black", "markersize": 9}


def plot_attention(
    image: ImageLike,
    maps: Tensor | Sequence[Tensor],
    *,
    queries: Sequence[Sequence[int]] = (),
    titles: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw attention maps over the photograph that they belong to.

    Args:
        image: the photograph, as ``preprocess`` takes it.
        maps: the result of ``vitgraph.attention_maps`` for this photograph: per block one map
            [t, h, w], or one map per head [H, t, h, w]. Each map gets a panel. Only the middle of
            the t time steps of a video is drawn.
        queries: the patches (t, row, column) whose attention the maps show, as ``attention_maps``
            took them; each gets a mark on every picture. Only those at the drawn time step are
            marked.
        titles: title of each panel; None leaves the panels without titles.
        title: title of the figure; None for none.

    Returns:
        The figure; ``figure.savefig(path)`` writes it. Each panel has its own colour scale, from 0
        to its largest attention weight, which is printed below the panel.

    Raises:
        ValueError: matplotlib is missing, ``maps`` is empty or holds something else than attention
            maps, a query is no patch of a map, or the number of titles is not that of the panels.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    panels = _panels(maps)
    marks = [_marks(panel, _steps(maps), queries) for panel in panels]
    names = [""] * len(panels) if titles is None else list(titles)
    if len(names) != len(panels):
        raise ValueError(f"{len(names)} titles for {len(panels)} panels: pass one each")
    pixels = to_rgb(image).permute(1, 2, 0)
    height, width, _ = pixels.shape
    columns = min(1 + len(panels), PANELS)
    rows = -(-(1 + len(panels)) // columns)
    panel_height = PANEL_WIDTH * height / width + 0.45
    figure = Figure((PANEL_WIDTH * columns, rows * panel_height + 0.4), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    axes[0].imshow(pixels.numpy(), extent=(0, width, height, 0))
    axes[0].set_title("photograph", fontsize=9)
    for panel, weights, name in zip(axes[1:], panels, names, strict=False):
        _draw_weights(panel, pixels, weights, name)
    for panel, points in zip(axes, [marks[0], *marks], strict=False):
        for column, row in points:
            panel.plot(column * width, row * height, "P", **_MARK)
    for panel in axes:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
    for panel in axes[1 + len(panels) :]:
        panel.set_axis_off()
    figure.suptitle(title or "", fontsize=11)
    return figure


def _draw_weights(panel: Axes, pixels: Tensor, weights: Tensor, name: str) -> None:
    """Draw attention weights [h, w] over a grey photograph, given as uint8 [H, W, 3]."""
    grey = pixels.float().mean(-1) / 255
    extent = (0, pixels.shape[1], pixels.shape[0], 0)
    panel.imshow(grey.numpy(), cmap="gray", vmin=0, vmax=1, extent=extent)
    panel.imshow(weights.numpy(), cmap="inferno", vmin=0, alpha=0.65, extent=extent, aspect="equal")
    panel.set_title(name, fontsize=9)
    panel.set_xlabel(f"largest weight {float(weights.max()):.2g}", fontsize=8, color="dimgrey")


def _steps(maps: Tensor | Sequence[Tensor]) -> int:
    """Return the number of time steps of attention maps."""
    return (maps if isinstance(maps, Tensor) else maps[0]).shape[-3]


def _marks(
    panel: Tensor, steps: int, queries: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """Return the middles (x, y) of the asked patches, as fractions of the sides of the picture."""
    rows, columns = panel.shape
    for query in queries:
        inside = [0 <= n < size for n, size in zip(query, (steps, rows, columns), strict=False)]
        if len(query) != 3 or not all(inside):
            raise ValueError(
                f"query {tuple(query)}: the map has {steps} x {rows} x {columns} patches; pass "
                "(t, row, column) of one of them"
            )
    return [
        ((column + 0.5) / columns, (row + 0.5) / rows)
        for t, row, column in queries
        if t == steps // 2
    ]


def _panels(maps: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the attention maps as a list of pictures [h, w], one per panel, float32 on the CPU."""
    panels: list[Tensor] = []
    for weights in [maps] if isinstance(maps, Tensor) else maps:
        if not isinstance(weights, Tensor) or weights.ndim not in (3, 4):
            shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(
                f"a map is {shape}: pass the maps [t, h, w] or [H, t, h, w] of one photograph, "
                "vitgraph.attention_maps(encoder, [photograph])[0]"
            )
        heads = weights[None] if weights.ndim == 3 else weights
        panels += [head[len(head) // 2].detach().float().cpu() for head in heads]
    if not panels:
        raise ValueError("nothing to draw: pass at least one map")
    return panels
