"""Every group that a few items can form, and the cheapest division into groups: exact, as arrays.

A subset of ``n`` items is a number below ``2**n`` whose bit ``i`` says whether item ``i`` is in it.
Arrays over all subsets answer in tens of microseconds what loops answer in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .budgets import Load

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Places: TypeAlias = npt.NDArray[np.int32]


class Loads(NamedTuple):
    """The load of every subset, field by field: arrays [2**n]."""

    items: Ints
    tokens: Ints
    rows: Ints
    segments: Ints
    longest_segment: Ints
    windows: Ints
    area: Ints

    @classmethod
    def of_subsets(cls, loads: Sequence[Load]) -> Loads:
        """Sums over every subset of the loads, the longest segment a maximum.

        Args:
            loads: with rising longest segments, so that a subset's is that of its last.
        """
        fields = np.array(loads, dtype=np.float64)  # a float64 product is many times quicker
        items, tokens, rows, segments, _, windows, area = (fields.T @ _members(len(loads))).astype(
            np.int64
        )
        lengths = [0, *(load.longest_segment for load in loads)]
        longest = np.repeat(lengths, [1, *(1 << item for item in range(len(loads)))])
        return cls(items, tokens, rows, segments, longest, windows, area)

    def of(self, subset: int) -> Load:
        """The load of one subset."""
        return Load(*(int(field[subset]) for field in self))


@cache
def _members(count: int) -> Floats:
    """Whether an item is in a subset: [count, 2**count] ones and zeros."""
    bits = np.arange(1 << count) >> np.arange(count)[:, None] & 1
    return bits.astype(np.float64)


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

    def empties(self, loads: Loads) -> Floats:
        """Costs before the first item [2**n], infinite for what no budget holds."""
        asked = (loads.tokens, loads.rows, loads.segments, loads.longest_segment, loads.windows)
        at = self._first[0].take(asked[0], axis=1, mode="clip")
        for first, amount in zip(self._first[1:], asked[1:], strict=True):
            np.maximum(at, first.take(amount, axis=1, mode="clip"), out=at)
        prices: Floats = self._prices.take(at).min(axis=0)
        return prices


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
    for last in range(count - 1):  # the subsets that end with the last item of all: only one counts
        bit = 1 << last
        beside, below, starts = _splits(last)
        sums = prices[bit : 2 * bit].take(beside, mode="clip")  # unchecked: nothing is clipped
        sums += least.take(below, mode="clip")
        least[bit : 2 * bit] = np.minimum.reduceat(sums, starts)
    half = (
        1 << count - 1
    )  # the last item, with any of the others; what is left, the other way round
    taken = half + int(np.argmin(prices[half:] + least[half - 1 :: -1]))
    division = [taken]
    left = len(prices) - 1 - taken
    while left:
        bit = 1 << left.bit_length() - 1
        every = np.arange(bit)
        beside = every[every & left == every]
        best = int(np.argmin(prices[bit + beside] + least[left - bit - beside]))
        division.append(bit + int(beside[best]))
        left -= division[-1]
    return division


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
