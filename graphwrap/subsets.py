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
        """Sums over every subset of the loads, the longest segment a maximum."""
        longest = Load._fields.index("longest_segment")
        fields = np.array(loads, dtype=np.int64).T
        totals = np.zeros((len(Load._fields), 1 << len(loads)), dtype=np.int64)
        for item in range(len(loads)):
            half, end = 1 << item, 2 << item
            np.add(totals[:, :half], fields[:, item : item + 1], out=totals[:, half:end])
            np.maximum(totals[longest, :half], fields[longest, item], out=totals[longest, half:end])
        return cls(*totals)


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
    division, left = [], len(prices) - 1
    while left:
        bit = 1 << left.bit_length() - 1
        every = np.arange(bit)
        beside = every[every & (left ^ bit) == every]
        below = left ^ bit ^ beside
        best = int(np.argmin(prices[bit + beside] + least[below]))
        division.append(bit + int(beside[best]))
        left = int(below[best])
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
