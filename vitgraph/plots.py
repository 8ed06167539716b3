"""Feature maps as pictures (``pip install 'vitgraph[plots]'``).

Three lines from photographs to a figure::

    inputs = encoder.preprocess(images=photos)
    maps = encoder.feature_maps(encoder(*inputs[:2]).last_hidden_state, *inputs[1:])
    plot_feature_maps(photos, maps).savefig("maps.png")

Figures are made without pyplot: nothing global is touched, and no display is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from encoders.images import to_rgb

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Raise unless matplotlib is installed.

    Raises:
        ValueError: it is not; says how to install it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'vitgraph[plots]'") from None


def feature_rgb(maps: Sequence[Tensor]) -> list[Tensor]:
    """Colour feature maps by their first three principal components, fitted over all maps at once.

    Equal colours therefore mean alike features, within a map and from one map to another.

    Args:
        maps: each [t, h, w, D], as ``encoder.feature_maps`` returns them.

    Returns:
        As many float32 [t, h, w, 3] from 0 to 1, on the CPU.

    Raises:
        ValueError: no map, or maps of different width D.
    """
    if not maps or len({features.shape[-1] for features in maps}) != 1:
        widths = [features.shape[-1] for features in maps]
        raise ValueError(f"maps of widths {widths}: pass at least one, all of one width")
    flat = [features.detach().float().cpu().flatten(0, -2) for features in maps]
    components = principal_components(torch.cat(flat), 3)
    low, high = components.quantile(torch.tensor([0.01, 0.99]), dim=0)
    colours = ((components - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    parts = colours.split([len(rows) for rows in flat])
    return [part.view(*m.shape[:-1], 3) for part, m in zip(parts, maps, strict=True)]


def principal_components(rows: Tensor, count: int) -> Tensor:
    """Coordinates of ``rows`` [P, D] along their ``count`` axes of largest variance: [P, count].

    Every feature is first brought to unit variance, or the few outlier channels that vision
    transformers grow would be all one sees. The sign is fixed (largest loading positive), so the
    same features always give the same colours.
    """
    centred = rows - rows.mean(dim=0)
    centred = centred / centred.std(dim=0).clamp(min=1e-12)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    axes = axes[:, -count:].flip(1)
    strongest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    return centred @ (axes * strongest.sign())


def plot_feature_maps(
    images: Sequence[Any],
    maps: Sequence[Tensor] | Mapping[str, Sequence[Tensor]],
    *,
    titles: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Photographs on the left, their feature maps (PCA to RGB) beside them.

    Args:
        images: PIL images, numpy [H, W, 3] or tensors [3, H, W], one a row.
        maps: one map [t, h, w, D] an image; or, to compare encoders, such a list a name. Of a video
            the middle frame pair is shown.
        titles: one an image, written beside it.
        title: of the whole figure.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.

    Raises:
        ValueError: matplotlib is missing, or there are not as many maps as images.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    columns = maps if isinstance(maps, Mapping) else {"feature map": maps}
    for name, column in columns.items():
        if len(column) != len(images):
            raise ValueError(f"{name}: {len(column)} maps for {len(images)} images; pass one each")
    shown = [to_rgb(image).permute(1, 2, 0) for image in images]
    ratios = [pixels.shape[0] / pixels.shape[1] for pixels in shown]
    width, header = 2.4, 0.35 * (1 + bool(title))
    height = 0.97 * width * sum(ratios) + 0.1 * len(shown) + header
    figure = Figure((width * (1 + len(columns)) + 0.2 * bool(titles), height), layout="constrained")
    grid = figure.subplots(
        len(shown), 1 + len(columns), squeeze=False, gridspec_kw={"height_ratios": ratios}
    )
    for axes, pixels in zip(grid[:, 0], shown, strict=True):
        _picture(axes, pixels, pixels.shape)
    for number, (name, column) in enumerate(columns.items(), start=1):
        for axes, colours, pixels in zip(grid[:, number], feature_rgb(column), shown, strict=True):
            _picture(axes, colours[len(colours) // 2], pixels.shape)
        grid[0, number].set_title(name, fontsize=9)
    grid[0, 0].set_title("photograph", fontsize=9)
    for axes, label in zip(grid[:, 0], titles or [], strict=False):
        axes.set_ylabel(label, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def nearest_patches(
    source: Tensor, target: Tensor, points: Sequence[tuple[int, int]]
) -> list[tuple[int, int, float]]:
    """For patches of one feature map, the most similar patch of another.

    Args:
        source, target: [h, w, D] each, not necessarily of one size.
        points: (row, column) of patches in ``source``.

    Returns:
        (row, column, cosine similarity) in ``target``, one a point.

    Raises:
        ValueError: a point outside of ``source``.
    """
    height, width, _ = source.shape
    for row, column in points:
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(f"point ({row}, {column}) lies outside of the {height}x{width} map")
    mean = torch.cat((source.flatten(0, 1), target.flatten(0, 1))).float().mean(dim=0)
    queries = torch.stack([source[row, column] for row, column in points]).float() - mean
    keys = target.flatten(0, 1).float() - mean
    similarity = torch.nn.functional.cosine_similarity(queries[:, None], keys[None], dim=-1)
    best = similarity.max(dim=1)
    return [
        (int(index) // target.shape[1], int(index) % target.shape[1], float(value))
        for value, index in zip(best.values, best.indices, strict=True)
    ]


def plot_nearest_patches(
    images: tuple[Any, Any],
    maps: tuple[Tensor, Tensor],
    points: Sequence[tuple[int, int]],
    *,
    title: str | None = None,
) -> Figure:
    """Two photographs, and a line from each chosen patch of the first to its nearest in the second.

    Args:
        images: the two photographs.
        maps: their feature maps [1, h, w, D] or [h, w, D].
        points: (row, column) of patches in the first map.
        title: of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: matplotlib is missing, or a point lies outside of the first map.
    """
    require_matplotlib()
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import ConnectionPatch

    source, target = (features[0] if features.ndim == 4 else features for features in maps)
    matches = nearest_patches(source, target, points)
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, image in zip((left, right), images, strict=True):
        pixels = to_rgb(image).permute(1, 2, 0)
        _picture(axes, pixels, pixels.shape)
    colours = colormaps["turbo"](torch.linspace(0.05, 0.95, len(points)).numpy())
    for point, match, colour in zip(points, matches, colours, strict=True):
        start = _centre(point, source.shape, left)
        end = _centre(match[:2], target.shape, right)
        left.plot(*start, "o", color=colour, markeredgecolor="white", markersize=8)
        right.plot(*end, "o", color=colour, markeredgecolor="white", markersize=8)
        right.annotate(
            f"{match[2]:.2f}", end, xytext=(6, 6), textcoords="offset points",
            color="white", fontsize=8, bbox={"facecolor": "black", "alpha": 0.5, "pad": 1},
        )  # fmt: skip
        figure.add_artist(
            ConnectionPatch(start, end, "data", "data", axesA=left, axesB=right, color=colour)
        )
    left.set_title("chosen patches", fontsize=9)
    right.set_title("nearest patches (cosine similarity)", fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _picture(axes: Axes, pixels: Tensor, shape: Sequence[int]) -> None:
    """Draw without ticks, in the coordinates of the photograph of ``shape``."""
    axes.imshow(
        pixels.numpy(), extent=(0, shape[1], shape[0], 0), interpolation="nearest", aspect="equal"
    )
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _centre(point: Sequence[int], shape: Sequence[int], axes: Axes) -> tuple[float, float]:
    """Of a patch of a map of ``shape`` [h, w, D], in the coordinates of the photograph."""
    (_, width), (height, _) = axes.get_xlim(), axes.get_ylim()
    return (point[1] + 0.5) * width / shape[1], (point[0] + 0.5) * height / shape[0]
