"""Arrange rows of features, of patches, tiles or several views, as maps in raster order.

Shapes: P patches, N tokens, D width of a row, h rows and w columns of a map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from ..data import Grid, Tiling, VisionInputs
from ..layers.assembly import SEPARATOR, Picture

if TYPE_CHECKING:
    from .vision_encoder import VisionEncoder


def raster_maps(
    features: Tensor, grids: Sequence[Grid], merge: int, frames: int = 1
) -> list[Tensor]:
    """Arrange rows, which come in merge-block order, as maps in raster order.

    Rows of a tower that merges 2x2 patches lie block by block, so that 4 neighbours in memory make
    one token. For a grid of 4x4 patches::

        0  1 |  4  5
        2  3 |  6  7        rows 0..3 are the top left block, 4..7 the top right one
        ------------
        8  9 | 12 13
       10 11 | 14 15

    Merged tokens (one row per block) are in raster order already, on a grid of h/2 x w/2.

    Args:
        features: [P, D], one row per patch, or [N, D], one row per token.
        grids: ``(t, h, w)`` per item, in patches.
        merge: side of a block in patches.
        frames: frames of the grid that are merged into one frame of tokens, mostly 1.

    Returns:
        [t, h, w, D] per item in raster order, a map of patches or of tokens like ``features``.

    Raises:
        ValueError: no tensor, or one with neither a row per patch nor a row per token.
    """
    patches = [t * h * w for t, h, w in grids]
    times = [-(-t // frames) for t, _, _ in grids]
    tokens = [t * h * w // merge**2 for t, (_, h, w) in zip(times, grids, strict=True)]
    if features.shape[0] == sum(patches):
        return [
            rearrange(part, "(t h w a b) d -> t (h a) (w b) d", t=t, h=h // merge, a=merge, b=merge)
            for part, (t, h, _) in zip(features.split(patches), grids, strict=True)
        ]
    if features.shape[0] == sum(tokens):
        return [
            part.unflatten(0, (t, h // merge, w // merge))
            for part, t, (_, h, w) in zip(features.split(tokens), times, grids, strict=True)
        ]
    raise ValueError(
        f"features have {features.shape[0]} rows: the grid makes {sum(patches)} patches "
        f"or {sum(tokens)} tokens; pass the inputs that these features were made of"
    )


def stitch_tiles(maps: Tensor, tiling: Tiling) -> Tensor:
    """Join the tiles of an image to one map.

    Args:
        maps: [t, h, w, D], one map per tile, the thumbnail last.
        tiling: (columns, rows, thumbnail) of the image; (1, 1, False) if there are no tiles.

    Returns:
        [1, rows*h, columns*w, D] without the thumbnail; ``maps`` itself if there are no tiles.

    Raises:
        ValueError: another number of tiles than the tiling makes.
    """
    columns, rows, thumbnail = tiling
    if (columns, rows, thumbnail) == (1, 1, False):
        return maps
    if maps.shape[0] != columns * rows + thumbnail:
        raise ValueError(
            f"{columns}x{rows} tiles{' and a thumbnail' if thumbnail else ''} are "
            f"{columns * rows + thumbnail}, the features have {maps.shape[0]}"
        )
    return rearrange(maps[: columns * rows], "(r c) h w d -> 1 (r h) (c w) d", r=rows)


def stitch_items(maps: Sequence[Tensor], tiles: Sequence[Tiling] | None) -> list[Tensor]:
    """Join the tiles of each item to one map, as :func:`stitch_tiles` does.

    Args:
        maps: [t, h, w, D] per item.
        tiles: (columns, rows, thumbnail) per item; None leaves the maps as they are.

    Raises:
        ValueError: another number of items or of tiles than ``tiles`` says.
    """
    if tiles is None:
        return list(maps)
    if len(tiles) != len(maps):
        raise ValueError(
            f"tiles has {len(tiles)} items, and grid_thw {len(maps)}: pass one tiling per item"
        )
    return [stitch_tiles(*pair) for pair in zip(maps, tiles, strict=True)]


def maps_of_views(
    features: Tensor,
    paths: Mapping[str, VisionEncoder],
    inputs: VisionInputs,
    tilings: Sequence[tuple[int, int]],
    *,
    image_first: bool = False,
    clips: bool = False,
) -> list[dict[str, Tensor]]:
    """Return the maps of each item by path; in ``features``, its tiles come before its whole image.

    Args:
        features: rows of patches or of tokens of all items, [P, D] or [N, D].
        paths: the encoders of the paths "image" and "tiles".
        inputs: the result of ``preprocess``.
        tilings: the arrangement of the tiles of each item, (columns, rows).
        image_first: whether its whole image comes before its tiles instead.
        clips: whether the views in the path "image" of an item are the frames of a clip.

    Returns:
        [t, h, w, D] by name. A view of h*w patches or tokens makes [1, h, w, D], and tiles make
        [1, rows*h, columns*w, D].

    Raises:
        ValueError: ``features`` have neither a row per patch nor a row per token.
    """
    views = _views(inputs, tilings, image_first, clips)
    patches = [prod(grid) for _, _, grid, _ in views]
    specs = [paths[name].item_specs([grid])[0] for _, name, grid, _ in views]
    tokens = [spec.output_tokens for spec in specs]
    merged = [spec.merged_rows or count for spec, count in zip(specs, patches, strict=True)]
    if len(features) not in (sum(patches), sum(merged), sum(tokens)):
        raise ValueError(
            f"features have {len(features)} rows: these inputs make {sum(patches)} patches or "
            f"{sum(tokens)} tokens"
        )
    by_patch = len(features) == sum(patches)
    maps: list[dict[str, list[Tensor]]] = [{} for _ in inputs.grid_thw]
    counts = patches if by_patch else merged if len(features) == sum(merged) else tokens
    parts = features.split(counts)
    for rows, (item, name, grid, tiling) in zip(parts, views, strict=True):
        views_alone = by_patch and len(paths[name].row_shape) > 1
        part = rows.unflatten(0, (grid[0], -1)) if views_alone else rows
        maps[item].setdefault(name, []).extend(paths[name].feature_maps(part, [grid], [tiling]))
    return [{name: torch.cat(frames) for name, frames in item.items()} for item in maps]


def _views(
    inputs: VisionInputs, tilings: Sequence[tuple[int, int]], image_first: bool, clips: bool
) -> list[tuple[int, str, Grid, Tiling]]:
    """Return (item number, path name, (t, h, w), (columns, rows, False)) per item, frame and path.

    The list is in the order in which ``TilesThenImage.join`` concatenates the rows of views: of
    an item the whole image last or, if ``image_first``, first; of a clip one frame after another.
    """
    counts, views = inputs.grid_thw[:, 0].tolist(), []
    for name, (_, grid_thw, items) in inputs.paths.items():
        for item, (t, h, w) in zip(items, grid_thw.tolist(), strict=True):
            frames = counts[item] if clips else 1
            t //= frames
            columns, rows = (1, 1) if name == "image" and t == 1 else tilings[item]
            view = item, name, (t, h, w), (columns, rows, False)
            order = (name == "image") != image_first
            views += [((item, frame, order), view) for frame in range(frames)]
    return [view for _, view in sorted(views, key=lambda entry: entry[0])]


def maps_of_sequences(
    features: Tensor, order: Sequence[str], items: Sequence[Mapping[str, Picture]]
) -> list[dict[str, Tensor]]:
    """Return the maps of each item by the name of the view, such as "image" or "tiles".

    Args:
        features: [rows, D], the sequences of all items, with or without learned newlines and
            separators.
        order: the names of all views, and ``SEPARATOR``, in the order of a sequence.
        items: per item, the arrangement of each of its views.

    Returns:
        [1, rows, columns, D] by name.

    Raises:
        ValueError: ``features`` have the rows of neither kind of sequence.
    """
    grids = [{name: picture.grid for name, picture in item.items()} for item in items]
    pairs = zip(split_items(features, grids), grids, strict=True)
    return [take_apart(rows, order, item) for rows, item in pairs]


def sequence_length(grids: Mapping[str, tuple[int, int]]) -> int:
    """Return the number of tokens of an image with learned newlines and separator.

    ``grids`` has the rows and columns of tokens of each view. Each row ends with a newline.
    """
    return 1 + sum(rows * (columns + 1) for rows, columns in grids.values())


def take_apart(
    rows: Tensor, order: Sequence[str], grids: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """Return the views of an image, by name, from its sequence of tokens; undo ``assemble``.

    Args:
        rows: [tokens, D] as :func:`encoders.layers.assembly.assemble` returned it, or the same
            without the learned newlines and separator.
        order: the names of all views, and ``SEPARATOR``, in the order of the sequence.
        grids: rows and columns, in tokens, of each view that the image has.

    Returns:
        [1, rows, columns, D] by name.
    """
    learned = len(rows) == sequence_length(grids)
    views, start = {}, 0
    for name in order:
        if name in grids:
            height, width = grids[name]
            count = height * (width + learned)
            lines = rows[start : start + count].unflatten(0, (height, width + learned))
            views[name] = lines[None, :, :width]
            start += count
        elif name == SEPARATOR:
            start += learned
    return views


def split_items(features: Tensor, grids: Sequence[Mapping[str, tuple[int, int]]]) -> list[Tensor]:
    """Split the features of all items into the features of each item.

    Args:
        features: [rows, D], with or without the learned newlines and separator of every item.
        grids: per item, rows and columns in tokens of each of its views.

    Returns:
        [rows, D] per item.

    Raises:
        ValueError: ``features`` have the rows of neither kind of sequence.
    """
    token_counts = [sequence_length(item) for item in grids]
    row_counts = [sum(map(prod, item.values())) for item in grids]
    if len(features) not in (sum(token_counts), sum(row_counts)):
        raise ValueError(
            f"features have {len(features)} rows: these inputs make {sum(token_counts)} tokens of "
            f"pooler_output or {sum(row_counts)} rows without newlines and separators"
        )
    return list(features.split(token_counts if len(features) == sum(token_counts) else row_counts))
