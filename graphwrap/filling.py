"""Filling one run after another, for more items than can be divided exactly: as arrays.

Items stand in a line, and every run takes the next ones, as many as it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from encoders.contract import EncoderItemSpec

from .budgets import Budget
from .subsets import Ints, Loads

UNBOUNDED = 2**62


def read_table(specs: Sequence[EncoderItemSpec]) -> Ints:
    """Rows, tokens, segments, longest segment and windows of each item [n, 5]."""
    width = len(EncoderItemSpec._fields)
    flat = np.fromiter(chain.from_iterable(specs), np.int64, width * len(specs))
    return flat.reshape(-1, width)


def tokens_only(tokens: int) -> Budget:
    """What bounds a run by its tokens alone."""
    return Budget(tokens, UNBOUNDED, UNBOUNDED, UNBOUNDED, UNBOUNDED)


class Line:
    """Items in a line: what any stretch of them asks for is a difference of two sums."""

    def __init__(self, table: Ints) -> None:
        rows, tokens, segments, longest, windows = table.T
        self.longest = longest
        none = np.zeros_like(rows)
        kinds = (none + 1, tokens, rows, segments, none, windows, segments * longest**2)  # of Load
        self.sums = np.zeros((len(kinds), len(table) + 1), dtype=np.int64)
        np.cumsum(kinds, axis=1, out=self.sums[:, 1:])

    def cut(self, widest: Sequence[Budget], most_items: int) -> Ints:
        """Where runs start that each take all that one of ``widest`` holds; past the last, too.

        A run takes one item at least.
        """
        count = len(self.longest)
        furthest = np.arange(1, count + 1)
        for most in widest:
            np.maximum(furthest, self._reach(most, most_items), out=furthest)
        starts, ends = [0], furthest.tolist()
        while starts[-1] < count:
            starts.append(ends[starts[-1]])
        return np.array(starts)

    def _reach(self, most: Budget, most_items: int) -> Ints:
        """For a run that starts at each item: the first item that it cannot take."""
        _, tokens, rows, segments, _, windows, _ = self.sums
        every = np.arange(len(self.longest))
        too_long = np.flatnonzero(self.longest > most.longest_segment)
        end = np.append(too_long, len(every))[np.searchsorted(too_long, every)]
        end = np.minimum(end, every + most_items)
        bounds = (most.tokens, most.rows, most.segments, most.windows)
        for sums, bound in zip((tokens, rows, segments, windows), bounds, strict=True):
            if sums[-1] > bound:
                ahead = np.searchsorted(sums, sums[:-1] + bound, side="right") - 1
                np.minimum(end, ahead, out=end)
        return end

    def loads(self, starts: Ints) -> Loads:
        """What the runs that start there ask for."""
        sums = np.diff(self.sums[:, starts], axis=1).astype(np.float64)
        return Loads(sums, np.maximum.reduceat(self.longest, starts[:-1]), nested=False)
