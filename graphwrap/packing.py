"""Packing items into replays: every capacity kept, the cheapest by measured cost, deterministic.

One run of everything is taken where no split could cost less. Else, up to ``EXACT_ITEMS`` items,
the cheapest cut of the items in sorted order is found (one pass of dynamic programming over its
stretches), then items move into room that budgets have left; beyond, groups are filled one after
another. Inside a group, items keep the caller's order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from encoders.contract import EncoderItemSpec

from .budgets import Budget, Load
from .costs import Costs

EXACT_ITEMS = 12


@dataclass(frozen=True)
class Group:
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
        self._widest = _widest(self.budgets)

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
        tokens = [spec.output_tokens for spec in specs]
        ordered = sorted(items, key=tokens.__getitem__, reverse=True)  # equal ones keep their order
        if len(items) > EXACT_ITEMS:
            return self._fill(ordered, specs)
        load = Load.of([specs[item] for item in items])
        price, budget = self.best(load)
        if price <= self.costs.split(load):
            return [_group(items, budget, price)]
        return self._cut(ordered, specs)

    def _cut(self, ordered: list[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """The cheapest cut of ``ordered`` into stretches."""
        count = len(ordered)
        cost: list[float] = [0.0] * (count + 1)
        step: list[tuple[int, Budget | None, float]] = [(0, None, 0.0)] * (count + 1)
        for end in range(1, count + 1):
            cost[end] = float("inf")
            load = _Running()
            for start in range(end - 1, -1, -1):
                load.add(specs[ordered[start]])
                price, budget = self.best(load.freeze())
                if cost[start] + price < cost[end]:
                    cost[end], step[end] = cost[start] + price, (start, budget, price)
        groups, end = [], count
        while end:
            start, budget, price = step[end]
            groups.append(_group(ordered[start:end], budget, price))
            end = start
        return self._refine(groups, specs) if len(groups) > 1 else groups

    def _refine(self, groups: list[Group], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Move items into the room that other groups' budgets leave, where that is cheaper."""
        loads = [Load.of([specs[item] for item in group.items]) for group in groups]
        for target in range(len(groups)):
            for source in range(len(groups)):
                into = groups[target].budget
                if into is None or source == target or not groups[source].items:
                    continue
                moved = self._fitting(groups[source].items, specs, loads[target], into)
                if not moved:
                    continue
                pair = groups[source].items + groups[target].items
                left = [item for item in groups[source].items if item not in moved]
                taken = [item for item in pair if item not in left]
                shrunk, grown = (Load.of([specs[i] for i in part]) for part in (left, taken))
                price, budget = self.best(shrunk) if left else (0.0, None)
                full = self.costs.replay(into, grown)
                if price + full < groups[source].cost + groups[target].cost:
                    groups[source], loads[source] = _group(left, budget, price), shrunk
                    groups[target], loads[target] = _group(taken, into, full), grown
        return [group for group in groups if group.items]

    def _fitting(
        self, items: Sequence[int], specs: Sequence[EncoderItemSpec], load: Load, budget: Budget
    ) -> set[int]:
        """Items, large ones first, that fit the room a load leaves in its budget."""
        count, tokens = self.max_batch_size - load.items, budget.tokens - load.tokens
        segments, windows = budget.segments - load.segments, budget.windows - load.windows
        chosen = set[int]()
        for item in sorted(items, key=lambda item: -specs[item].output_tokens):
            _, more, frames, longest, tiles = specs[item]
            if (
                len(chosen) < count
                and more <= tokens
                and frames <= segments
                and longest <= budget.longest_segment
                and tiles <= windows
            ):
                chosen.add(item)
                tokens, segments, windows = tokens - more, segments - frames, windows - tiles
        return chosen

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
                tokens + more, segments + frames, length, windows + tiles
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

    def _takes(self, tokens: int, segments: int, longest: int, windows: int) -> bool:
        """Whether one of the widest budgets takes so much."""
        for most in self._widest:
            if (
                tokens <= most.tokens
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

    def takes(self, budget: Budget) -> bool:
        """Whether a budget continues the chain."""
        return all(ours <= its for ours, its in zip(self.budgets[-1], budget, strict=True))

    def rank(self, costs: Costs) -> None:
        """Note which budget from each on is cheapest: a measured table need not grow with size."""
        nothing = Load.of([])
        best = self.budgets[-1]
        self._cheapest = []
        for budget in reversed(self.budgets):
            if costs.replay(budget, nothing) <= costs.replay(best, nothing):
                best = budget
            self._cheapest.insert(0, best)

    @cached_property
    def _capacities(self) -> list[tuple[int, ...]]:
        return list(zip(*self.budgets, strict=True))

    def cheapest(self, load: Load) -> Budget | None:
        """The cheapest budget that holds a load: those before the first that fits do not."""
        tokens, rows, segments, longest, windows = self._capacities
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


class _Running:
    """A load that grows item by item."""

    __slots__ = ("area", "items", "longest", "rows", "segments", "tokens", "windows")

    def __init__(self) -> None:
        self.items = self.tokens = self.rows = self.segments = 0
        self.longest = self.windows = self.area = 0

    def add(self, spec: EncoderItemSpec) -> None:
        rows, tokens, segments, longest, windows = spec
        self.items += 1
        self.tokens += tokens
        self.rows += rows
        self.segments += segments
        self.windows += windows
        self.area += segments * longest * longest
        if longest > self.longest:
            self.longest = longest

    def freeze(self) -> Load:
        return Load(
            self.items, self.tokens, self.rows, self.segments, self.longest, self.windows, self.area
        )


def _widest(budgets: Sequence[Budget]) -> list[Budget]:
    """The budgets that no other contains, largest first: what fits none of them fits no budget."""
    kept: list[Budget] = []
    for budget in reversed(budgets):
        whole = Load(0, budget.tokens, budget.rows, budget.segments, budget.longest_segment,
                     budget.windows, 0)  # fmt: skip
        if all(other.refuses(whole) for other in kept):
            kept.append(budget)
    return kept


def _group(items: list[int], budget: Budget | None, cost: float) -> Group:
    return Group(tuple(sorted(items)), budget, cost, None if budget else "cheaper")
