"""A plan: how one call's items run, worked out once a grid and kept."""

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
"""Values of a cache at most. Each takes some 2 KiB of the host, whatever its size is: metadata of
168 bytes, as of eight images in tiles, would take a gigabyte until they are 64 MiB."""
Key: TypeAlias = tuple[Grid, ...]
Value = TypeVar("Value")


class Run(NamedTuple):
    """Neighbouring items of a group: where they lie for the caller, and where in the group."""

    source: int
    target: int
    length: int


class Step(NamedTuple):
    """One group with its places in the input rows and output tokens."""

    grids: Key
    budget: Budget | None
    reasons: tuple[str, ...]
    """Why each item runs eagerly; empty for a replay."""
    rows: tuple[Run, ...]
    tokens: tuple[Run, ...]
    row_count: int
    token_count: int

    @property
    def items(self) -> int:
        """Items in the group."""
        return len(self.grids)


class Plan(NamedTuple):
    """All groups of a call."""

    steps: tuple[Step, ...]
    rows: int
    tokens: int


def quick_key(grid_thw: GridLike) -> object | None:
    """What a grid seen before is found by: its numbers as they stand, unchecked; None if unusual.

    Numbers that are equal find the same plan; what was never put there finds none.
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
    """The grid as it is kept, read and refused as encoders do; a flat ``(t, h, w)`` is one item.

    Raises:
        ValueError: no grid, or one that is not three positive integers an item.
    """
    if grid_thw is None:
        raise ValueError("grid_thw is None: pass [items, 3], one row (t, h, w) an item")
    return tuple(read_grid(grid_thw))


def make_plan(key: Key, specs: Sequence[EncoderItemSpec], groups: Sequence[Group]) -> Plan:
    """Work out every group's places."""
    rows = [0, *accumulate(int(spec.input_size) for spec in specs)]  # or NumPy's integers
    tokens = [0, *accumulate(int(spec.output_tokens) for spec in specs)]
    steps = []
    for items, budget, _, reasons in groups:
        spans = _spans(items)
        row_runs, row_count = _runs(spans, rows)
        token_runs, token_count = _runs(spans, tokens)
        grids = tuple([key[item] for item in items])
        steps.append(Step(grids, budget, reasons, row_runs, token_runs, row_count, token_count))
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
            if reason.startswith("over "):
                raise ValueError(_overflow(grid, reason.removeprefix("over "), captured))


def _overflow(grid: Grid, capacity: str, captured: bool) -> str:
    if not captured:
        return (
            f"item with grid {grid} has no graph: no budget could be captured (the warnings say "
            'why); free memory, release() and capture() again, or use on_overflow="eager"'
        )
    return (
        f"item with grid {grid} is over every budget ({capacity}): raise max_budget or "
        'max_frames_per_batch, give larger budgets, or use on_overflow="eager"'
    )


def _spans(items: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours among ascending ``items`` joined: the first of them, and one past the last."""
    if items and items[-1] - items[0] == len(items) - 1:
        return [(items[0], items[-1] + 1)]
    spans: list[tuple[int, int]] = []
    for item in items:
        if spans and spans[-1][1] == item:
            spans[-1] = spans[-1][0], item + 1
        else:
            spans.append((item, item + 1))
    return spans


def _runs(spans: Sequence[tuple[int, int]], starts: Sequence[int]) -> tuple[tuple[Run, ...], int]:
    """The runs of spans of items that start where ``starts`` says, and their total length."""
    runs, target = [], 0
    for first, end in spans:
        source, length = starts[first], starts[end] - starts[first]
        runs.append(Run(source, target, length))
        target += length
    return tuple(runs), target


class Cache(Generic[Value]):
    """The values used last, bounded by a sum of sizes, and in number."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._values: OrderedDict[object, tuple[Value, int]] = OrderedDict()

    def get(self, key: object) -> Value | None:
        """The value kept for a key, now the most recent."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: object, value: Value, size: int = 1) -> None:
        """Keep a value unless it alone is over the bound; those unused longest go until it fits."""
        if size > self.most:
            return
        while self.held + size > self.most or len(self._values) >= ENTRIES:
            _, (_, freed) = self._values.popitem(last=False)
            self.held -= freed
        self._values[key] = (value, size)
        self.held += size

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self.held = 0


def places_of(group: Tensor, runs: Sequence[Run]) -> tuple[Tensor, ...]:
    """Where a group's runs lie among its rows: views."""
    return tuple(_rows(group, target, length) for _, target, length in runs)


def gather_runs(whole: Tensor, places: Sequence[Tensor], runs: Sequence[Run]) -> None:
    """Copy a group's runs from among the caller's rows to their places."""
    for (source, _, length), place in zip(runs, places, strict=True):
        place.copy_(_rows(whole, source, length), non_blocking=True)


def scatter_runs(group: Tensor, whole: Tensor, runs: Sequence[Run]) -> None:
    """Copy a group's rows to their places among the caller's."""
    for source, target, length in runs:
        _rows(whole, source, length).copy_(_rows(group, target, length), non_blocking=True)


def _rows(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor if length == tensor.shape[0] else tensor.narrow(0, start, length)
