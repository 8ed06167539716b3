"""A plan: how one call's items run, worked out once per grid and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from encoders.contract import EncoderItemSpec, Grid, GridLike
from encoders.inputs.grids import read_grid

from .budgets import Budget
from .packing import Group

ENTRIES = 20_000
"""Values of a cache at most. Each takes some 2 KiB of the host's memory, whatever its size is: the
metadata of eight tiled images is 168 bytes, and 64 MiB of them would take a gigabyte."""
Key: TypeAlias = tuple[Grid, ...]
Value = TypeVar("Value")


class Span(NamedTuple):
    """Neighbouring rows: where they start in the call, where in the group, and how many."""

    source: int
    target: int
    length: int


class Step(NamedTuple):
    """One group of a plan, with its places in the input rows and output tokens."""

    grids: Key
    budget: Budget | None
    reasons: tuple[str, ...]
    """Why each item runs eagerly; empty for a replay."""
    rows: tuple[Span, ...]
    tokens: tuple[Span, ...]
    row_count: int
    token_count: int


class Plan(NamedTuple):
    """All groups of a call."""

    steps: tuple[Step, ...]
    rows: int
    tokens: int


def quick_key(grid_thw: GridLike) -> object | None:
    """Return what a grid seen before is found by: its numbers, unchecked; None if unusual.

    Equal numbers find the same plan, and a grid that was refused has no plan to find.
    """
    rows = grid_thw.tolist() if isinstance(grid_thw, Tensor) else grid_thw
    if type(rows) is not list and type(rows) is not tuple:
        return None
    key = tuple([tuple(row) if type(row) in (list, tuple) else row for row in rows])
    try:
        hash(key)
    except TypeError:  # nested too deeply: read_key says so
        return None
    return key


def read_key(grid_thw: GridLike | None) -> Key:
    """Return the grid as it is kept, read and refused as encoders do.

    Raises:
        ValueError: no grid, or one that is not three positive integers per item.
    """
    if grid_thw is None:
        raise ValueError("grid_thw is None: pass [items, 3], one row (t, h, w) per item")
    return tuple(read_grid(grid_thw))


def make_plan(key: Key, specs: Sequence[EncoderItemSpec], groups: Sequence[Group]) -> Plan:
    """Return the plan of groups, with the places of every group worked out."""
    rows = [0, *accumulate(int(spec.input_size) for spec in specs)]  # or NumPy's integers
    tokens = [0, *accumulate(int(spec.output_tokens) for spec in specs)]
    steps = []
    for items, budget, _, reasons in groups:
        neighbours = _neighbours(items)
        row_spans, row_count = _spans(neighbours, rows)
        token_spans, token_count = _spans(neighbours, tokens)
        grids = tuple([key[item] for item in items])
        steps.append(Step(grids, budget, reasons, row_spans, token_spans, row_count, token_count))
    return Plan(tuple(steps), rows[-1], tokens[-1])


def refuse_overflow(plan: Plan, captured: bool) -> None:
    """Raise on the first item that no budget holds.

    Args:
        plan: of a call.
        captured: whether there is any budget at all.

    Raises:
        ValueError: there is such an item.
    """
    for step in plan.steps:
        if step.budget is not None:
            continue
        for grid, reason in zip(step.grids, step.reasons, strict=True):
            if not reason.startswith("over "):
                continue
            if not captured:
                raise ValueError(
                    f"item with grid {grid} has no graph: no budget could be captured (the "
                    "warnings say why); free memory, release() and capture() again, or use "
                    'on_overflow="eager"'
                )
            raise ValueError(
                f"item with grid {grid} is over every budget ({reason.removeprefix('over ')}): "
                "raise max_budget or max_frames_per_batch, give larger budgets, or use "
                'on_overflow="eager"'
            )


def _neighbours(items: Sequence[int]) -> list[tuple[int, int]]:
    """Join neighbours among ascending items: return the first of each stretch, and its end."""
    if items and items[-1] - items[0] == len(items) - 1:
        return [(items[0], items[-1] + 1)]
    stretches: list[tuple[int, int]] = []
    for item in items:
        if stretches and stretches[-1][1] == item:
            stretches[-1] = stretches[-1][0], item + 1
        else:
            stretches.append((item, item + 1))
    return stretches


def _spans(
    stretches: Sequence[tuple[int, int]], starts: Sequence[int]
) -> tuple[tuple[Span, ...], int]:
    """Return the spans of stretches of items that start at ``starts``, and their total length."""
    spans, target = [], 0
    for first, end in stretches:
        source, length = starts[first], starts[end] - starts[first]
        spans.append(Span(source, target, length))
        target += length
    return tuple(spans), target


class Cache(Generic[Value]):
    """The values used last, bounded by the sum of their sizes and in number."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._values: OrderedDict[object, tuple[Value, int]] = OrderedDict()

    def get(self, key: object) -> Value | None:
        """Return the value kept for a key, which becomes the one used last."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: object, value: Value, size: int) -> None:
        """Keep a value unless it alone is over the bound; those unused longest go until it fits."""
        if size > self.most:
            return
        while self.held + size > self.most or len(self._values) >= ENTRIES:
            _, (_, freed) = self._values.popitem(last=False)
            self.held -= freed
        self._values[key] = (value, size)
        self.held += size

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self.held = 0


def views_of(group: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    """Return the places of spans in a group's rows, as views."""
    return [_rows(group, target, length) for _, target, length in spans]


def gather(whole: Tensor, spans: Sequence[Span], views: Sequence[Tensor]) -> None:
    """Copy the rows of spans from the caller's tensor into their places in a group."""
    for (source, _, length), view in zip(spans, views, strict=True):
        view.copy_(_rows(whole, source, length), non_blocking=True)


def scatter(group: Tensor, whole: Tensor, spans: Sequence[Span]) -> None:
    """Copy the rows of a group to their places in the caller's tensor."""
    for source, target, length in spans:
        _rows(whole, source, length).copy_(_rows(group, target, length), non_blocking=True)


def _rows(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor if length == tensor.shape[0] else tensor.narrow(0, start, length)
