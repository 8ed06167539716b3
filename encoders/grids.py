"""``grid_thw`` on the host: reading it, checking it against pixels, laying features out by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from einops import rearrange
from torch import Tensor

Grid: TypeAlias = tuple[int, int, int]
GridLike: TypeAlias = Tensor | Sequence[Sequence[int]] | Sequence[int]


@runtime_checkable
class _Array(Protocol):
    """An array or scalar of numpy's or another library's, which need not be installed."""

    def tolist(self) -> Any: ...


_RULE = "each item needs three positive integers (t, h, w) in patches"


def read_grid(grid_thw: GridLike, merge: int = 1, merge_name: str = "merge size") -> list[Grid]:
    """Read ``grid_thw`` on the host as a list of ``(t, h, w)``, checked.

    Args:
        grid_thw: [items, 3], a tensor, an array or nested; one flat ``(t, h, w)`` is one item.
        merge: h and w must be multiples of it.
        merge_name: the config field that ``merge`` comes from, for the message.

    Raises:
        ValueError: not three positive integers an item, or h or w not a multiple of ``merge``.
    """
    plain = _plain(grid_thw)
    if not isinstance(plain, Iterable):
        raise ValueError(f"grid_thw is {plain!r}: {_RULE}")
    raw = list(plain)
    if len(raw) == 3 and all(isinstance(value, int) for value in raw):
        raw = [raw]
    return [_read_item(row, merge, merge_name) for row in raw]


def _plain(values: Any) -> Any:
    """A tensor's or an array's values as Python's; anything else as it is."""
    if isinstance(values, list | tuple | int | str):  # the usual ones, and the quickest to tell
        return values
    return values.tolist() if isinstance(values, Tensor | _Array) else values


def _read_item(row: Any, merge: int, merge_name: str) -> Grid:
    if type(row) in (list, tuple) and len(row) == 3:  # read before: no need to look closer
        t, h, w = row
        whole = type(t) is type(h) is type(w) is int and t > 0 and h > 0 and w > 0
        if whole and not h % merge and not w % merge:
            return t, h, w
    values = _plain(row)
    values = [_plain(v) for v in values] if isinstance(values, Sequence) else [values]
    if len(values) != 3 or not all(_is_whole(v) and v > 0 for v in values):
        raise ValueError(f"grid_thw row {values}: {_RULE}")
    t, h, w = (int(v) for v in values)
    for name, size in (("height", h), ("width", w)):
        if size % merge:
            below, above = size // merge * merge, (size // merge + 1) * merge
            fix = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"grid {h}x{w}: {name} {size} must be a multiple of {merge_name}={merge}; "
                f"resize to {fix} patches"
            )
    return t, h, w


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def check_input_size(rows: int, max_input_size: int | None, group: int = 1) -> int:
    """Rows that per-patch metadata shall have: ``max_input_size`` if given, else ``rows``.

    Raises:
        ValueError: more rows than that, or a size that cuts a token's ``group`` of patches.
    """
    if max_input_size is None:
        return rows
    if max_input_size % group:
        raise ValueError(
            f"max_input_size={max_input_size} must be a multiple of {group}, the patches of a token"
        )
    if rows > max_input_size:
        raise ValueError(
            f"the grid has {rows} rows, more than max_input_size={max_input_size}: raise it or "
            "pass fewer items"
        )
    return max_input_size


def check_rows(rows: int, expected: int, what: str) -> None:
    """Raise unless ``pixel_values`` has the number of rows that the grid or metadata speaks of."""
    if rows != expected:
        raise ValueError(
            f"pixel_values has {rows} rows but {what} {expected}: pass the grid_thw that belongs "
            "to these pixels (one row t, h, w an item)"
        )


def check_tiles(pixel_values: Tensor, grids: Sequence[Grid], patch_size: int) -> None:
    """Raise unless the tiles are as many, and each as large, as the grid says."""
    check_rows(pixel_values.shape[0], sum(t for t, _, _ in grids), "the grid makes")
    for _, h, w in grids:
        height, width = h * patch_size, w * patch_size
        if tuple(pixel_values.shape[2:]) != (height, width):
            raise ValueError(
                f"grid {h}x{w} means tiles of {height}x{width} pixels, these are "
                f"{tuple(pixel_values.shape)}: pass the grid_thw that belongs to them"
            )


def raster_maps(features: Tensor, grids: Sequence[Grid], merge: int) -> list[Tensor]:
    """Undo the merge-block order: a list of [t, h, w, D], one an item.

    Rows of a 2x2-merge tower run block by block, so that 4 neighbours in memory make one token; for
    a 4x4 grid of patches::

        0  1 |  4  5
        2  3 |  6  7        rows 0..3 are the top left block, 4..7 the top right one
        ------------
        8  9 | 12 13
       10 11 | 14 15

    Merged tokens (a row a block) are in raster order already, on a grid of h/2 x w/2.

    Args:
        features: [P, D] a row a patch, or [N, D] a row a token.
        grids: ``(t, h, w)`` in patches, one an item.
        merge: side of a block in patches.

    Raises:
        ValueError: no tensor, or one that has neither a row a patch nor a row a token.
    """
    require_features(features)
    patches = [t * h * w for t, h, w in grids]
    tokens = [count // merge**2 for count in patches]
    if features.shape[0] == sum(patches):
        return [
            rearrange(
                part, "(t h w a b) d -> t (h a) (w b) d",
                t=t, h=h // merge, w=w // merge, a=merge, b=merge,
            )
            for part, (t, h, w) in zip(features.split(patches), grids, strict=True)
        ]  # fmt: skip
    if features.shape[0] == sum(tokens):
        return [
            part.unflatten(0, (t, h // merge, w // merge))
            for part, (t, h, w) in zip(features.split(tokens), grids, strict=True)
        ]
    raise ValueError(
        f"features have {features.shape[0]} rows: the grid makes {sum(patches)} patches "
        f"or {sum(tokens)} tokens"
    )


def squarest(tokens: int) -> tuple[int, int]:
    """The two factors of ``tokens`` nearest to each other, the smaller first."""
    side = next(n for n in range(math.isqrt(max(tokens, 1)), 0, -1) if max(tokens, 1) % n == 0)
    return side, max(tokens, 1) // side


def stitch_tiles(maps: Tensor, layout: tuple[int, int, bool]) -> Tensor:
    """Join the tiles [t, h, w, D] of an image to [1, rows*h, columns*w, D]; a video stays [t, h,
    w, D].

    Raises:
        ValueError: the layout does not make this many tiles.
    """
    columns, rows, thumbnail = layout
    if (columns, rows, thumbnail) == (1, 1, False):
        return maps
    if maps.shape[0] != columns * rows + thumbnail:
        raise ValueError(
            f"{columns}x{rows} tiles{' and a thumbnail' if thumbnail else ''} are "
            f"{columns * rows + thumbnail}, the features have {maps.shape[0]}"
        )
    return rearrange(maps[: columns * rows], "(r c) h w d -> 1 (r h) (c w) d", r=rows)


def block_indices(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    """Block numbers that ``forward_intermediates`` shall return, 0-based, in the order asked for.

    Args:
        indices: None for all blocks, n for the last n, or numbers (negatives count from the end).
        depth: how many blocks there are.

    Raises:
        ValueError: a block that does not exist.
    """
    if indices is None:
        return list(range(depth))
    wanted = _plain(indices)
    if not isinstance(wanted, Iterable):
        if not _is_number(wanted) or not 0 < wanted <= depth:
            raise ValueError(f"indices={wanted}: the last n blocks, with n from 1 to {depth}")
        return list(range(depth - wanted, depth))
    numbers = [_plain(number) for number in wanted]
    for number in numbers:
        if not _is_number(number) or not -depth <= number < depth:
            rule = f"the tower has blocks 0 to {depth - 1}"
            raise ValueError(f"block {number!r} does not exist: {rule}")
    return [number % depth for number in numbers]


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def require_tensor(pixel_values: object) -> None:
    """Raise unless ``pixel_values`` is a tensor: images go through ``preprocess`` first."""
    if isinstance(pixel_values, Tensor):
        return
    fix = "call encoder.preprocess on the images, or encoder.encode"
    if isinstance(pixel_values, tuple):
        fix = "of inputs = encoder.preprocess(..) pass inputs.pixel_values, inputs.grid_thw"
    raise ValueError(
        f"pixel_values is of type {type(pixel_values).__name__}: the tower takes a tensor of "
        f"normalised pixels; {fix}"
    )


def require_features(features: object) -> None:
    """Raise unless ``features`` is one tensor, for ``feature_maps``."""
    if not isinstance(features, Tensor):
        raise ValueError(
            f"features is of type {type(features).__name__}: feature_maps takes one tensor; pass "
            "output.last_hidden_state, output.pooler_output or one of output.deepstack_features"
        )


def require_output(output: object) -> None:
    """Raise unless ``output`` is a whole output, for ``split``."""
    if not isinstance(output, tuple):
        raise ValueError(
            f"output is of type {type(output).__name__}: split takes the EncoderOutput that the "
            "encoder returned; a tensor of it can be split by the rows that item_specs says"
        )


def missing_grid(pixel_values: Tensor, patch_size: int) -> str:
    """What to pass where neither grid nor metadata was given; for tiles the very value."""
    fix = "pass grid_thw, or encoder_metadata made by prepare_encoder_metadata"
    if pixel_values.ndim != 4:
        return fix
    count, _, height, width = pixel_values.shape
    grid = [[count, height // patch_size, width // patch_size]]
    return f"{fix}; if these tiles are one item, grid_thw is {grid}"


def check_pixels(
    pixel_values: Tensor, row_shape: tuple[int, ...], rule: str, device: torch.device
) -> None:
    """Raise unless these are floating-point rows of this shape, on the CPU or on ``device``.

    Args:
        pixel_values: what the user passed.
        row_shape: trailing shape that they must have.
        rule: which rows the encoder takes, for the message.
        device: the encoder's.

    Raises:
        ValueError: no tensor, integer pixels, a wrong trailing shape, or another accelerator.
    """
    require_tensor(pixel_values)
    if not pixel_values.is_floating_point():
        raise ValueError(
            f"pixel_values are {pixel_values.dtype}: the tower takes normalised floating-point "
            "pixels; call encoder.preprocess on the images"
        )
    if tuple(pixel_values.shape[1:]) != row_shape:
        raise ValueError(
            f"pixel_values of shape {tuple(pixel_values.shape)}: {rule}"
            f"{_looks_like(pixel_values)}; call this encoder's preprocess on the images"
        )
    if pixel_values.device != device and pixel_values.device.type != "cpu":
        raise ValueError(
            f"pixel_values are on {pixel_values.device}, the encoder on {device}: "
            "pass them on the CPU or move them to the encoder's device"
        )


def _looks_like(pixel_values: Tensor) -> str:
    """Which family's rows these are, for the message about a wrong width."""
    if pixel_values.ndim == 4:
        return "; these look like InternViT tiles"
    families = {1176: "Qwen2-VL or Qwen2.5-VL (14x14)", 1536: "Qwen3-VL or Qwen3.5 (16x16)"}
    family = families.get(pixel_values.shape[-1]) if pixel_values.ndim == 2 else None
    return f"; these look like patches of {family}" if family else ""


def split_rows(tensor: Tensor | None, sizes: Sequence[int]) -> list[Tensor | None]:
    """Cut a tensor by the rows of each item; rows beyond the last item are padding.

    Raises:
        ValueError: fewer rows than the items have.
    """
    if tensor is None:
        return [None] * len(sizes)
    if len(tensor) < sum(sizes):
        raise ValueError(
            f"the output has {len(tensor)} rows, the items of the grid {sum(sizes)}: pass the "
            "grid_thw that belongs to this output"
        )
    return list(tensor[: sum(sizes)].split(list(sizes)))


def merge_order_positions(grids: Sequence[Grid], merge: int, rows: int) -> Tensor:
    """(row, column) of every patch in merge-block order, int64 [rows, 2]; pad rows are (0, 0)."""
    positions = torch.zeros(rows, 2, dtype=torch.int64, device="cpu")
    start = 0
    for t, h, w in grids:
        cells = torch.cartesian_prod(_count(h), _count(w))
        cells = cells.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
        positions[start : start + t * h * w] = cells.repeat(t, 1)
        start += t * h * w
    return positions


def window_order(
    grids: Sequence[Grid], merge: int, side: int, tokens: int
) -> tuple[Tensor, list[int]]:
    """Merged tokens listed window by window, and the patches of each window.

    Windows of ``side`` x ``side`` tokens run in raster order over each frame, and tokens in raster
    order inside a window; those at the right and bottom edge are smaller. A frame of 3x6 tokens
    with side 4::

        0  1  2  3 |  4  5
        6  7  8  9 | 10 11      order 0-3, 6-9, 12-15 | 4, 5, 10, 11, 16, 17
       12 13 14 15 | 16 17      windows of 12 and 6 tokens
    """
    order, windows, start = [], [], 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        frame = _count(rows * columns).view(rows, columns)
        tiles = [tile for band in frame.split(side) for tile in band.split(side, dim=1)]
        frame_order = torch.cat([tile.flatten() for tile in tiles])
        starts = start + _count(t)[:, None] * rows * columns
        order.append((starts + frame_order).flatten())
        windows += [tile.numel() * merge**2 for tile in tiles] * t
        start += t * rows * columns
    return torch.cat([*order, _count(tokens)[start:]]), windows


def _count(end: int) -> Tensor:
    """0 to ``end`` - 1 on the host, whatever the default device."""
    return torch.arange(end, device="cpu")
