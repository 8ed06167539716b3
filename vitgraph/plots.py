"""Feature maps as pictures (``pip install 'vitgraph[plots]'``).

From photographs to a figure::

    inputs = encoder.preprocess(images=photos)
    output = encoder(inputs.pixel_values, inputs.grid_thw)
    maps = encoder.feature_maps(output.last_hidden_state, inputs.grid_thw, inputs.tiles)
    plot_feature_maps(photos, maps).savefig("maps.png")

Figures are made without pyplot: nothing global is touched, and no display is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from encoders.inputs import read_images, to_rgb

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_COLUMNS = 5
"""Encoders beside a photograph; more go into further blocks of rows below."""
COLUMN_WIDTH = 2.0
"""Inches per column."""
_NOTE = "Red, green and blue are the three principal components of an encoder's features"
_NOTE_ROTATED = ",\nrotated to agree with the colours of the first encoder."


def require_matplotlib() -> None:
    """Raise unless matplotlib is installed.

    Raises:
        ValueError: matplotlib is not installed; the message says how to install it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "plots need matplotlib: pip install 'vitgraph[plots]', or in a clone pip install "
            "'.[plots]'"
        ) from None


def check_plot(path: Path) -> None:
    """Raise unless a figure can be written to ``path``.

    Raises:
        ValueError: matplotlib is missing, or knows no such file format.
    """
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{path}: the suffix must name a picture format: {', '.join(known)}")


def feature_rgb(maps: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Colour feature maps by their first three principal components, fitted over all maps at once.

    Equal colours therefore mean alike features, within a map and from one map to another. The
    components of two encoders have nothing to do with each other. With ``like``, the three
    components are rotated among themselves until the colours agree best with those of the other
    encoder.

    Args:
        maps: each [t, h, w, D], as ``encoder.feature_maps`` returns them.
        like: colours [t', h', w', 3] that another encoder's maps of the same pictures got, one per
            map.

    Returns:
        One float32 [t, h, w, 3] per map, from 0 to 1, on the CPU.

    Raises:
        ValueError: there is no map, maps differ in their width D or have another layout, or
            ``like`` has another number of maps.
    """
    for features in maps:
        _require_map(features)
    if not maps or len({features.shape[-1] for features in maps}) != 1:
        widths = [features.shape[-1] for features in maps]
        raise ValueError(f"maps of widths {widths}: pass at least one, all of one width")
    flat = [features.detach().float().cpu().flatten(0, -2) for features in maps]
    components = principal_components(torch.cat(flat), 3)
    if like is not None:
        if len(like) != len(maps):
            raise ValueError(f"like: {len(like)} coloured maps for {len(maps)}; pass one per map")
        grids = [(len(m), m.shape[1], m.shape[2]) for m in maps]
        target = torch.cat(list(map(_resample, like, grids)))
        components = rotate_to(components, target)
    low, high = components.quantile(torch.tensor([0.01, 0.99]), dim=0)
    colours = ((components - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    parts = colours.split([len(rows) for rows in flat])
    return [part.view(*m.shape[:-1], 3) for part, m in zip(parts, maps, strict=True)]


def _resample(colours: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Average colours [t', h', w', 3] over the cells of another grid (t, h, w): [t * h * w, 3]."""
    volume = torch.nn.functional.adaptive_avg_pool3d(colours.movedim(-1, 0), shape)
    return volume.flatten(1).T


def _require_map(features: object) -> None:
    if not isinstance(features, Tensor):
        raise ValueError(
            f"{type(features).__name__} where a map belongs: pass the images first, then their "
            "maps [t, h, w, D], as encoder.feature_maps gives them"
        )
    if features.ndim != 4 or features.shape[-1] < 3:
        raise ValueError(
            f"map of shape {tuple(features.shape)}: pass maps [t, h, w, D] with D >= 3, as "
            "encoder.feature_maps gives them"
        )


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


def rotate_to(rows: Tensor, target: Tensor) -> Tensor:
    """Rotate uncorrelated columns so that they agree best with a target (orthogonal Procrustes).

    Args:
        rows: [P, k]; every column is first brought to mean 0 and variance 1.
        target: [P, k].

    Returns:
        [P, k], the product of the standardised rows and an orthogonal k x k matrix.
    """
    rows = (rows - rows.mean(dim=0)) / rows.std(dim=0).clamp(min=1e-12)
    left, _, right = torch.linalg.svd(rows.T @ (target - target.mean(dim=0)))
    return rows @ (left @ right)


def plot_feature_maps(
    images: Sequence[Any],
    maps: Sequence[Tensor] | Mapping[str, Sequence[Tensor]],
    *,
    titles: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Photographs on the left, their feature maps (PCA to RGB) beside them.

    Colours can be compared within a column, as :func:`feature_rgb` says. Those of every further
    encoder are rotated to agree with the first encoder's.

    Args:
        images: paths, PIL images, numpy [H, W, 3] or tensors [3, H, W]; each fills a row.
        maps: one map [t, h, w, D] per image; to compare encoders, one such list per name. Of a
            video the middle time step is shown. Each encoder fills a column; more than five are
            wrapped into further blocks of rows.
        titles: one per image, written beside it.
        title: the title of the whole figure.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.

    Raises:
        ValueError: matplotlib is missing, images or maps are no lists, there are no images or no
            maps, the numbers of images and maps differ, or maps are not laid out in space.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    columns = _read_columns(maps)
    photographs = [pixels.permute(1, 2, 0) for pixels in read_images(images)]
    if not photographs or not columns:
        raise ValueError("nothing to draw: pass at least one image and its map")
    for name, column in columns.items():
        if len(column) != len(photographs):
            raise ValueError(
                f"{name}: {len(column)} maps for {len(photographs)} images; pass one each"
            )
    ratios = [pixels.shape[0] / pixels.shape[1] for pixels in photographs]
    blocks = -(-len(columns) // MOST_COLUMNS)
    width = -(-len(columns) // blocks)
    height = blocks * (0.93 * COLUMN_WIDTH * sum(ratios) + 0.23 * len(ratios) + 0.2) + 0.75
    figure = Figure((COLUMN_WIDTH * (1 + width) + 0.2, height), layout="constrained")
    parts = figure.subfigures(blocks, 1, squeeze=False, hspace=0.02)[:, 0]
    rows, relative = len(ratios), {"height_ratios": ratios}
    grids = [part.subplots(rows, 1 + width, squeeze=False, gridspec_kw=relative) for part in parts]
    for grid in grids:
        _fill_photographs(list(grid[:, 0]), photographs, titles or [""] * rows)
    places = [column for grid in grids for column in grid[:, 1:].T]
    _fill_columns(places, columns, photographs)
    figure.suptitle(title or "", fontsize=11)
    note = _NOTE + (_NOTE_ROTATED if len(columns) > 1 else ".")
    figure.supxlabel(note, fontsize=8, color="dimgrey", wrap=True)
    return figure


def _read_columns(
    maps: Sequence[Tensor] | Mapping[str, Sequence[Tensor]],
) -> Mapping[str, Sequence[Tensor]]:
    """Return the lists of maps by name; the check finds swapped images and maps."""
    columns = maps if isinstance(maps, Mapping) else {"feature map": maps}
    for name, column in columns.items():
        if not isinstance(column, Sequence):
            raise ValueError(
                f"{name}: is one {type(column).__name__}, not a list of maps; pass the images "
                "first, then their maps, in a list also for one"
            )
        for features in column:
            _require_map(features)
    return columns


def _fill_photographs(
    column: Sequence[Axes], photographs: Sequence[Tensor], titles: Sequence[str]
) -> None:
    column[0].set_title("photograph", fontsize=10)
    for axes, pixels, title in zip(column, photographs, titles, strict=True):
        height, width, _ = pixels.shape
        _picture(axes, pixels, (height, width), f"{width} x {height} pixels")
        axes.set_ylabel(title, fontsize=10)


def _fill_columns(
    places: Sequence[Sequence[Axes]],
    columns: Mapping[str, Sequence[Tensor]],
    photographs: Sequence[Tensor],
) -> None:
    """Draw one encoder per column; the columns of the last block that are left stay empty."""
    first: list[Tensor] | None = None
    for column, (name, maps) in zip(places, columns.items(), strict=False):
        colours = feature_rgb(maps, like=first)
        first = first or colours
        column[0].set_title(name, fontsize=10)
        for axes, coloured, pixels in zip(column, colours, photographs, strict=True):
            steps, height, width, _ = coloured.shape
            when = f", step {steps // 2 + 1} of {steps}" if steps > 1 else ""
            label = f"{width} x {height} patches{when}"
            _picture(axes, coloured[steps // 2], pixels.shape[:2], label)
    for column in places[len(columns) :]:
        for axes in column:
            axes.set_axis_off()


def nearest_patches(
    source: Tensor, target: Tensor, points: Sequence[tuple[int, int]]
) -> list[tuple[int, int, float]]:
    """For patches of one feature map, find the most similar patch of another.

    Similarity is the cosine between features from which the mean over both maps was subtracted.

    Args:
        source, target: [h, w, D] each, not necessarily of one size.
        points: (row, column) of patches in ``source``.

    Returns:
        (row, column, cosine similarity) in ``target``, one per point.

    Raises:
        ValueError: a point lies outside of ``source``.
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
        title: the title of the figure.

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
    figure = Figure(figsize=(10, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, image in zip((left, right), images, strict=True):
        pixels = to_rgb(image).permute(1, 2, 0)
        _picture(axes, pixels, pixels.shape[:2], f"{pixels.shape[1]} x {pixels.shape[0]} pixels")
    colours = colormaps["turbo"](torch.linspace(0.05, 0.95, len(points)).numpy())
    for point, (row, column, cosine), colour in zip(points, matches, colours, strict=True):
        start = _centre(point, source.shape, left)
        end = _centre((row, column), target.shape, right)
        _dot(left, start, colour, "")
        _dot(right, end, colour, f"{cosine:.2f}")
        figure.add_artist(
            ConnectionPatch(start, end, "data", "data", axesA=left, axesB=right, color=colour)
        )
    left.set_title("chosen patches", fontsize=9)
    right.set_title("nearest patches (cosine similarity of features less their mean)", fontsize=9)
    figure.suptitle(title or "", fontsize=11)
    return figure


def _picture(axes: Axes, pixels: Tensor, shape: Sequence[int], label: str) -> None:
    """Draw without ticks, in the coordinates of the photograph of ``shape`` (height, width)."""
    extent = (0, shape[1], shape[0], 0)
    axes.imshow(pixels.numpy(), extent=extent, interpolation="nearest", aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel(label, fontsize=8, color="dimgrey", labelpad=2)
    axes.spines[:].set_visible(False)


def _dot(axes: Axes, at: tuple[float, float], colour: Any, label: str) -> None:
    axes.plot(*at, "o", color=colour, markeredgecolor="white", markersize=8)
    if label:
        axes.annotate(
            label,
            at,
            xytext=(6, 6),
            textcoords="offset points",
            color="white",
            fontsize=8,
            bbox={"facecolor": "black", "alpha": 0.5, "pad": 1},
        )


def _centre(point: Sequence[int], shape: Sequence[int], axes: Axes) -> tuple[float, float]:
    """Return the centre of a patch of a map [h, w, D], in the coordinates of the photograph."""
    (_, width), (height, _) = axes.get_xlim(), axes.get_ylim()
    return (point[1] + 0.5) * width / shape[1], (point[0] + 0.5) * height / shape[0]
