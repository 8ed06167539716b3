"""Packing items into replays: every capacity kept, the cheapest by measured cost, deterministic.

One run of everything is taken where no split could cost less. Else, up to ``EXACT_ITEMS`` items,
the cheapest of all divisions into groups is found; beyond, groups are filled one after another, and
the last, which may be half empty, is divided so in bundles.
Items that no budget holds run eagerly, together: each alone would wait for its launches again.
Inside a group, items keep the caller's order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from encoders.contract import EncoderItemSpec

from .budgets import Budget, Load
from .costs import Costs
from .subsets import Loads, Shelf, cheapest_division

EXACT_ITEMS = 12


class Group(NamedTuple):
    """Items that run together: through one budget, or (None) eagerly, and then why each."""

    items: tuple[int, ...]
    budget: Budget | None
    cost: float
    reasons: tuple[str, ...] = ()


class Packer:
    """Packs items for one ladder and one table of prices."""

    def __init__(self, budgets: Sequence[Budget], costs: Costs, max_batch_size: int) -> None:
        self.budgets = tuple(sorted(budgets))
        self.costs = costs
        self.max_batch_size = max_batch_size
        self._chains = _chains(self.budgets)
        for chain in self._chains:
            chain.rank(costs)
        self._shelf = Shelf([(chain.capacities, chain.empties) for chain in self._chains])
        self._widest = _widest(self.budgets)
        cheapest_division(np.zeros(1 << EXACT_ITEMS))  # its tables are made once a process: here

    def pack(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Groups that cover every item once, in the order of their first items.

        Args:
            specs: what each item costs, in the caller's order.

        Returns:
            The groups; those that run eagerly have a reason an item. None for no items.
        """
        items = range(len(specs))
        if self.budgets and len(specs) <= EXACT_ITEMS:
            groups = self._divide([[item] for item in items], specs) if specs else []
        else:
            groups = self._pack_many(items, specs)
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
        reasons = []
        for budget in reversed(self.budgets):
            reason = budget.refuses(load)
            if reason is None:
                return None
            reasons.append(reason)
        return next((reason for reason in reasons if reason != "tokens"), "tokens")

    def best(self, load: Load) -> tuple[float, Budget | None]:
        """The cheapest way to run a load at once: a budget, or eager (None)."""
        best, choice = self.costs.eager(load), None
        if load.items > self.max_batch_size:
            return best, choice
        for chain in self._chains:
            budget = chain.cheapest(load)
            if budget is not None:
                cost = self.costs.replay(budget, load)
                if cost < best:
                    best, choice = cost, budget
        return best, choice

    def _pack_many(self, items: Sequence[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """What fits packed, what does not in one eager run; or all in one, where that is less."""
        fitting, over = list[int](), list[int]()
        for item in items:
            (fitting if self._holds(specs[item]) else over).append(item)
        groups = self._fill_and_divide(fitting, specs) if fitting else []
        if over:
            price = self.costs.eager(Load.of([specs[item] for item in over]))
            groups.append(self._group(over, None, price, specs))
        whole = self.costs.eager(Load.of(specs))
        cheaper = whole < sum(group.cost for group in groups)
        return [self._group(items, None, whole, specs)] if cheaper else groups

    def _fill_and_divide(self, items: list[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Groups of items that all fit: full ones, and the cheapest division of the last."""
        tokens = [spec.output_tokens for spec in specs]
        groups = self._fill(sorted(items, key=tokens.__getitem__, reverse=True), specs)
        last = groups.pop().items
        size = -(-len(last) // EXACT_ITEMS)
        bundles = [last[at : at + size] for at in range(0, len(last), size)]
        return groups + self._divide(bundles, specs)

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
        groups = []
        for subset in cheapest_division(self.costs.cheapest(loads, empty)):
            taken = [
                item for k, (_, bundle) in enumerate(each) if subset >> k & 1 for item in bundle
            ]
            price, budget = self.best(Load.of([specs[item] for item in taken]))
            groups.append(self._group(taken, budget, price, specs))
        return groups

    def _fill(self, ordered: list[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Fill the widest budgets one after another, large items first.

        Sums are kept in local names: ten thousand items take a few milliseconds so, and fifty with
        a function call each.
        """
        groups, held = [], list[int]()
        tokens = rows = segments = longest = windows = area = 0
        for item in ordered:
            more_rows, more, frames, length, tiles = specs[item]
            length = max(length, longest)
            fits = len(held) < self.max_batch_size and self._takes(
                tokens + more, rows + more_rows, segments + frames, length, windows + tiles
            )
            if held and not fits:
                load = Load(len(held), tokens, rows, segments, longest, windows, area)
                groups.append(self._close(held, load, specs))
                held, length = [], specs[item].longest_segment
                tokens = rows = segments = windows = area = 0
            held.append(item)
            tokens, rows, longest = tokens + more, rows + more_rows, length
            segments, windows = segments + frames, windows + tiles
            area += frames * specs[item].longest_segment ** 2
        load = Load(len(held), tokens, rows, segments, longest, windows, area)
        groups.append(self._close(held, load, specs))
        return groups

    def _holds(self, spec: EncoderItemSpec) -> bool:
        rows, tokens, segments, longest, windows = spec
        return self._takes(tokens, rows, segments, longest, windows)

    def _takes(self, tokens: int, rows: int, segments: int, longest: int, windows: int) -> bool:
        """Whether one of the widest budgets takes so much."""
        for most in self._widest:
            if (
                tokens <= most.tokens
                and rows <= most.rows
                and segments <= most.segments
                and longest <= most.longest_segment
                and windows <= most.windows
            ):
                return True
        return False

    def _close(self, held: list[int], load: Load, specs: Sequence[EncoderItemSpec]) -> Group:
        price, budget = self.best(load)
        return self._group(held, budget, price, specs)

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
        each = [specs[item] for item in ordered]
        reasons = ["cheaper" if self._holds(s) else f"over {self.overflow(s)}" for s in each]
        return Group(ordered, None, cost, tuple(reasons))


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


def _longest(bundle: tuple[Load, Sequence[int]]) -> int:
    return bundle[0].longest_segment
