"""A plan: how one call's items run, worked out once per grid and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from encoders.contract import EncoderItemSpec, Grid

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


def make_plan(key: Key, specs: Sequence[EncoderItemSpec], groups: Sequence[Group]) -> Plan:
    """Return the plan of groups, with the places of every group worked out."""
    rows = [0, *accumulate(int(spec.input_size) for spec in specs)]  # or NumPy's integers
    tokens = [0, *accumulate(int(spec.output_tokens) for spec in specs)]
    steps = []
    for items, budget, _, reasons in groups:
        stretches = _neighbours(items)
        grids = tuple([key[item] for item in items])
        (row_spans, row_count), (spans, count) = [_spans(stretches, s) for s in (rows, tokens)]
        steps.append(Step(grids, budget, reasons, row_spans, spans, row_count, count))
    return Plan(tuple(steps), rows[-1], tokens[-1])


def refuse_overflow(plan: Plan) -> None:
    """Raise on the first item that no budget holds."""
    for step in plan.steps:
        if step.budget is not None:
            continue
        for grid, reason in zip(step.grids, step.reasons, strict=True):
            if reason.startswith("over "):
                raise ValueError(
                    f"item with grid {grid} is over every budget that was captured "
                    f"({reason.removeprefix('over ')}): raise max_budget or max_frames_per_batch, "
                    'give larger budgets, or use on_overflow="eager"; if budgets were dropped, the '
                    "warnings of capture() say why"
                )


def _neighbours(items: Sequence[int]) -> list[tuple[int, int]]:
    """Join neighbours among ascending items: return the first of each stretch, and its end."""
    breaks = [place for place in range(1, len(items)) if items[place] - items[place - 1] > 1]
    ends = pairwise([0, *breaks, len(items)]) if items else ()
    return [(items[start], items[end - 1] + 1) for start, end in ends]


def _spans(
    stretches: Sequence[tuple[int, int]], starts: Sequence[int]
) -> tuple[tuple[Span, ...], int]:
    """Return the spans of stretches of items that start at ``starts``, and their total length."""
    spans, target = [], 0
    for first, end in stretches:
        spans.append(Span(starts[first], target, starts[end] - starts[first]))
        target += spans[-1].length
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
        if found is not None:
            self._values.move_to_end(key)
        return found and found[0]

    def put(self, key: object, value: Value, size: int) -> None:
        """Keep a value unless it alone is over the bound; those unused longest go until it fits."""
        if size > self.most:
            return
        while self.held + size > self.most or len(self._values) >= ENTRIES:
            self.held -= self._values.popitem(last=False)[1][1]
        self._values[key] = (value, size)
        self.held += size


def gather(whole: Tensor, spans: Sequence[Span], group: Tensor) -> None:
    """Copy the rows of spans from the caller's tensor into their places in a group."""
    for source, target, length in spans:
        _rows(group, target, length).copy_(_rows(whole, source, length), non_blocking=True)


def scatter(group: Tensor, whole: Tensor, spans: Sequence[Span]) -> None:
    """Copy the rows of a group to their places in the caller's tensor."""
    for source, target, length in spans:
        _rows(whole, source, length).copy_(_rows(group, target, length), non_blocking=True)


def _rows(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor if length == tensor.shape[0] else tensor.narrow(0, start, length)
