"""Packing items into replays: every capacity kept, the cheapest by measured cost, deterministic.

One run of everything is taken where no split could cost less. Else, up to ``EXACT_ITEMS`` items,
the cheapest of all divisions into groups is found; beyond, groups are filled one after another, and
the last, which may be half empty, is divided so in bundles.
Items that no budget holds run eagerly, together: each alone would wait for its launches again. But
no eager run of several items has more than so many tokens, so that memory is bounded however many
items a call has.
Inside a group, items keep the caller's order.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from encoders.contract import EncoderItemSpec

from .budgets import Budget, Ladder, Load
from .costs import Costs
from .filling import UNBOUNDED, Line, read_table, tokens_only
from .subsets import Floats, Ints, Loads, Shelf, cheapest_division

EXACT_ITEMS = 12


class Group(NamedTuple):
    """Items that run together: through one budget, or (None) eagerly, and then why each."""

    items: tuple[int, ...]
    budget: Budget | None
    cost: float
    reasons: tuple[str, ...] = ()


class _Runs(NamedTuple):
    """Runs with their prices."""

    items: list[tuple[int, ...]]
    prices: list[float]


class Packer:
    """Packs items for one ladder and one table of prices.

    Args:
        budgets: those captured.
        costs: prices of replays and eager runs.
        max_batch_size: items a replay.
        eager_tokens: tokens of an eager run of several items, at most; the largest budget's, at
            least.
    """

    def __init__(
        self,
        budgets: Sequence[Budget],
        costs: Costs,
        max_batch_size: int,
        eager_tokens: int = UNBOUNDED,
    ) -> None:
        self.budgets = tuple(sorted(budgets))
        self.costs = costs
        self.max_batch_size = max_batch_size
        self._chains = _chains(self.budgets)
        for chain in self._chains:
            chain.rank(costs)
        self._shelf = Shelf([(chain.capacities, chain.empties) for chain in self._chains])
        self._choices = [each for chain in self._chains for each in chain.choices]
        self._widest = _widest(self.budgets)
        self.eager_tokens = max([eager_tokens, *[budget.tokens for budget in self.budgets]])
        cheapest_division(np.zeros(1 << EXACT_ITEMS))  # its tables are made once a process: here

    def pack(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Groups that cover every item once, in the order of their first items.

        Args:
            specs: what each item costs, in the caller's order.

        Returns:
            The groups; those that run eagerly have a reason an item. None for no items.
        """
        if self.budgets and len(specs) <= EXACT_ITEMS:
            groups = self._divide([[item] for item in range(len(specs))], specs) if specs else []
        else:
            groups = self._pack_many(specs)
        return sorted(groups, key=lambda group: group.items[0])

    def whole(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Everything at once, eagerly (also when there is nothing)."""
        count = len(specs)
        return [Group(tuple(range(count)), None, 0.0, ("eager backend",) * count)]

    def overflow(self, spec: EncoderItemSpec) -> str | None:
        """The capacity that keeps an item out of every budget, or None."""
        if not self.budgets:
            return "every budget"
        load = Load.of([spec])
        reasons = [budget.refuses(load) for budget in self._widest]
        if None in reasons:
            return None
        return next((reason for reason in reasons if reason != "tokens"), "tokens")

    def best(self, load: Load) -> tuple[float, Budget | None]:
        """The cheapest way to run a load at once: a budget, or eager (None)."""
        best, choice = self.costs.eager(load), None
        if load.tokens > self.eager_tokens and load.items > 1:
            best = inf
        if load.items > self.max_batch_size:
            return best, choice
        for chain in self._chains:
            budget = chain.cheapest(load)
            if budget is not None:
                cost = self.costs.replay(budget, load)
                if cost < best:
                    best, choice = cost, budget
        return best, choice

    def _pack_many(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """What fits packed, what does not run eagerly; or all of it, where that costs less."""
        if not specs:
            return []
        table = read_table(specs)
        fits = self._fitting(table)
        fitting, over = np.flatnonzero(fits), np.flatnonzero(~fits)
        whole = self._cut_eager(np.arange(len(specs)), table)
        if not len(fitting):
            return self._eager_groups(whole, specs)
        groups = self._fill_and_divide(fitting, table, specs)
        rest = self._cut_eager(over, table)
        if sum(whole.prices) < sum([group.cost for group in groups]) + sum(rest.prices):
            return self._eager_groups(whole, specs)
        return groups + self._eager_groups(rest, specs)

    def _fitting(self, table: Ints) -> npt.NDArray[np.bool_]:
        """Which items some budget holds."""
        fits = np.zeros(len(table), dtype=bool)
        for most in self._widest:
            bounds = (most.rows, most.tokens, most.segments, most.longest_segment, most.windows)
            fits |= (table <= bounds).all(axis=1)
        return fits

    def _fill_and_divide(
        self, items: Ints, table: Ints, specs: Sequence[EncoderItemSpec]
    ) -> list[Group]:
        """Groups of items that all fit: full ones, large items first; the last is divided."""
        ordered = items[np.argsort(-table[items, 1], kind="stable")]
        line = Line(table[ordered])
        starts = line.cut(self._widest, self.max_batch_size)
        loads = line.loads(starts)
        empty, at = self._shelf.cheapest(loads)
        replay, eager = self.costs.cheapest(loads, empty), self._eager_prices(loads)
        chosen = np.where(replay < eager, at, -1).tolist()
        *runs, last = _stretches(ordered, starts)
        groups = [
            Group(run, self._choices[place] if place >= 0 else None, price,
                  () if place >= 0 else ("cheaper",) * len(run))
            for run, place, price in zip(runs, chosen[:-1], replay[:-1].tolist(), strict=True)
        ]  # fmt: skip
        size = -(-len(last) // EXACT_ITEMS)
        bundles = [last[at : at + size] for at in range(0, len(last), size)]
        return groups + self._divide(bundles, specs)

    def _cut_eager(self, items: Ints, table: Ints) -> _Runs:
        """Eager runs of items in the caller's order, each as long as it may be."""
        if not len(items):
            return _Runs([], [])
        line = Line(table[items])
        starts = line.cut([tokens_only(self.eager_tokens)], len(items))
        prices = self._eager_prices(line.loads(starts))
        return _Runs(_stretches(items, starts), prices.tolist())

    def _eager_groups(self, runs: _Runs, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        whys = _Whys(self)
        return [
            Group(items, None, price, tuple([whys[specs[item]] for item in items]))
            for items, price in zip(*runs, strict=True)
        ]

    def _eager_prices(self, loads: Loads) -> Floats:
        return self.costs.cheapest(loads, np.full(len(loads.longest_segment), np.inf))

    def _divide(
        self, bundles: Sequence[Sequence[int]], specs: Sequence[EncoderItemSpec]
    ) -> list[Group]:
        """The cheapest division of a few bundles of items into groups, of all there are."""
        load = Load.of([specs[item] for bundle in bundles for item in bundle])
        price, budget = self.best(load)
        if price <= self.costs.split(load):
            every = [item for bundle in bundles for item in bundle]
            return [self._group(every, budget, price, specs)]
        each = [(Load.of([specs[item] for item in bundle]), bundle) for bundle in bundles]
        each.sort(key=_longest)
        loads = Loads.of_subsets([load for load, _ in each])
        empty = self._shelf.empties(loads)
        if load.items > self.max_batch_size:
            empty[loads.items > self.max_batch_size] = np.inf
        prices = self.costs.cheapest(loads, empty)
        if load.tokens > self.eager_tokens:
            prices[(loads.tokens > self.eager_tokens) & (loads.items > 1)] = np.inf
        groups = []
        for subset in cheapest_division(prices):
            taken = [
                item for k, (_, bundle) in enumerate(each) if subset >> k & 1 for item in bundle
            ]
            price, budget = self.best(Load.of([specs[item] for item in taken]))
            groups.append(self._group(taken, budget, price, specs))
        return groups

    def _group(
        self,
        items: Sequence[int],
        budget: Budget | None,
        cost: float,
        specs: Sequence[EncoderItemSpec],
    ) -> Group:
        """Items in the caller's order; where they run eagerly, with the reason of each."""
        ordered = tuple(sorted(items))
        if budget is not None:
            return Group(ordered, budget, cost)
        return Group(ordered, None, cost, tuple([self.why(specs[item]) for item in ordered]))

    def why(self, spec: EncoderItemSpec) -> str:
        """Why an item would run eagerly."""
        rows, tokens, segments, longest, windows = spec
        for most in self._widest:
            if (
                tokens <= most.tokens
                and rows <= most.rows
                and segments <= most.segments
                and longest <= most.longest_segment
                and windows <= most.windows
            ):
                return "cheaper"
        return f"over {self.overflow(spec)}"


class _Whys(dict[EncoderItemSpec, str]):
    """Why items run eagerly, each size asked for once."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer

    def __missing__(self, spec: EncoderItemSpec) -> str:
        self[spec] = self._packer.why(spec)
        return self[spec]


class _Chain:
    """Budgets of one shape: every capacity grows along the chain, so a look-up is a bisection."""

    def __init__(self, first: Budget) -> None:
        self.budgets = [first]
        self._cheapest = [first]
        self.empties = [0.0]
        """What a replay of the cheapest budget from each on costs before its first item."""

    def takes(self, budget: Budget) -> bool:
        """Whether a budget continues the chain."""
        return all(ours <= its for ours, its in zip(self.budgets[-1], budget, strict=True))

    def rank(self, costs: Costs) -> None:
        """Note which budget from each on is cheapest: a measured table need not grow with size."""
        best = self.budgets[-1]
        self._cheapest = []
        for budget in reversed(self.budgets):
            if costs.empty(budget) <= costs.empty(best):
                best = budget
            self._cheapest.insert(0, best)
        self.empties = [costs.empty(budget) for budget in self._cheapest]

    @property
    def choices(self) -> list[Budget | None]:
        """The cheapest budget from each on, and None for what is over the last."""
        return [*self._cheapest, None]

    @cached_property
    def capacities(self) -> list[tuple[int, ...]]:
        """Tokens of every budget, rows of every budget, and so on."""
        return list(zip(*self.budgets, strict=True))

    def cheapest(self, load: Load) -> Budget | None:
        """The cheapest budget that holds a load: those before the first that fits do not."""
        tokens, rows, segments, longest, windows = self.capacities
        at = max(
            bisect_left(tokens, load.tokens),
            bisect_left(rows, load.rows),
            bisect_left(segments, load.segments),
            bisect_left(longest, load.longest_segment),
            bisect_left(windows, load.windows),
        )
        return self._cheapest[at] if at < len(self.budgets) else None


def eager_bound(captured: Sequence[Budget], ladder: Ladder, worth: SupportsIndex) -> int:
    """Tokens of an eager run of several items, at most.

    Twice what is worth a graph, so that starting anew costs next to nothing; where memory cut the
    ladder short, twice what fitted.

    Args:
        captured: of the ladder.
        ladder: what was to be captured.
        worth: the largest number of tokens that is worth a graph.
    """
    most = max((budget.tokens for budget in captured), default=0)
    if most in (0, ladder.budgets[-1].tokens):
        most = max(most, operator.index(worth))
    return 2 * most


def _chains(budgets: Sequence[Budget]) -> list[_Chain]:
    """Ascending budgets sorted into as few chains as come naturally: one for each shape."""
    chains: list[_Chain] = []
    for budget in budgets:
        chain = next((chain for chain in chains if chain.takes(budget)), None)
        if chain is None:
            chains.append(_Chain(budget))
        else:
            chain.budgets.append(budget)
    return chains


def _widest(budgets: Sequence[Budget]) -> list[Budget]:
    """The budgets that no other contains, largest first: what fits none of them fits no budget."""
    kept: list[Budget] = []
    for budget in reversed(budgets):
        whole = Load(0, budget.tokens, budget.rows, budget.segments, budget.longest_segment,
                     budget.windows, 0)  # fmt: skip
        if all(other.refuses(whole) for other in kept):
            kept.append(budget)
    return kept


def _stretches(items: Ints, starts: Ints) -> list[tuple[int, ...]]:
    """The items of each run, in the caller's order."""
    listed = items.tolist()
    return [tuple(sorted(listed[start:end])) for start, end in pairwise(starts.tolist())]


def _longest(bundle: tuple[Load, Sequence[int]]) -> int:
    return bundle[0].longest_segment
