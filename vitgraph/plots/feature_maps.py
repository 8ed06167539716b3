"""Photographs and their feature maps beside one another, as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from encoders.inputs import ImageLike, read_images

from ..analysis.colours import Maps, feature_rgb, require_map
from ..packages import require_matplotlib
from ..terminal import counted
from .figures import draw_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_COLUMNS = 5
"""The most columns of feature maps beside the photographs; more encoders go into blocks below."""
COLUMN_WIDTH = 2.0
"""The width of a column of pictures in inches."""
_NOTE = "Red, green and blue are the three principal components of an encoder's features"
_NOTE_ROTATED = ",\nrotated to agree with the colours of the first encoder."


def plot_feature_maps(
    images: Sequence[ImageLike],
    maps: Maps | Mapping[str, Maps],
    *,
    titles: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw photographs on the left and their feature maps (PCA to RGB) beside them.

    Equal colours mean similar features within a column. The colours of every further encoder are
    rotated to agree with the first encoder's (:func:`vitgraph.analysis.colours.feature_rgb`).

    Args:
        images: paths, PIL images, numpy [H, W, 3] or tensors [3, H, W]; each fills a row.
        maps: the result of ``encoder.feature_maps``: per image a map [t, h, w, D], or a dict with a
            map per input path ("image", "tiles"), of which "image" is drawn. To compare encoders, a
            dict: name -> such a list. The middle time step of a video is shown. Each encoder fills
            a column; more than five continue in further blocks of rows.
        titles: title of each image, written beside it; None for none.
        title: title of the whole figure; None for none.

    Returns:
        The figure; ``figure.savefig(path)`` writes it.

    Raises:
        ValueError: matplotlib is missing, images or maps are no lists, there are no images or no
            maps, the numbers of images and maps differ, or a map is not [t, h, w, D].
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    columns = _read_columns(maps)
    photographs = [pixels.permute(1, 2, 0) for pixels in read_images(images)]
    if not photographs or not columns:
        raise ValueError("nothing to draw: pass at least one image and its map")
    for name, column in columns.items():
        if len(column) != len(photographs):
            counts = f"{counted(len(column), 'map')} for {counted(len(photographs), 'image')}"
            raise ValueError(f"{name}: {counts}; pass one each")
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
    axes_of_columns = [column for grid in grids for column in grid[:, 1:].T]
    _fill_columns(axes_of_columns, columns, photographs)
    figure.suptitle(title or "", fontsize=11)
    note = _NOTE + (_NOTE_ROTATED if len(columns) > 1 else ".")
    figure.supxlabel(note, fontsize=8, color="dimgrey", wrap=True)
    return figure


def crop_padding(features: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the part of a feature map that shows the image, without the padding around it.

    The towers of DeepSeek see an image in the middle of a square with a border of one colour.

    Args:
        features: map [t, h, w, D] of the padded image; the image lies in its middle and fills one
            side.
        size: (width, height) of the image in pixels.

    Returns:
        The map [t, h', w', D] of the patches of the image, for :func:`plot_feature_maps`.
    """
    rows, columns = features.shape[1:3]
    width, height = size
    scale = min(rows / height, columns / width)
    return features[:, _middle(rows, scale * height), _middle(columns, scale * width)]


def _middle(length: int, part: float) -> slice[int, int, None]:
    count = max(round(part), 1)
    start = (length - count) // 2
    return slice(start, start + count)


def _read_columns(maps: Maps | Mapping[str, Maps]) -> Mapping[str, Sequence[Tensor]]:
    """Return the feature maps of each column of the figure, by the name of the column."""
    columns: dict[str, Sequence[Tensor]] = {}
    for name, column in (maps if isinstance(maps, Mapping) else {"feature map": maps}).items():
        if not isinstance(column, Sequence):
            raise ValueError(
                f"{name}: is one {type(column).__name__}, not a list of maps; pass the images "
                "first, then their maps, in a list also for one"
            )
        columns[name] = [
            item_maps["image"] if isinstance(item_maps, Mapping) else item_maps
            for item_maps in column
        ]
        for features in columns[name]:
            require_map(features)
    return columns


def _fill_photographs(
    column: Sequence[Axes], photographs: Sequence[Tensor], titles: Sequence[str]
) -> None:
    column[0].set_title("photograph", fontsize=10)
    for axes, pixels, title in zip(column, photographs, titles, strict=True):
        height, width, _ = pixels.shape
        draw_picture(axes, pixels, (height, width), f"{width} x {height} pixels")
        axes.set_ylabel(title, fontsize=10)


def _fill_columns(
    axes_of_columns: Sequence[Sequence[Axes]],
    columns: Mapping[str, Sequence[Tensor]],
    photographs: Sequence[Tensor],
) -> None:
    """Draw the coloured feature maps of one encoder per column."""
    first: list[Tensor] | None = None
    for column, (name, maps) in zip(axes_of_columns, columns.items(), strict=False):
        colours = feature_rgb(maps, like=first)
        first = first or colours
        column[0].set_title(name, fontsize=10)
        for axes, coloured, pixels in zip(column, colours, photographs, strict=True):
            steps, height, width, _ = coloured.shape
            step_text = f", step {steps // 2 + 1} of {steps}" if steps > 1 else ""
            label = f"{width} x {height} patches{step_text}"
            draw_picture(axes, coloured[steps // 2], pixels.shape[:2], label)
    for column in axes_of_columns[len(columns) :]:
        for axes in column:
            axes.set_axis_off()
