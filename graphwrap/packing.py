"""Packing the items of a call into groups that fit the budgets, at nearly the least price.

One group of everything is taken unless several save a tenth. Otherwise items are placed by first
fit decreasing: the largest first, each in the first group that has room. That is done for the
capacities that seem cheapest, and the cheapest result is taken. A group takes the cheapest budget
that holds it, or is eager where that costs less. Items that no budget holds run eagerly together.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from encoders.contract import EncoderItemSpec, Grid

from .budgets import Batch, Budget
from .prices import Prices

CHEAPER = "cheaper"
PLACEMENTS = 60
"""The most placements of items over all attempts; with more items, fewer capacities are tried."""
OPEN_GROUPS = 4
"""The most groups that an item may still join; the oldest is closed when another one opens."""
WORTH_A_SPLIT = 1.1
"""Several groups are taken only where one costs 10 % more than their prices sum to: attention is
slower in small groups than in a large one, which prices do not say. On an H200 that was 2 to 10 %
of a call (``benchmarks/NOTES.md``)."""
Key: TypeAlias = tuple[Grid, ...]


class Group(NamedTuple):
    """Items that run together: as one replay of a budget, or eagerly if the budget is None."""

    items: tuple[int, ...]
    """The numbers of the items in the call, ascending."""
    budget: Budget | None
    price: float
    reasons: tuple[str, ...] = ()
    """The reason why each item runs eagerly; empty for a replay."""


class Span(NamedTuple):
    """Neighbouring rows: where they start in the call, where in their group, and how many."""

    source: int
    target: int
    length: int


class Step(NamedTuple):
    """One group of a call, and where its input rows and output tokens lie in the call."""

    grids: Key
    budget: Budget | None
    reasons: tuple[str, ...]
    """The reason why each item runs eagerly; empty for a replay."""
    rows: tuple[Span, ...]
    tokens: tuple[Span, ...]
    row_count: int
    token_count: int


class Schedule(NamedTuple):
    """The steps that run the items of one call, in order."""

    steps: tuple[Step, ...]
    rows: int
    tokens: int


class Packer:
    """Packs the items of a call into groups, so that the sum of their measured prices is least."""

    def __init__(self, prices: Prices, max_batch_size: int, eager_tokens: int) -> None:
        self.prices, self.max_batch_size = prices, max_batch_size
        # A full replay does the same work as an eager run, so a longer time is an error of timing.
        ms = {budget: min(x, prices.eager(budget.rows)) for budget, x in prices.replay_ms.items()}
        self.budgets, self.replay_ms = sorted(ms), ms
        self.eager_tokens = max([eager_tokens, *[budget.tokens for budget in self.budgets]])
        self._by_price = sorted(self.budgets, key=lambda budget: (ms[budget], budget))
        self._most_tokens = list(accumulate([one.tokens for one in self._by_price], max))
        self._row_ms = min([ms[budget] / budget.rows for budget in self.budgets], default=0.0)

    def pack(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Return groups that cover every item once, in the order of their first items."""
        if not specs:
            return []
        best = [self._group(range(len(specs)), specs)]
        rows = sum([spec.input_size for spec in specs])
        if best[0].budget and best[0].price <= WORTH_A_SPLIT * self._row_ms * rows:
            return best
        largest = EncoderItemSpec(*map(max, zip(*specs, strict=True)))
        why = [CHEAPER] * len(specs)
        if self.why_eager(largest) != CHEAPER:
            known = {spec: self.why_eager(spec) for spec in set(specs)}
            why = [known[spec] for spec in specs]
        order = sorted(range(len(specs)), key=lambda item: -specs[item].output_tokens)
        fitting = [item for item in order if why[item] == CHEAPER]
        over = self._eager_groups([item for item in order if why[item] != CHEAPER], specs)
        best = min(best, self._eager_groups(order, specs) if fitting else over, key=_price)
        replays = self._replays(fitting, specs, _price(best) - _price(over))

        def explained(group: Group) -> Group:
            reasons = tuple([why[item] for item in group.items])
            return group if group.budget else group._replace(reasons=reasons)

        return sorted(map(explained, replays + over if replays else best))

    def why_eager(self, spec: EncoderItemSpec) -> str:
        """Return why an item would run eagerly: over a capacity, or because that is cheaper."""
        batch = Batch.of([spec])
        if any(budget.fits(batch) for budget in reversed(self.budgets)):
            return CHEAPER
        reasons = [one.exceeded_by(batch) for one in reversed(self.budgets)] or ["every budget"]
        return f"over {next((why for why in reasons if why != 'tokens'), 'tokens')}"

    def _group(self, items: Sequence[int], specs: Sequence[EncoderItemSpec]) -> Group:
        """Return items as one group, whose price is infinite if nothing can run it."""
        batch = Batch.of([specs[item] for item in items])
        budget, price = None, math.inf
        if batch.tokens <= self.eager_tokens or batch.items == 1:
            price = self.prices.eager(batch.rows)
        if batch.items <= self.max_batch_size:
            for candidate in self._by_price[bisect_left(self._most_tokens, batch.tokens) :]:
                if candidate.exceeded_by(batch) is None:
                    if self.replay_ms[candidate] <= price:
                        budget, price = candidate, self.replay_ms[candidate]
                    break
        return Group(tuple(sorted(items)), budget, price)

    def _eager_groups(self, order: list[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Return eager groups of items in the order given, each as long as it may be.

        The last one, which need not be long, is replayed where that costs less.
        """
        tokens = [0, *accumulate([specs[item].output_tokens for item in order])]
        rows = [0, *accumulate([specs[item].input_size for item in order])]
        groups, start = list[Group](), 0
        while start < len(order):
            end = max(bisect_right(tokens, tokens[start] + self.eager_tokens) - 1, start + 1)
            price = self.prices.eager(rows[end] - rows[start])
            groups.append(Group(tuple(sorted(order[start:end])), None, price))
            start = end
        return groups[:-1] + [self._group(group.items, specs) for group in groups[-1:]]

    def _replays(
        self, order: list[int], specs: Sequence[EncoderItemSpec], most: float
    ) -> list[Group]:
        """Return the cheapest of a few packings of items that fit, the largest first.

        The list is empty unless a packing costs a tenth less than ``most``: that is what the items
        cost as one group, or what they add to the eager group of items that no budget holds.
        """
        batch = Batch.of([specs[item] for item in order])
        best, least = list[Group](), most / WORTH_A_SPLIT
        if not order or self._row_ms * batch.rows >= least:
            return best
        for capacity in self._cheapest(batch, specs[order[0]]):
            placed, outside = self._first_fit(order, specs, capacity)
            groups = [self._group(items, specs) for items in placed]
            groups += self._replays(outside, specs, math.inf)
            if _price(groups) < least:
                best, least = groups, _price(groups)
        return best

    def _cheapest(self, batch: Batch, first: EncoderItemSpec) -> list[Budget]:
        """Return the budgets that hold an item, by the price of a batch if they were full."""
        items, tokens, rows, segments, _, windows = batch

        def price(one: Budget) -> float:
            t, r, s, _, w = one
            full = max(tokens / t, rows / r, segments / s, windows / (w or 1))
            return self.replay_ms[one] * max(full, items / self.max_batch_size, 1.0)

        alone = Batch.of([first])
        holding = [one for one in self.budgets if one.fits(alone)]
        return sorted(holding, key=price)[: max(PLACEMENTS // items, 1)]

    def _first_fit(
        self, order: list[int], specs: Sequence[EncoderItemSpec], capacity: Budget
    ) -> tuple[list[list[int]], list[int]]:
        """Return items put into the first group with room, and items over the capacity.

        The rule of :meth:`Budget.fits` is applied here to what is left of each capacity. Summing
        each group and asking the budget takes 30 ms longer for 10,000 items.
        """
        unused = self.max_batch_size, *capacity
        # The items of a group, and the room that is left in it.
        groups: list[tuple[list[int], list[int]]] = [([], [*unused])]
        outside = list[int]()
        for item in order:
            rows, tokens, segments, longest, windows = specs[item]
            for items, left in groups[-OPEN_GROUPS:]:
                n, t, r, s, m, w = left
                room = n and tokens <= t and rows <= r and segments <= s
                if room and longest <= m and windows <= w:
                    if not items:
                        groups.append(([], [*unused]))  # the last group is always empty
                    items.append(item)
                    left[:] = n - 1, t - tokens, r - rows, s - segments, m, w - windows
                    break
            else:
                outside.append(item)
        return [items for items, _ in groups[:-1]], outside


def _price(groups: Sequence[Group]) -> float:
    return sum([group.price for group in groups])


def make_schedule(key: Key, specs: Sequence[EncoderItemSpec], groups: Sequence[Group]) -> Schedule:
    """Return the schedule of a call from its groups and the sizes of its items."""
    # The sizes may be NumPy's integers, whose sums are not Python's.
    rows = [0, *accumulate(int(spec.input_size) for spec in specs)]
    tokens = [0, *accumulate(int(spec.output_tokens) for spec in specs)]
    steps = []
    for items, budget, _, reasons in groups:
        stretches = _neighbours(items)
        grids = tuple([key[item] for item in items])
        (row_spans, row_count), (spans, count) = [_spans(stretches, s) for s in (rows, tokens)]
        steps.append(Step(grids, budget, reasons, row_spans, spans, row_count, count))
    return Schedule(tuple(steps), rows[-1], tokens[-1])


def refuse_overflow(schedule: Schedule) -> None:
    """Raise a ValueError that names the first item that no budget holds."""
    for step in schedule.steps:
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
    """Return stretches of consecutive items: the first of each, and the one after its last."""
    breaks = [place for place in range(1, len(items)) if items[place] - items[place - 1] > 1]
    ends = pairwise([0, *breaks, len(items)]) if items else ()
    return [(items[start], items[end - 1] + 1) for start, end in ends]


def _spans(
    stretches: Sequence[tuple[int, int]], starts: Sequence[int]
) -> tuple[tuple[Span, ...], int]:
    """Return the rows of runs of neighbouring items as spans, and the total number of rows."""
    spans, target = [], 0
    for first, end in stretches:
        spans.append(Span(starts[first], target, starts[end] - starts[first]))
        target += spans[-1].length
    return tuple(spans), target
