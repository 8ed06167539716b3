"""The size to which an image is resized, and the grid of tiles into which it is cut.

Source: ``smart_resize`` of transformers 5.23.0's Qwen2-VL image, Qwen3-VL video and GLM processors,
``get_resize_output_image_size`` of its PixtralImageProcessor and its ``image_transforms``,
``get_optimal_tiled_canvas`` of its GotOcr2ImageProcessor (OpenGVLab's ``dynamic_preprocess``), and
``select_best_resolution`` of transformers and of deepseek-ai/DeepSeek-VL2 at commit ef9f91e.
Python's ``round`` (half to even) is part of the definitions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

MOST_TILES = 1024
"""The most tiles that one image may be cut into. Published checkpoints make at most 40."""
MOST_PIXELS = 1 << 28
"""The largest area in pixels that an image may be resized to: 16384x16384, which are 3 GiB of
float32."""

_MAX_ASPECT = 200
"""The largest ratio of the sides, as in ``smart_resize`` of transformers 5.23.0's Qwen2-VL."""


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the size that a Qwen tower resizes an image to.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        factor: height and width of the result are multiples of it.
        min_pixels: smallest area of the result.
        max_pixels: largest area of the result, except that each side has at least ``factor``.

    Returns:
        Height and width in about the shape of the image.

    Raises:
        ValueError: an aspect ratio over 200, an image without pixels, or a ``factor``,
            ``min_pixels`` or ``max_pixels`` below 1.
    """
    return _fit(1, 1, height, width, factor, min_pixels, max_pixels)


def smart_resize_video(
    frames: int,
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    temporal_factor: int = 2,
) -> tuple[int, int]:
    """Return the size to which Qwen3-VL resizes frames of videos, and GLM-4V also images.

    Frames smaller than ``factor`` on a side are first scaled up to it, keeping their shape.

    Args:
        frames: number of frames.
        height: height of a frame in pixels.
        width: width of a frame in pixels.
        factor: height and width of the result are multiples of it.
        min_pixels: smallest area of all frames of the result together.
        max_pixels: largest area of all frames of the result together.
        temporal_factor: the number of frames is rounded to a multiple of it for the bounds.

    Returns:
        Height and width in about the shape of a frame.

    Raises:
        ValueError: an aspect ratio over 200, no frames or frames without pixels, or a ``factor``,
            ``min_pixels`` or ``max_pixels`` below 1.
    """
    if height < factor or width < factor:
        _check_shape(height, width)
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    rounded = round(frames / temporal_factor) * temporal_factor
    return _fit(frames, rounded, height, width, factor, min_pixels, max_pixels)


def _fit(
    frames: int,
    rounded_frames: int,
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    _check_shape(height, width)
    for name, number in (
        ("frames", frames),
        ("factor", factor),
        ("min_pixels", min_pixels),
        ("max_pixels", max_pixels),
    ):
        if number < 1:
            raise ValueError(f"{name}={number}: must be at least 1")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    pixels = rounded_frames * new_height * new_width
    if pixels > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return new_height, new_width


def _check_shape(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ValueError(f"is {width}x{height} pixels: an image needs at least one")
    if max(height, width) > _MAX_ASPECT * min(height, width):
        aspect = max(height, width) / min(height, width)
        raise ValueError(
            f"is {width}x{height} pixels, aspect ratio {aspect:.0f}: this tower takes at most "
            f"{_MAX_ASPECT}; crop the image or pad it"
        )


def canvas_size(
    frames: int,
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    temporal_factor: int = 2,
) -> tuple[int, int]:
    """Return the size of the canvas that GLM-5 lays the frames of an image or a video on.

    Args:
        frames: number of frames; an image counts as ``temporal_factor``.
        height: height of a frame in pixels.
        width: width of a frame in pixels.
        factor: height and width of the result are multiples of it.
        min_pixels: smallest area of all frames of the result together.
        max_pixels: largest area of all frames of the result together.
        temporal_factor: the number of frames is rounded to a multiple of it for the bounds.

    Returns:
        Height and width: those of a frame, scaled first if the area would be out of bounds, and
        rounded up to multiples of ``factor``.

    Raises:
        ValueError: ``max_pixels`` is below the area of one token in each frame.
    """
    rounded = max(temporal_factor, round(frames / temporal_factor) * temporal_factor)
    if rounded * factor**2 > max_pixels:
        raise ValueError(
            f"max_pixels={max_pixels}: {frames} frames have at least {rounded * factor**2} pixels, "
            f"{factor}x{factor} each: raise max_pixels or pass fewer frames"
        )
    new_height, new_width = _up(height, factor), _up(width, factor)
    if rounded * new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        new_height = _up(math.ceil(height * grow), factor)
        new_width = _up(math.ceil(width * grow), factor)
    if rounded * new_height * new_width <= max_pixels:
        return new_height, new_width

    def around(content: int) -> tuple[int, int]:
        other_side = max(1, math.floor(width * content / height))
        return _up(content, factor), _up(other_side, factor)

    heights = range(1, height + 1)
    fitting = bisect_right(heights, max_pixels, key=lambda n: rounded * math.prod(around(n)))
    return around(fitting) if fitting else (factor, factor)


def long_side_resize(
    height: int, width: int, factor: int, longest: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the size that a Pixtral tower resizes an image to.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        factor: height and width of the result are multiples of it.
        longest: an image with a longer side is shrunk to it before sides are rounded up.
        min_pixels: smallest area of the result.
        max_pixels: largest area of the result, except that each side has at least ``factor``.

    Returns:
        Height and width in about the shape of the image.
    """
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = (max(1, math.floor(side / ratio)) for side in (height, width))
    new_height, new_width = _up(height, factor), _up(width, factor)
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height, new_width = (
            max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
        )
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height, new_width = (
            math.ceil(side * grow / factor) * factor for side in (height, width)
        )
    return new_height, new_width


def fit_short_side(
    height: int, width: int, side: int, fix: str = "crop the image or pad it"
) -> tuple[int, int]:
    """Return the size of an image whose short side is resized to ``side`` pixels.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        side: length of the short side of the result in pixels.
        fix: what the error advises.

    Returns:
        Height and width in the shape of the image; the long side is rounded down.

    Raises:
        ValueError: an area over ``MOST_PIXELS``.
    """
    long_side = int(side * max(height, width) / min(height, width))
    size = (long_side, side) if width <= height else (side, long_side)
    if side * long_side > MOST_PIXELS:
        raise ValueError(
            f"is {width}x{height} pixels, and {size[1]}x{size[0]} when its short side is resized "
            f"for this tower, over {MOST_PIXELS} pixels: {fix}"
        )
    return size


def middle(size: tuple[int, int], kept: tuple[int, int], *, rounds: bool) -> tuple[int, int]:
    """Return the row and the column where the middle of an image begins.

    Args:
        size: height and width of the image in pixels.
        kept: height and width of the middle in pixels.
        rounds: whether half a pixel is rounded to the even number, as by torchvision's transforms,
            or down, as in transformers.
    """
    top, left = (old - new for old, new in zip(size, kept, strict=True))
    return (round(top / 2), round(left / 2)) if rounds else (top // 2, left // 2)


def content_size(
    frames: int, height: int, width: int, new_height: int, new_width: int, min_pixels: int
) -> tuple[int, int]:
    """Return the size to which GLM-5 resizes a frame, which it puts at the top left of a canvas.

    Args:
        frames: number of frames, the same as for :func:`canvas_size`.
        height: height of a frame in pixels.
        width: width of a frame in pixels.
        new_height: height of the canvas in pixels.
        new_width: width of the canvas in pixels.
        min_pixels: the same as for :func:`canvas_size`; frames of at least as many pixels together
            are never enlarged.

    Returns:
        Height and width in pixels, in about the shape of the frame.
    """
    scale = min(new_height / height, new_width / width)
    if frames * height * width >= min_pixels:
        scale = min(1.0, scale)
    return (
        max(1, min(new_height, math.floor(height * scale))),
        max(1, min(new_width, math.floor(width * scale))),
    )


def _up(length: int, factor: int) -> int:
    return -(-length // factor) * factor


@lru_cache(maxsize=1024)
def best_tiling(
    width: int,
    height: int,
    min_tiles: int,
    max_tiles: int,
    tile: int,
    most_per_side: int | None = None,
) -> tuple[int, int]:
    """Return the grid of tiles whose shape is nearest to the shape of an image (InternViT).

    Of two grids of equal shape, the larger is taken if the image has over half as many pixels as
    the tiles of the larger.

    Args:
        width: width of the image in pixels.
        height: height of the image in pixels.
        min_tiles: smallest number of tiles.
        max_tiles: largest number of tiles.
        tile: side of a tile in pixels.
        most_per_side: the most columns and the most rows; None bounds only their product.

    Returns:
        Columns and rows of the grid.

    Raises:
        ValueError: bounds that no grid meets, or an image without pixels.
    """
    if width < 1 or height < 1:
        raise ValueError(f"is {width}x{height} pixels: an image needs at least one")
    if not 1 <= min_tiles <= max_tiles:
        raise ValueError(
            f"max_tiles={max_tiles}: it must be at least this checkpoint's min_tiles={min_tiles}"
        )
    if max_tiles > MOST_TILES:
        raise ValueError(f"max_tiles={max_tiles}: at most {MOST_TILES}; models were trained on 12")
    best, nearest = (1, 1), math.inf
    for columns, rows in _tile_grids(min_tiles, max_tiles, most_per_side or max_tiles):
        distance = abs(width / height - columns / rows)
        larger = 2 * width * height > tile * tile * columns * rows
        if distance < nearest or (distance == nearest and larger):
            best, nearest = (columns, rows), distance
    return best


def check_area(tiles: int, side: int) -> None:
    """Raise a ValueError if ``tiles`` of ``side`` x ``side`` pixels exceed ``MOST_PIXELS``."""
    if tiles * side * side > MOST_PIXELS:
        raise ValueError(
            f"{tiles} tiles of {side}x{side} pixels are {tiles * side * side} pixels: an image "
            f"may be resized to at most {MOST_PIXELS}; lower max_tiles or the size of a tile"
        )


@lru_cache(maxsize=64)
def _tile_grids(min_tiles: int, max_tiles: int, most_per_side: int) -> list[tuple[int, int]]:
    grids = [
        (columns, rows)
        for columns in range(1, min(max_tiles, most_per_side) + 1)
        for rows in range(1, min(max_tiles // columns, most_per_side) + 1)
        if columns * rows >= min_tiles
    ]
    return sorted(grids, key=math.prod)


def best_candidate(
    width: int, height: int, candidates: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Return the candidate size at which an image keeps the most pixels with the least padding.

    DeepSeek-VL2 and the LLaVA families choose so.

    Args:
        width: width of the image in pixels.
        height: height of the image in pixels.
        candidates: widths and heights in pixels; of equals, the first one is taken.

    Returns:
        Width and height of the candidate (``select_best_resolution``).
    """

    def worth(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[0] / width, size[1] / height)
        kept_pixels = min(int(width * scale) * int(height * scale), width * height)
        return kept_pixels, kept_pixels - size[0] * size[1]

    return max(candidates, key=worth)


def read_candidates(
    label: str,
    sizes: object,
    side: int,
    name: Literal["candidate_resolutions", "image_grid_pinpoints"] = "candidate_resolutions",
) -> tuple[tuple[int, int], ...]:
    """Check the sizes to which an image may be resized before it is split into tiles.

    Args:
        label: name of the file or section that holds the sizes, for errors.
        sizes: the two sides in pixels of each size, as parsed from JSON.
        side: side of a view in pixels.
        name: the field of the sizes. The first of ``candidate_resolutions`` (DeepSeek-VL2) must be
            one view.

    Returns:
        The sides, in the order in which they were given.

    Raises:
        ValueError: anything but pairs of multiples of ``side``, or a size over the limits.
    """
    one_view = name == "candidate_resolutions"
    max_pixels = min(MOST_TILES * side * side, MOST_PIXELS)
    if (
        not isinstance(sizes, list | tuple)
        or not 0 < len(sizes) <= MOST_TILES
        or any(not isinstance(size, list | tuple) or len(size) != 2 for size in sizes)
        or any(type(n) is not int or n <= 0 or n % side for size in sizes for n in size)
        or any(width * height > max_pixels for width, height in sizes)
        or (one_view and tuple(sizes[0]) != (side, side))
    ):
        first = f"[{side}, {side}] first, " if one_view else ""
        raise ValueError(
            f"{label}: {name}={sizes!r} must be pairs of multiples of {side}, "
            f"{first}of at most {max_pixels} pixels each ({MOST_TILES} views, and "
            f"{MOST_PIXELS} pixels)"
        )
    return tuple((first_side, second_side) for first_side, second_side in sizes)
