"""Packing the items of a call into groups that fit the budgets, at nearly the least cost.

All items form one group, unless several groups cost a tenth less. These are made by first fit
decreasing: the largest item first, each in the first group that has room. That is tried with the
capacities of a few budgets that seem cheapest, and the cheapest result is taken. A group takes the
cheapest budget that holds it, or runs eagerly where that costs less. Items that no budget holds run
eagerly together.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from encoders.contract import EncoderItemSpec, Grid

from .budgets import Batch, Budget
from .costs import Costs
from .outputs import Unit

CHEAPER = "cheaper"
PLACEMENTS = 60
"""The most placements of items for one call. Each attempt places all its items in groups of one
budget's capacity, so with more items fewer budgets are tried. With 200 instead, calls of random
items cost 1.4 % less and take 0.65 ms to pack, not 0.20."""
OPEN_GROUPS = 4
"""The number of groups that an item may still join; when another one opens, the oldest closes. If
none closed, packing 10,000 items would take 1.0 s instead of 0.04."""
WORTH_A_SPLIT = 1.1
"""Several groups are taken only if a single one costs 10 % more than all of them together, because
costs do not include that attention is slower in small groups than in a large one. On an H200 that
was 2 to 10 % of the time of a call."""
Key: TypeAlias = tuple[Grid, ...]


class Group(NamedTuple):
    """Items that run together: in one replay of a CUDA graph, or eagerly if ``budget`` is None."""

    items: tuple[int, ...]
    """The numbers of the items in the call, ascending."""
    budget: Budget | None
    cost: float
    reasons: tuple[str, ...] = ()
    """The reason why each item runs eagerly; empty for a replay."""


class Span(NamedTuple):
    """Neighbouring rows to copy between the tensor of a call and the tensor of a group of items.

    ``source`` is the first row in the call's tensor, ``target`` the first row in the group's.
    """

    source: int
    target: int
    length: int


class Step(NamedTuple):
    """One group of a call, and where its input rows and output tokens lie in the call's tensors.

    The budget is None for an eager run.
    """

    grids: Key
    budget: Budget | None
    reasons: tuple[str, ...]
    """The reason why each item runs eagerly; empty for a replay."""
    spans: Mapping[Unit, tuple[Span, ...]]
    counts: Mapping[Unit, int]


class Schedule(NamedTuple):
    """The steps that run the items of one call, in order, and its input rows, tokens, segments."""

    steps: tuple[Step, ...]
    counts: Mapping[Unit, int]


class Packer:
    """Divides the items of a call into groups, at nearly the least sum of the groups' costs.

    A group runs as one replay of a CUDA graph or, without a graph, eagerly.

    Args:
        costs: cost of a replay of each graph, and of eager runs.
        max_batch_size: most items per replay.
        eager_tokens: most output tokens of several items that run eagerly together.
    """

    def __init__(self, costs: Costs, max_batch_size: int, eager_tokens: int) -> None:
        self.costs, self.max_batch_size = costs, max_batch_size
        # A full replay does the same work as an eager run, so a longer time is an error of timing.
        self.replay_costs = {
            budget: min(cost, costs.eager(budget.rows)) for budget, cost in costs.replays.items()
        }
        self.budgets = sorted(self.replay_costs)
        self.eager_tokens = max([eager_tokens, *[budget.tokens for budget in self.budgets]])
        self._by_cost = sorted(self.budgets, key=lambda budget: (self.replay_costs[budget], budget))
        self._most_tokens = list(accumulate([budget.tokens for budget in self._by_cost], max))
        self._row_cost = min(
            [cost / budget.rows for budget, cost in self.replay_costs.items()], default=0.0
        )

    def pack(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Return groups that hold each item once, in the order of their first items.

        The items of a group are indices into ``specs``.
        """
        if not specs:
            return []
        best = [self._group(range(len(specs)), specs)]
        rows = sum([spec.input_size for spec in specs])
        if best[0].budget and best[0].cost <= WORTH_A_SPLIT * self._row_cost * rows:
            return best
        largest = EncoderItemSpec(*map(max, zip(*specs, strict=True)))
        reasons = [CHEAPER] * len(specs)
        if self.why_eager(largest) != CHEAPER:
            reason_of = {spec: self.why_eager(spec) for spec in set(specs)}
            reasons = [reason_of[spec] for spec in specs]
        order = sorted(range(len(specs)), key=lambda item: -specs[item].output_tokens)
        fitting = [item for item in order if reasons[item] == CHEAPER]
        overflow = self._eager_groups([item for item in order if reasons[item] != CHEAPER], specs)
        best = min(best, self._eager_groups(order, specs) if fitting else overflow, key=_cost)
        replays = self._replays(fitting, specs, _cost(best) - _cost(overflow))

        def with_reasons(group: Group) -> Group:
            of_items = tuple([reasons[item] for item in group.items])
            return group if group.budget else group._replace(reasons=of_items)

        return sorted(map(with_reasons, replays + overflow if replays else best))

    def why_eager(self, spec: EncoderItemSpec) -> str:
        """Return why an item of these sizes would run eagerly.

        The text is ``CHEAPER`` if a budget holds it, else such as "over segments".
        """
        batch = Batch.of([spec])
        if any(budget.fits(batch) for budget in reversed(self.budgets)):
            return CHEAPER
        exceeded = [budget.exceeded_by(batch) for budget in reversed(self.budgets)]
        others = (name for name in exceeded or ["every budget"] if name != "tokens")
        return f"over {next(others, 'tokens')}"

    def _group(self, items: Sequence[int], specs: Sequence[EncoderItemSpec]) -> Group:
        """Return ``items``, which are indices into ``specs``, as one group.

        The group takes the cheapest budget that holds it, or None if an eager run costs less. The
        cost is infinite if no budget holds several items that exceed ``eager_tokens``.
        """
        batch = Batch.of([specs[item] for item in items])
        budget, cost = None, math.inf
        if batch.tokens <= self.eager_tokens or batch.items == 1:
            cost = self.costs.eager(batch.rows)
        if batch.items <= self.max_batch_size:
            for candidate in self._by_cost[bisect_left(self._most_tokens, batch.tokens) :]:
                if candidate.exceeded_by(batch) is None:
                    if self.replay_costs[candidate] <= cost:
                        budget, cost = candidate, self.replay_costs[candidate]
                    break
        return Group(tuple(sorted(items)), budget, cost)

    def _eager_groups(self, order: list[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Return groups of items to run eagerly, without a CUDA graph.

        Items are indices into ``specs``. Each group has consecutive items of ``order``, as many as
        ``eager_tokens`` output tokens allow. The last group is replayed where that costs less.
        """
        tokens = [0, *accumulate([specs[item].output_tokens for item in order])]
        rows = [0, *accumulate([specs[item].input_size for item in order])]
        groups, start = list[Group](), 0
        while start < len(order):
            end = max(bisect_right(tokens, tokens[start] + self.eager_tokens) - 1, start + 1)
            cost = self.costs.eager(rows[end] - rows[start])
            groups.append(Group(tuple(sorted(order[start:end])), None, cost))
            start = end
        return groups[:-1] + [self._group(group.items, specs) for group in groups[-1:]]

    def _replays(
        self, order: list[int], specs: Sequence[EncoderItemSpec], max_cost: float
    ) -> list[Group]:
        """Return the cheapest of a few ways to pack items into several replays."""
        batch = Batch.of([specs[item] for item in order])
        best, least_cost = list[Group](), max_cost / WORTH_A_SPLIT
        if not order or self._row_cost * batch.rows >= least_cost:
            return best
        for capacity in self._cheapest(batch, specs[order[0]]):
            packed, too_large = self._first_fit(order, specs, capacity)
            groups = [self._group(items, specs) for items in packed]
            groups += self._replays(too_large, specs, math.inf)
            if _cost(groups) < least_cost:
                best, least_cost = groups, _cost(groups)
        return best

    def _cheapest(self, batch: Batch, first: EncoderItemSpec) -> list[Budget]:
        """Return the budgets to try for a batch: those that hold its largest item, ``first``.

        They are sorted by the cost of the whole batch if every replay were full. The more items the
        batch has, the fewer budgets are returned.
        """
        items, tokens, rows, segments, _, windows = batch

        def cost(budget: Budget) -> float:
            t, r, s, _, w = budget
            full = max(tokens / t, rows / r, segments / s, windows / (w or 1))
            return self.replay_costs[budget] * max(full, items / self.max_batch_size, 1.0)

        largest = Batch.of([first])
        fitting = [budget for budget in self.budgets if budget.fits(largest)]
        return sorted(fitting, key=cost)[: max(PLACEMENTS // items, 1)]

    def _first_fit(
        self, order: list[int], specs: Sequence[EncoderItemSpec], capacity: Budget
    ) -> tuple[list[list[int]], list[int]]:
        """Put each item of ``order`` into the first group that has room for it.

        The rule of :meth:`Budget.fits` is applied here to what is left of each capacity, so that
        no group is summed again for every item.
        """
        unused = self.max_batch_size, *capacity
        # The items of a group, and the room that is left in it.
        groups: list[tuple[list[int], list[int]]] = [([], [*unused])]
        too_large = list[int]()
        for item in order:
            rows, tokens, segments, longest, windows, _ = specs[item]
            for items, free in groups[-OPEN_GROUPS:]:
                n, t, r, s, m, w = free
                has_room = n and tokens <= t and rows <= r and segments <= s
                if has_room and longest <= m and windows <= w:
                    if not items:
                        groups.append(([], [*unused]))  # the last group is always empty
                    items.append(item)
                    free[:] = n - 1, t - tokens, r - rows, s - segments, m, w - windows
                    break
            else:
                too_large.append(item)
        return [items for items, _ in groups[:-1]], too_large


def _cost(groups: Sequence[Group]) -> float:
    return sum([group.cost for group in groups])


def make_schedule(key: Key, specs: Sequence[EncoderItemSpec], groups: Sequence[Group]) -> Schedule:
    """Return the schedule of a call: its groups as steps to run.

    Args:
        key: grid of each item.
        specs: sizes of each item.
        groups: groups that hold each item once.
    """
    # The sizes may be NumPy integers, whose sums would not be Python integers.
    starts: dict[Unit, list[int]] = {
        "rows": [0, *accumulate(int(spec.input_size) for spec in specs)],
        "hidden": [0, *accumulate(int(spec.hidden_rows) for spec in specs)],
        "tokens": [0, *accumulate(int(spec.output_tokens) for spec in specs)],
        "segments": [0, *accumulate(int(spec.segments) for spec in specs)],
    }
    steps = []
    for items, budget, _, reasons in groups:
        stretches = _neighbours(items)
        grids = tuple([key[item] for item in items])
        spans = {unit: _spans(stretches, starts[unit]) for unit in starts}
        counts = {unit: sum([span.length for span in spans[unit]]) for unit in spans}
        steps.append(Step(grids, budget, reasons, spans, counts))
    return Schedule(tuple(steps), {unit: numbers[-1] for unit, numbers in starts.items()})


def refuse_overflow(schedule: Schedule) -> None:
    """Raise a ValueError that names the first item too large for every graph, if there is one."""
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
    """Return the first of each run of consecutive numbers in ``items``, and its last plus 1."""
    breaks = [index for index in range(1, len(items)) if items[index] - items[index - 1] > 1]
    ends = pairwise([0, *breaks, len(items)]) if items else ()
    return [(items[start], items[end - 1] + 1) for start, end in ends]


def _spans(stretches: Sequence[tuple[int, int]], starts: Sequence[int]) -> tuple[Span, ...]:
    """Return the rows of runs of neighbouring items as spans."""
    spans, target = [], 0
    for first, end in stretches:
        spans.append(Span(starts[first], target, starts[end] - starts[first]))
        target += spans[-1].length
    return tuple(spans)
