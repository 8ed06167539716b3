"""The size an image is resized to, how it is tiled, and which frames are sampled from a video.

Source: ``smart_resize`` of transformers 5.23.0's Qwen2-VL image and Qwen3-VL video processors,
``get_optimal_tiled_canvas`` of its GotOcr2ImageProcessor (OpenGVLab's ``dynamic_preprocess``), the
``sample_frames`` of its Qwen2-VL, Qwen3-VL and InternVL video processors, and
``select_best_resolution`` of deepseek-ai/DeepSeek-VL2 at commit ef9f91e. Python's ``round`` (half
to even) is part of the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, SupportsFloat, TypeAlias

import torch

SamplingRule: TypeAlias = Literal["qwen2_vl", "qwen3_vl", "internvl"]

MOST_TILES = 1024
"""Tiles of one image. Published checkpoints make at most 40; choosing among more takes longer."""
MOST_PIXELS = 1 << 28
"""Area that a checkpoint or ``min_pixels`` may ask for: 16384x16384, 3 GiB of float32 pixels."""

_MAX_ASPECT = 200


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the size that a Qwen tower resizes an image to.

    Args:
        height: of the image in pixels.
        width: of the image in pixels.
        factor: height and width of the result are multiples of it.
        min_pixels: smallest area of the result.
        max_pixels: largest area of the result, except that each side has at least ``factor``.

    Returns:
        Height and width in about the shape of the image.

    Raises:
        ValueError: an aspect ratio over 200, or an image without pixels.
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
    """Return the size that Qwen3-VL resizes the frames of a video to.

    Frames smaller than ``factor`` on a side are first scaled up to it, keeping their shape.

    Args:
        frames: number of frames.
        height: of a frame in pixels.
        width: of a frame in pixels.
        factor: height and width of the result are multiples of it.
        min_pixels: smallest area of all frames of the result together.
        max_pixels: largest area of all frames of the result together.
        temporal_factor: the number of frames is rounded to a multiple of it for the bounds.

    Returns:
        Height and width in about the shape of a frame.

    Raises:
        ValueError: an aspect ratio over 200, or frames without pixels.
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
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    pixels = rounded_frames * tall * wide
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
    return tall, wide


def _check_shape(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ValueError(f"is {width}x{height} pixels: an image needs at least one")
    if max(height, width) > _MAX_ASPECT * min(height, width):
        aspect = max(height, width) / min(height, width)
        raise ValueError(
            f"is {width}x{height} pixels, aspect ratio {aspect:.0f}: Qwen towers take at most "
            f"{_MAX_ASPECT}; crop the image or pad it"
        )


@lru_cache(maxsize=1024)
def best_tiling(
    width: int, height: int, min_tiles: int, max_tiles: int, tile: int
) -> tuple[int, int]:
    """Return the grid of tiles whose shape is nearest to the shape of an image (InternViT).

    Of two grids of equal shape the larger is taken if the image has over half of its pixels.

    Args:
        width: of the image in pixels.
        height: of the image in pixels.
        min_tiles: smallest number of tiles.
        max_tiles: largest number of tiles.
        tile: side of a tile in pixels.

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
    for columns, rows in _tile_grids(min_tiles, max_tiles):
        distance = abs(width / height - columns / rows)
        larger = 2 * width * height > tile * tile * columns * rows
        if distance < nearest or (distance == nearest and larger):
            best, nearest = (columns, rows), distance
    return best


def check_area(tiles: int, side: int) -> None:
    """Raise a ValueError if an image would be resized to more pixels than fit the limit."""
    if tiles * side * side > MOST_PIXELS:
        raise ValueError(
            f"{tiles} tiles of {side}x{side} pixels are {tiles * side * side} pixels: an image "
            f"may be resized to at most {MOST_PIXELS}; lower max_tiles or the size of a tile"
        )


@lru_cache(maxsize=64)
def _tile_grids(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    grids = [
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if columns * rows >= min_tiles
    ]
    return sorted(grids, key=math.prod)


def best_candidate(
    width: int, height: int, candidates: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Return the candidate size that keeps most pixels of an image and, of several, wastes least.

    Args:
        width: of the image in pixels.
        height: of the image in pixels.
        candidates: widths and heights in pixels; of equals, the first one is taken.

    Returns:
        Width and height of the candidate (``select_best_resolution`` of the source).
    """

    def worth(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[0] / width, size[1] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(candidates, key=worth)


def read_candidates(where: str, sizes: object, side: int) -> tuple[tuple[int, int], ...]:
    """Check the sizes that DeepSeek-VL2 may resize an image to, for its tiles.

    Args:
        where: what holds the sizes, for errors.
        sizes: widths and heights in pixels, as parsed from JSON.
        side: side of a view in pixels; the first size is one view.

    Returns:
        The widths and heights.

    Raises:
        ValueError: anything but pairs of multiples of ``side``, or a size over the limits.
    """
    most = min(MOST_TILES * side * side, MOST_PIXELS)
    if (
        not isinstance(sizes, list | tuple)
        or not 0 < len(sizes) <= MOST_TILES
        or any(not isinstance(size, list | tuple) or len(size) != 2 for size in sizes)
        or any(type(n) is not int or n <= 0 or n % side for size in sizes for n in size)
        or any(width * height > most for width, height in sizes)
        or tuple(sizes[0]) != (side, side)
    ):
        raise ValueError(
            f"{where}: candidate_resolutions={sizes!r} must be pairs of multiples of {side}, "
            f"[{side}, {side}] first, of at most {most} pixels each ({MOST_TILES} views, and "
            f"{MOST_PIXELS} pixels)"
        )
    return tuple((width, height) for width, height in sizes)


def sample_frames(
    total: int,
    rule: SamplingRule,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    source_fps: float | None = None,
    min_frames: int = 4,
    max_frames: int = 768,
    temporal_patch_size: int = 2,
    initial_shift: bool | float = True,
) -> list[int]:
    """Return the indices of the frames that a family's video processor samples.

    Args:
        total: number of frames of the video.
        rule: the family whose video processor is followed.
        fps: frames per second to sample; the Qwen rules keep the number of frames between
            ``min_frames`` and ``max_frames``.
        num_frames: number of frames to sample. Without ``fps`` and ``num_frames``, all frames.
        source_fps: frames per second of the video, 24 if None.
        min_frames: smallest number of frames with ``fps``.
        max_frames: largest number of frames with ``fps``.
        temporal_patch_size: the qwen2_vl rule samples a multiple of it.
        initial_shift: where the internvl rule starts: True is half a step, a number is a frame.

    Returns:
        Indices in ascending order; the qwen3_vl rule may repeat some.

    Raises:
        ValueError: both ``fps`` and ``num_frames``, more frames than the video has (except by the
            qwen3_vl rule), no frame at all, or a rate that is not a positive number.
    """
    if fps is None and num_frames is None:
        return list(range(total))
    if fps is not None and num_frames is not None:
        raise ValueError(f"fps={fps} and num_frames={num_frames}: give one of them")
    wanted = (
        float(num_frames or 0) if fps is None else total / _source_rate(source_fps) * _rate(fps)
    )
    if rule == "qwen3_vl":
        count = int(wanted)
        if fps is not None:
            count = min(max(count, min_frames), max_frames, total)
        return _spread_to_the_end(total, count)
    if rule == "internvl":
        count = _check_count(int(wanted), total, fps, 1)
        start = total / count / 2 if initial_shift is True else float(initial_shift)
        return _steps(start, total, count)
    pair = temporal_patch_size
    if fps is None:
        return _steps(0, total, _check_count(round(wanted / pair) * pair, total, fps, pair))
    most = min(max_frames, total) // pair * pair
    count = math.floor(min(max(wanted, min_frames), most) / pair) * pair
    return _steps(0, total, count or total)  # a video shorter than a pair: all its frames


def read_rate(fps: object) -> float | None:
    """Return a positive finite number of any type (Fraction, Decimal, ...) as float, else None."""
    try:
        rate = float(fps) if isinstance(fps, SupportsFloat) else 0.0
    except (ArithmeticError, RuntimeError, TypeError, ValueError):  # too large, or several numbers
        return None
    return rate if 0 < rate < math.inf else None


def _source_rate(fps: float | None) -> float:
    rate = 24.0 if fps is None else read_rate(fps)
    if rate is None:
        raise ValueError(
            f"the video's own fps={fps}: must be a positive number of frames per second; leave it "
            "out where it is unknown"
        )
    return rate


def _rate(fps: float) -> float:
    rate = read_rate(fps)
    if rate is None:
        raise ValueError(f"fps={fps}: must be a positive number of frames per second")
    return rate


def _check_count(count: int, total: int, fps: float | None, multiple: int) -> int:
    asked = f"fps={fps}" if fps is not None else "num_frames"
    if count < 1:
        raise ValueError(f"{asked} makes none of {total} frames: ask for at least {multiple}")
    if count > total:
        frames = f"{count} frame{'s' * (count != 1)}"
        raise ValueError(f"{asked} asks for {frames}, the video has {total}: ask for fewer")
    return count


def _steps(start: float, total: int, count: int) -> list[int]:
    # The reference takes float32 steps too; it may make one index too many, which is out of range.
    indices: list[int] = (
        torch.arange(start, total, total / count, dtype=torch.float32, device="cpu").int().tolist()
    )
    return indices[:count]


def _spread_to_the_end(total: int, count: int) -> list[int]:
    # numpy.linspace(0, total - 1, count), rounded half to even.
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [round(index * step) for index in range(count - 1)] + [total - 1]
