"""Packing items into replays: every capacity kept, the cheapest by measured cost, deterministic.

Up to ``EXACT_ITEMS`` items, the cheapest cut of the items in sorted order is found (one pass of
dynamic programming over its stretches); beyond, groups are filled one after another. Inside a
group, items keep the caller's order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

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
        self._tokens = [budget.tokens for budget in self.budgets]

    def pack(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Groups that cover every item once, in the order of their first items.

        Args:
            specs: what each item costs, in the caller's order.
        """
        fitting, groups = [], []
        for item, spec in enumerate(specs):
            reason = self.overflow(spec)
            if reason is None:
                fitting.append(item)
            else:
                cost = self.costs.eager(Load.of([spec]))
                groups.append(Group((item,), None, cost, f"over {reason}"))
        groups += self._pack_fitting(fitting, specs)
        return sorted(groups, key=lambda group: group.items[0])

    def whole(self, specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Everything at once, eagerly (also when there is nothing)."""
        reason = "eager backend" if specs else "empty"
        return [Group(tuple(range(len(specs))), None, 0.0, reason)]

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
        taken: set[int] = set()
        for budget in self.budgets[bisect_left(self._tokens, load.tokens) :]:
            if budget.segments in taken or budget.refuses(load):
                continue
            taken.add(budget.segments)  # the smallest of this shape; larger ones cost more
            cost = self.costs.replay(budget, load)
            if cost < best:
                best, choice = cost, budget
            if len(taken) == 2:
                break
        return best, choice

    def _pack_fitting(self, items: list[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        if not items:
            return []
        ordered = sorted(items, key=lambda item: (-specs[item].output_tokens, item))
        if len(items) > EXACT_ITEMS:
            return self._fill(ordered, specs)
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
        return groups

    def _fill(self, ordered: list[int], specs: Sequence[EncoderItemSpec]) -> list[Group]:
        """Fill the largest budgets one after another, large items first."""
        groups, held, load = [], list[int](), _Running()
        most = self.budgets[-1]
        for item in ordered:
            spec = specs[item]
            full = (
                len(held) == self.max_batch_size or load.tokens + spec.output_tokens > most.tokens
            )
            if held and (full or not self._takes(load, spec)):
                groups.append(self._close(held, load))
                held, load = [], _Running()
            load.add(spec)
            held.append(item)
        groups.append(self._close(held, load))
        return groups

    def _takes(self, load: _Running, spec: EncoderItemSpec) -> bool:
        """Whether the largest budget of any shape takes the load and one more item."""
        segments, windows = load.segments + spec.segments, load.windows + spec.windows
        longest = max(load.longest, spec.longest_segment)
        tokens = load.tokens + spec.output_tokens
        return any(
            tokens <= budget.tokens
            and segments <= budget.segments
            and longest <= budget.longest_segment
            and windows <= budget.windows
            for budget in self.budgets[-2:]
        )

    def _close(self, held: list[int], load: _Running) -> Group:
        price, budget = self.best(load.freeze())
        return _group(held, budget, price)


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


def _group(items: list[int], budget: Budget | None, cost: float) -> Group:
    return Group(tuple(sorted(items)), budget, cost, None if budget else "cheaper")
