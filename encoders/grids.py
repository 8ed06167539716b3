"""Functions that read and check ``grid_thw``, and that split outputs into items by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol, TypeGuard, cast, runtime_checkable

import torch
from torch import Tensor

from .data import Grid, GridLike, VisionInputs

__all__ = ["read_grid"]

LONGEST_ROW = 60
"""The most characters of a bad ``grid_thw`` row in an error: it may be an image by mistake."""
_RULE = "each item needs three positive integers (t, h, w) in patches"


@runtime_checkable
class _Array(Protocol):
    """An array or a scalar of numpy or another array library, which need not be installed."""

    def tolist(self) -> object: ...


def plain_values(values: object) -> object:
    """Return a tensor or an array as (lists of) Python numbers, and anything else as it is.

    Raises:
        ValueError: a tensor without values (meta), or in a sparse layout.
    """
    if isinstance(values, list | tuple | int | str):  # nothing to convert, as usual
        return values
    if isinstance(values, Tensor) and (values.is_meta or values.layout != torch.strided):
        kind = "on the meta device" if values.is_meta else f"of layout {values.layout}"
        raise ValueError(f"a tensor {kind} has no values to read: pass a dense tensor or a list")
    return values.tolist() if isinstance(values, Tensor | _Array) else values


class ReadGrid(list[Grid]):
    """A grid that :func:`read_grid` has checked; it is returned unchanged if it is passed again."""

    @cached_property
    def multiple(self) -> int:
        """The largest number that every height and width is a multiple of; 0 without items."""
        return math.gcd(*[size for _, h, w in self for size in (h, w)])


def read_grid(grid_thw: GridLike, merge: int = 1, merge_name: str = "merge size") -> ReadGrid:
    """Read ``grid_thw`` on the host and check it.

    Args:
        grid_thw: [items, 3], a tensor, an array or nested lists; a flat ``(t, h, w)`` is one item.
        merge: h and w must be multiples of this number.
        merge_name: the config field that ``merge`` comes from, for errors.

    Returns:
        ``(t, h, w)`` per item.

    Raises:
        ValueError: a row other than three positive integers, h or w that is not a multiple of
            ``merge``, or a tensor without values.
    """
    if isinstance(grid_thw, ReadGrid) and (merge == 1 or not grid_thw.multiple % merge):
        return grid_thw
    rows = grid_thw if type(grid_thw) is list else _listed(grid_thw)  # most calls pass a list
    if isinstance(grid_thw, Tensor) and grid_thw.ndim == 2 and not grid_thw.is_floating_point():
        # Most items of a batch have one of a few sizes.
        grids: list[tuple[object, ...]] = [tuple(row) for row in cast("list[list[object]]", rows)]
        checked = {grid: _read_item(grid, merge, merge_name) for grid in dict.fromkeys(grids)}
        return ReadGrid([checked[grid] for grid in grids])
    if len(rows) == 3 and all(isinstance(value, int) for value in rows):
        rows = [rows]
    return ReadGrid([_read_item(row, merge, merge_name) for row in rows])


def _listed(grid_thw: object) -> list[object]:
    if isinstance(grid_thw, VisionInputs):
        raise ValueError("grid_thw is the whole result of preprocess: pass inputs.grid_thw of it")
    plain = plain_values(grid_thw)
    if not isinstance(plain, Iterable):
        raise ValueError(f"grid_thw is {plain!r}: {_RULE}")
    return list(plain)


def _read_item(row: object, merge: int, merge_name: str) -> Grid:
    if isinstance(row, list | tuple) and len(row) == 3:  # most rows are three integers
        t, h, w = row
        are_integers = type(t) is type(h) is type(w) is int and t > 0 and h > 0 and w > 0
        if are_integers and not h % merge and not w % merge:
            return t, h, w
    values = plain_values(row)
    numbers = [plain_values(v) for v in values] if isinstance(values, Sequence) else [values]
    sizes = [int(v) for v in numbers if _is_integer(v) and v > 0]
    if len(numbers) != 3 or len(sizes) != 3:
        text = repr(numbers)
        row_text = text if len(text) <= LONGEST_ROW else f"{text[:LONGEST_ROW]}..."
        raise ValueError(f"grid_thw row {row_text}: {_RULE}")
    t, h, w = sizes
    for name, size in (("height", h), ("width", w)):
        if size % merge:
            lower, upper = size // merge * merge, (size // merge + 1) * merge
            fix = f"{lower} or {upper}" if lower else f"{upper}"
            raise ValueError(
                f"grid {h}x{w}: {name} {size} must be a multiple of {merge_name}={merge}; "
                f"resize to {fix} patches"
            )
    return t, h, w


def _is_integer(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def split_rows(tensor: Tensor | None, sizes: Sequence[int]) -> list[Tensor | None]:
    """Split a tensor into the rows of each item; rows after those of the last item are padding.

    Args:
        tensor: [rows, ..], or None for an output field that was left out.
        sizes: rows per item.

    Returns:
        One view per item; None per item if ``tensor`` is None.

    Raises:
        ValueError: the tensor has fewer rows than the items.
    """
    if tensor is None:
        return [None] * len(sizes)
    if len(tensor) < sum(sizes):
        raise ValueError(
            f"the output has {len(tensor)} rows, the items of the grid {sum(sizes)}: pass the "
            "grid_thw that belongs to this output"
        )
    return list(tensor[: sum(sizes)].split(list(sizes)))
