"""Every group that a few items can form, and the cheapest division into groups: exact, as arrays.

A subset of ``n`` items is a number below ``2**n`` whose bit ``i`` says whether item ``i`` is in it.
Arrays over all subsets answer in tens of microseconds what loops answer in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .budgets import Load

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Places: TypeAlias = npt.NDArray[np.int32]


class Loads(NamedTuple):
    """Many loads at once: of every subset (``2**n``), or of other groups."""

    sums: Floats
    """Of every field of :class:`Load`, [7, groups]; that of longest segments says nothing."""
    longest_segment: Ints
    """[groups]"""
    nested: bool = True
    """Whether the last group holds all others."""

    @classmethod
    def of_subsets(cls, loads: Sequence[Load]) -> Loads:
        """Sums over every subset of the loads, the longest segment a maximum.

        Args:
            loads: with rising longest segments, so that a subset's is that of its last.
        """
        count = len(loads)
        flat = np.fromiter(chain.from_iterable(loads), np.float64, count * len(Load._fields))
        fields = flat.reshape(count, len(Load._fields))
        members, last = _members(count)  # a float64 product is many times quicker than integers'
        lengths = np.array([0, *(load.longest_segment for load in loads)])
        return cls(fields.T @ members, lengths.take(last))

    @property
    def items(self) -> Floats:
        """How many items are in each group."""
        return self.sums[0]

    @property
    def tokens(self) -> Floats:
        """Output tokens of each group."""
        return self.sums[1]

    @property
    def rows(self) -> Floats:
        """Rows of each group."""
        return self.sums[2]

    @property
    def area(self) -> Floats:
        """Sums of squared segment lengths."""
        return self.sums[6]


@cache
def _members(count: int) -> tuple[Floats, Ints]:
    """Of every subset: whether an item is in it, [count, 2**count] ones and zeros, and its last.

    The last is one more than its place, [2**count]: 0 for the subset of nothing.
    """
    subsets = np.arange(1 << count)
    bits = subsets >> np.arange(count)[:, None] & 1
    return bits.astype(np.float64), np.frexp(subsets)[1].astype(np.int64)


class Shelf:
    """What the cheapest budget that holds a load costs, for many loads at once, by look-up."""

    def __init__(self, chains: Sequence[tuple[Sequence[Sequence[int]], Sequence[float]]]) -> None:
        """Each chain: capacities of its ascending budgets, by kind, and the cost from each on."""
        prices, first = list[float](), list[list[Places]]()
        for capacities, empties in chains:
            first.append([_places(kind, len(prices)) for kind in capacities])
            prices += [*empties, np.inf]  # what is over the last
        self._prices = np.array(prices)
        self._first = [_side_by_side(kind) for kind in zip(*first, strict=True)]
        smallest = [[kind[0] for kind in capacities] for capacities, _ in chains]
        self._held = [min(kind) for kind in zip(*smallest, strict=True)][1:]

    def empties(self, loads: Loads) -> Floats:
        """Costs before the first item [groups], infinite for what no budget holds."""
        prices: Floats = self._prices.take(self._at(loads)).min(axis=0)
        return prices

    def cheapest(self, loads: Loads) -> tuple[Floats, Ints]:
        """The same, and where among all chains' budgets (and one more a chain) each cost is."""
        at = self._at(loads)
        prices = self._prices.take(at)
        best = prices.argmin(axis=0)[None]
        return np.take_along_axis(prices, best, 0)[0], np.take_along_axis(at, best, 0)[0]

    def _at(self, loads: Loads) -> Places:
        """In each chain, the place of the first budget that holds a load [chains, groups]."""
        _, tokens, rows, segments, _, windows, _ = loads.sums.astype(np.int64)
        asked = (rows, segments, loads.longest_segment, windows)
        at = self._first[0].take(tokens, axis=1, mode="clip")
        for first, held, amount in zip(self._first[1:], self._held, asked, strict=True):
            most = amount[-1] if loads.nested else amount.max()
            if most > held:  # else the smallest budgets take every load
                np.maximum(at, first.take(amount, axis=1, mode="clip"), out=at)
        return at


def _places(capacities: Sequence[int], start: int) -> Places:
    """For 0, 1, 2 ... up to one over the largest: the place of the first capacity to hold it."""
    below = np.array([-1, *capacities, capacities[-1] + 1])
    return np.repeat(np.arange(start, start + len(below) - 1, dtype=np.int32), np.diff(below))


def _side_by_side(places: Sequence[Places]) -> Places:
    """One row a chain, the shorter ones continued."""
    longest = max(map(len, places))
    return np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in places])


def cheapest_division(prices: Floats) -> list[int]:
    """The groups whose prices sum to the least, over all ways to divide the items.

    Args:
        prices: of running each subset as one group, [2**n]; infinite where it cannot run.

    Returns:
        Disjoint subsets that together hold every item.

    In a subset's best division one group holds its last item, with some of the others; what is left
    lies below. So the subsets of one last item are solved in one sweep, after all earlier ones.
    """
    count = len(prices).bit_length() - 1
    least = np.zeros_like(prices)
    solved = min(count - 1, 3)
    least[1 : 1 << solved] = _three(prices)[: (1 << solved) - 1]
    for last in range(solved, count - 1):  # of those with the last item of all, only one counts
        bit = 1 << last
        beside, below, starts = _splits(last)
        sums = prices[bit : 2 * bit].take(beside, mode="clip")  # unchecked: nothing is clipped
        sums += least.take(below, mode="clip")
        least[bit : 2 * bit] = np.minimum.reduceat(sums, starts)
    half = 1 << count - 1
    # The last item, with any of the others; what is left, the other way round.
    taken = half + int(np.argmin(prices[half:] + least[half - 1 :: -1]))
    division = [taken]
    left = len(prices) - 1 - taken
    while left:
        division.append(left if least[left] == prices[left] else _group_of(left, prices, least))
        left -= division[-1]
    return division


def _three(prices: Floats) -> list[float]:
    """The least of each subset of the first three items, but that of nothing: without arrays."""
    _, a, b, ab, c, ac, bc, abc = (*prices[:8].tolist(), *[np.inf] * 6)[:8]
    ab, ac, bc = min(ab, a + b), min(ac, a + c), min(bc, b + c)
    return [a, b, ab, c, ac, bc, min(abc, a + bc, b + ac, c + ab)]


def _group_of(left: int, prices: Floats, least: Floats) -> int:
    """The group of the last item, in the best division of what is left."""
    bit = 1 << left.bit_length() - 1
    every = np.arange(bit)
    beside = every[every & left == every]
    best = int(np.argmin(prices[bit + beside] + least[left - bit - beside]))
    return bit + int(beside[best])


@cache
def _splits(count: int) -> tuple[Ints, Ints, Ints]:
    """Every subset of ``count`` items split in two, sorted by subset: 3**count pairs.

    Returns:
        One side, the other, and where each subset's pairs start [2**count].
    """
    one, other = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for item in range(count):
        bit = 1 << item
        one, other = np.r_[one, one + bit, one], np.r_[other, other, other + bit]
    whole = one + other
    order = np.argsort(whole, kind="stable")
    starts = np.searchsorted(whole[order], np.arange(1 << count))
    return one[order], other[order], starts
