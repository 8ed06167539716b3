"""Packing items into replays: every capacity kept, the cheapest by measured cost, deterministic.

One run of everything is taken where no split could cost less. Else, up to ``EXACT_ITEMS`` items,
the cheapest of all divisions into groups is found; beyond, groups are filled one after another, and
the last, which may be half empty, is divided so in bundles.
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
    """Items that run together: through one budget, or (None) eagerly, and then why."""

    items: tuple[int, ...]
    budget: Budget | None
    cost: float
    reason: str | None = None


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
        """
        fitting, groups = [], []
        for item, (rows, tokens, segments, longest, windows) in enumerate(specs):
            for most in self._widest:
                if (
                    tokens <= most.tokens
                    and rows <= most.rows
                    and segments <= most.segments
                    and longest <= most.longest_segment
                    and windows <= most.windows
                ):
                    fitting.append(item)
                    break
            else:
                groups.append(self._eager(item, specs[item]))
        groups += self._pack_fitting(fitting, specs)
        return sorted(groups, key=lambda group: group.items[0])

    def whole(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Everything at once, eagerly (also when there is nothing)."""
        reason = "eager backend" if specs else "empty"
        return [Group(tuple(range(len(specs))), None, 0.0, reason)]

    def _eager(self, item: int, spec: EncoderItemSpec) -> Group:
        price = self.costs.eager(Load.of([spec]))
        return Group((item,), None, price, f"over {self.overflow(spec)}")

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

    def _pack_fitting(self, items: list[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        if not items:
            return []
        if len(items) <= EXACT_ITEMS:
            return self._divide([[item] for item in items], specs)
        tokens = [spec.output_tokens for spec in specs]
        groups = self._fill(sorted(items, key=tokens.__getitem__, reverse=True), specs)
        last = groups.pop().items
        size = -(-len(last) // EXACT_ITEMS)
        bundles = [last[at : at + size] for at in range(0, len(last), size)]
        groups += self._divide(bundles, specs)
        whole = self.costs.eager(Load.of([specs[item] for item in items]))
        cheaper = whole < sum(group.cost for group in groups)
        return [_group(items, None, whole)] if cheaper else groups

    def _divide(
        self, bundles: Sequence[Sequence[int]], specs: Sequence[EncoderItemSpec]
    ) -> list[Group]:
        """The cheapest division of a few bundles of items into groups, of all there are."""
        load = Load.of([specs[item] for bundle in bundles for item in bundle])
        price, budget = self.best(load)
        if price <= self.costs.split(load):
            return [_group([item for bundle in bundles for item in bundle], budget, price)]
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
            groups.append(_group(taken, budget, price))
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
                groups.append(self._close(held, load))
                held, length = [], specs[item].longest_segment
                tokens = rows = segments = windows = area = 0
            held.append(item)
            tokens, rows, longest = tokens + more, rows + more_rows, length
            segments, windows = segments + frames, windows + tiles
            area += frames * specs[item].longest_segment ** 2
        load = Load(len(held), tokens, rows, segments, longest, windows, area)
        groups.append(self._close(held, load))
        return groups

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

    def _close(self, held: list[int], load: Load) -> Group:
        price, budget = self.best(load)
        return _group(held, budget, price)


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


def _group(items: list[int], budget: Budget | None, cost: float) -> Group:
    return Group(tuple(sorted(items)), budget, cost, None if budget else "cheaper")
