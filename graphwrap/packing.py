"""Packing items into replays: every capacity kept, close to the cheapest, deterministic.

One replay of everything is taken where no split could cost less. Otherwise items are placed by
first fit decreasing: the largest first, each in the first replay that has room. That is done for a
few capacities, the cheapest result is taken, and each replay takes the cheapest budget that holds
it. Items that no budget holds run eagerly together, in runs of bounded length so that memory is
bounded. Eager runs of everything are taken where they cost less than all of that.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from encoders.contract import EncoderItemSpec

from .budgets import Batch, Budget
from .prices import Prices

CHEAPER = "cheaper"
FEW_ITEMS = 12
"""Up to so many items, capacities of all sizes are tried; beyond, those that seem cheapest."""
CAPACITIES = 12
"""Capacities tried for few items, which then cost at most 3 % more than the optimum."""
PLACEMENTS = 200
"""Placements per decision for many items: the more items, the fewer capacities are tried."""
OPEN_REPLAYS = 4
"""Replays that are looked through for room; the oldest is closed when another one opens."""
SAMPLE = 64
"""Items of many that tell which capacities seem cheapest."""
WORTH_A_SPLIT = 1.01
"""A split is not looked for where it could save less than 1 %."""


class Group(NamedTuple):
    """Items that run together, through one budget or eagerly (None)."""

    items: tuple[int, ...]
    """Their places in the call, ascending."""
    budget: Budget | None
    cost: float
    reasons: tuple[str, ...] = ()
    """Why each item runs eagerly; empty for a replay."""


class Packer:
    """Packs items by one set of prices.

    Args:
        prices: of every budget that was captured.
        max_batch_size: items per replay, at most.
        eager_tokens: tokens per eager run of several items, at most.
    """

    def __init__(self, prices: Prices, max_batch_size: int, eager_tokens: int) -> None:
        self.prices = prices
        self.budgets = sorted(prices.replay_ms)
        self.max_batch_size = max_batch_size
        self.eager_tokens = max([eager_tokens, *[budget.tokens for budget in self.budgets]])
        self._widest = [one for one in reversed(self.budgets) if not self._is_inside_another(one)]
        self._capacities = np.array(self.budgets, np.float64).reshape(-1, len(Budget._fields))

    def pack(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Return groups that cover every item once, in the order of their first items.

        Args:
            specs: what each item costs, in the caller's order.
        """
        if not specs:
            return []
        everything, batch = list(range(len(specs))), Batch.of(specs)
        groups, over = self._replay(everything, batch), list[int]()
        whys: dict[EncoderItemSpec, str] = {}
        if not groups or _cost(groups) > WORTH_A_SPLIT * self.prices.least(2, batch.rows):
            fitting = everything
            if self.why_eager(EncoderItemSpec(*map(max, zip(*specs, strict=True)))) != CHEAPER:
                whys = {spec: self.why_eager(spec) for spec in set(specs)}
                fitting = [item for item in everything if whys[specs[item]] == CHEAPER]
                over = [item for item in everything if whys[specs[item]] != CHEAPER]
            groups = self._replays(fitting, specs) + self._eager_runs(over, specs, whys)
        if len(over) < len(specs) and self.prices.eager(batch.rows) < _cost(groups):
            groups = min(groups, self._eager_runs(everything, specs, whys), key=_cost)
        return sorted(groups)

    def why_eager(self, spec: EncoderItemSpec) -> str:
        """Return why an item would run eagerly: over a capacity, or because that is cheaper."""
        batch = Batch.of([spec])
        reasons = [budget.exceeded_by(batch) for budget in self._widest] or ["every budget"]
        if None in reasons:
            return CHEAPER
        return f"over {next((why for why in reasons if why != 'tokens'), 'tokens')}"

    def _is_inside_another(self, budget: Budget) -> bool:
        return any(
            other != budget and all(ours <= its for ours, its in zip(budget, other, strict=True))
            for other in self.budgets
        )

    def _replay(self, items: Sequence[int], batch: Batch) -> list[Group]:
        """Return items as one replay of the cheapest budget; nothing if no budget holds them."""
        budget = self.prices.cheapest(batch) if batch.items <= self.max_batch_size else None
        if budget is None:
            return []
        return [Group(tuple(sorted(items)), budget, self.prices.replay_ms[budget])]

    def _eager_runs(
        self,
        items: Sequence[int],
        specs: Sequence[EncoderItemSpec],
        whys: Mapping[EncoderItemSpec, str],
    ) -> list[Group]:
        """Return eager runs of items in the caller's order, each as long as it may be."""
        runs, tokens = list[list[int]](), math.inf
        for item in items:
            more = specs[item].output_tokens
            if tokens + more > self.eager_tokens:
                runs.append([])
                tokens = 0
            runs[-1].append(item)
            tokens += more
        groups = []
        for run in runs:
            cost = self.prices.eager(sum([specs[item].input_size for item in run]))
            reasons = tuple([whys.get(specs[item], CHEAPER) for item in run])
            groups.append(Group(tuple(run), None, cost, reasons))
        return groups

    def _replays(self, items: Sequence[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Return the cheapest of a few packings of items that each fit a budget."""
        ordered = sorted(items, key=lambda item: -specs[item].output_tokens)
        batch = Batch.of([specs[item] for item in ordered])
        if len(ordered) > FEW_ITEMS:
            tried = self._by_estimate([specs[item] for item in ordered])
            tried = tried[: max(PLACEMENTS // len(ordered), 1)]
        else:
            tried = self._of_all_sizes([specs[item].output_tokens for item in ordered])
        best, least = list[Group](), math.inf
        for capacity in tried:
            replays = -(-batch.tokens // capacity.tokens)
            if WORTH_A_SPLIT * self.prices.least(replays, batch.rows) < least:
                packing = self._first_fit(ordered, specs, capacity)
                if _cost(packing) < least:
                    best, least = packing, _cost(packing)
        return self._merged(best, specs) if len(ordered) <= FEW_ITEMS else best

    def _of_all_sizes(self, tokens: Sequence[int]) -> list[Budget]:
        """Return capacities from the tokens of all items down to the largest's, thinned out."""
        low = bisect_left(self.budgets, (max(tokens, default=0),))
        high = bisect_left(self.budgets, (sum(tokens),)) + 2
        between = self.budgets[low:high][::-1]
        step = max((len(between) - 1) / (CAPACITIES - 1), 1.0)
        return [between[round(k * step)] for k in range(min(len(between), CAPACITIES))]

    def _by_estimate(self, specs: Sequence[EncoderItemSpec]) -> list[Budget]:
        """Return all budgets by what a sample of the items would cost with each as the capacity.

        The items that it holds are taken to fill it without a gap, and the others to run alone.
        """
        sample = specs[:: -(-len(specs) // SAMPLE)]
        items = np.array(sample, np.float64)[:, [1, 0, 2, 3, 4]]  # in the order of Budget's fields
        inside = (items[:, None] <= self._capacities).all(axis=2)
        shares = inside.T @ items / np.maximum(self._capacities, 1.0)
        shares[:, 3] = inside.sum(axis=0) / self.max_batch_size  # longest segments are not summed
        replay_ms = np.array([self.prices.replay_ms[budget] for budget in self.budgets])
        alone = [_cost(self._replay((), Batch.of([spec]))) for spec in sample]
        estimate = shares.max(axis=1) * replay_ms + ~inside.T @ np.array(alone)
        return [self.budgets[place] for place in np.argsort(estimate, kind="stable")]

    def _first_fit(
        self, ordered: Sequence[int], specs: Sequence[EncoderItemSpec], capacity: Budget
    ) -> list[Group]:
        """Return replays of items in the order given, each item in the first one with room.

        The rule of :meth:`Budget.fits` is applied here to what is left of each capacity: 10,000
        items take 5 ms that way, and 30 ms by summing each batch and asking the budget.
        """
        full = [*capacity, self.max_batch_size, 0]  # the last: the longest segment so far
        opened: list[list[Any]] = [[*full, []]]  # what is left of each, and its items
        looked_through = opened.copy()
        outside = []
        for item in ordered:
            rows, tokens, segments, longest, windows = specs[item]
            for left in looked_through:
                if (
                    tokens <= left[0]
                    and rows <= left[1]
                    and segments <= left[2]
                    and longest <= left[3]
                    and windows <= left[4]
                    and left[5]
                ):
                    break
            else:
                outside.append(item)
                continue
            if left is opened[-1]:  # the last one is always empty
                opened.append([*full, []])
                looked_through = opened[-OPEN_REPLAYS:]
            left[0] -= tokens
            left[1] -= rows
            left[2] -= segments
            left[4] -= windows
            left[5] -= 1
            if longest > left[6]:
                left[6] = longest
            left[7].append(item)
        runs = []
        most_tokens, most_rows, most_segments, _, most_windows = capacity
        for tokens, rows, segments, _, windows, _, longest, run in opened[:-1]:
            batch = Batch(
                len(run),
                most_tokens - tokens,
                most_rows - rows,
                most_segments - segments,
                longest,
                most_windows - windows,
            )
            runs += self._replay(run, batch)
        if FEW_ITEMS < len(outside) < len(ordered):
            return runs + self._replays(outside, specs)
        for item in outside:
            runs += self._replay([item], Batch.of([specs[item]]))
        return runs

    def _merged(self, runs: list[Group], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Return runs of which no two would cost less as one replay."""
        for one, other in combinations(runs, 2):
            both = [*one.items, *other.items]
            replay = self._replay(both, Batch.of([specs[item] for item in both]))
            if replay and replay[0].cost < one.cost + other.cost:
                rest = [run for run in runs if run is not one and run is not other]
                return self._merged(rest + replay, specs)
        return runs


def eager_tokens(captured: Iterable[Budget], wanted: Sequence[Budget], worth: SupportsIndex) -> int:
    """Return the most tokens of an eager run of several items.

    That is twice what is worth a graph, so that another run costs next to nothing; where memory
    left out the largest budgets, it is twice what fitted.

    Args:
        captured: the budgets that were captured.
        wanted: the budgets that were to be captured, ascending.
        worth: the largest number of tokens that is worth a graph.
    """
    most = max((budget.tokens for budget in captured), default=0)
    if most in (0, wanted[-1].tokens):
        most = max(most, operator.index(worth))
    return 2 * most


def _cost(runs: Sequence[Group]) -> float:
    return sum([run.cost for run in runs])
