"""What a replay and an eager run cost: measured once at capture, then frozen.

Routing asks two questions, "what would a replay of this budget cost for this load?" and "what would
eager cost?". Both answers come from one table of milliseconds. A replay without segments costs what
its padded rows cost; attention comes on top, for the rows and squared lengths of the segments that
are there. An eager run of the same rows costs the same without padding, plus gaps between launches,
and never less than the host needs to launch it; where both are about the same, it costs more than
either, since some stretches wait for the host and others for the device. Frozen and saved, the
table makes the same choices in every process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from .budgets import Budget, Load
from .subsets import Floats, Loads

FAR = 1 << 20
"""How many largest budgets away the last corner of a price curve lies."""


class Costs(Protocol):
    """Prices for the packer, in any one unit."""

    def replay(self, budget: Budget, load: Load) -> float: ...

    def eager(self, load: Load) -> float: ...

    def empty(self, budget: Budget) -> float:
        """A replay before its first item: what is cheapest here is cheapest for any load."""
        ...

    def cheapest(self, loads: Loads, empty: Floats) -> Floats:
        """The lesser of a replay and an eager run of each load; ``empty`` is the replay's part."""
        ...

    def split(self, load: Load) -> float:
        """The least that two runs or more could cost together."""
        ...


class RowCosts:
    """Prices without a clock: the rows a replay computes. Everything that fits is replayed."""

    CALL = 64
    """What one more run costs, in rows: fewer runs win where padding is equal."""
    NEVER = 10**9
    """What an item that runs eagerly costs: more than any replay."""

    def replay(self, budget: Budget, load: Load) -> float:
        """Rows of the budget."""
        return self.empty(budget)

    def empty(self, budget: Budget) -> float:
        """Rows of the budget, and a call."""
        return budget.rows + self.CALL

    def eager(self, load: Load) -> float:
        """More an item than any replay; the rows, and a call."""
        return self.NEVER * load.items + load.rows + self.CALL

    def cheapest(self, loads: Loads, empty: Floats) -> Floats:
        """Where there is a replay, it."""
        return np.minimum(empty, self.NEVER * loads.items + (loads.rows + self.CALL))

    def split(self, load: Load) -> float:
        """The real rows, and two calls."""
        return load.rows + 2 * self.CALL


@dataclass(frozen=True)
class CostTable:
    """Measured prices in milliseconds."""

    empty_ms: Mapping[Budget, float]
    """A replay with every row padding."""
    row_ms: float
    """Attention a real row, and a unit of squared segment length: one fit over all budgets."""
    area_ms: float
    replay_host_ms: float
    """Wall time of a replay beyond its graph: copies in and out, launch."""
    eager_floor_ms: float
    """Wall time that the host needs to launch an eager run, however small."""
    eager_gap_ms: float
    """Device time of an eager run beyond a replay of the same rows: gaps between launches."""

    def replay(self, budget: Budget, load: Load) -> float:
        """The padded rows, and attention for the segments that are there."""
        attention = self.row_ms * load.rows + self.area_ms * load.area
        return self.empty(budget) + attention

    def empty(self, budget: Budget) -> float:
        """The padded rows."""
        return self.empty_ms[budget] + self.replay_host_ms

    def eager(self, load: Load) -> float:
        """The same without padding, and the host's floor: their 8-norm, not under the larger."""
        attention = self.row_ms * load.rows + self.area_ms * load.area
        device = self.device(load.rows) + attention + self.eager_gap_ms
        return float((device**8 + self.eager_floor_ms**8) ** 0.125)

    def cheapest(self, loads: Loads, empty: Floats) -> Floats:
        """Both with attention for the segments that are there."""
        attention = self.row_ms * loads.rows
        attention += self.area_ms * loads.area
        rows, device = self._corners
        eager = np.interp(loads.rows, rows, device)
        eager += attention
        for _ in range(3):
            eager *= eager
        eager += self.eager_floor_ms**8
        for _ in range(3):
            np.sqrt(eager, out=eager)
        replay = empty + attention
        return np.minimum(replay, eager, out=replay)

    def split(self, load: Load) -> float:
        """No padding at all, twice the start of a run, by the line that says most."""
        attention = self.row_ms * load.rows + self.area_ms * load.area
        host = 2 * min(self.replay_host_ms, self.eager_gap_ms)
        return host + attention + max(2 * start + slope * load.rows for start, slope in self._below)

    @cached_property
    def _below(self) -> list[tuple[float, float]]:
        """Lines (milliseconds at no rows, a row) that no run lies below, of two or more together.

        The edges of the lower hull of everything measured: with neither part negative, the runs of
        a split cost at least the line's start each, and its slope for all their rows.
        """
        lowest = {0: self._curve[1][0]}
        for budget, cost in self.empty_ms.items():
            lowest[budget.rows] = min(cost, lowest.get(budget.rows, cost))
        corners = sorted(lowest.items())
        edges = [(min(lowest.values()), 0.0)]
        at = 0
        while at < len(corners) - 1:
            rows, cost = corners[at]
            slope, at = min(
                ((more - cost) / (further - rows), k)
                for k, (further, more) in enumerate(corners)
                if k > at
            )
            start = cost - slope * rows
            if start >= 0 and slope >= 0:
                edges.append((start, slope))
        return edges

    def device(self, rows: int) -> float:
        """Milliseconds of rows without attention: between budgets a line, beyond in proportion."""
        held, ms = self._curve
        at = min(bisect_left(held, rows, 1), len(held) - 1)
        share = (rows - held[at - 1]) / (held[at] - held[at - 1])
        return ms[at - 1] + (ms[at] - ms[at - 1]) * share

    @cached_property
    def _curve(self) -> tuple[list[int], list[float]]:
        """Corners of the line: no rows, every budget's, and a point far beyond."""
        by_rows = {budget.rows: ms for budget, ms in sorted(self.empty_ms.items())}
        held = sorted(by_rows)
        ms = [by_rows[rows] for rows in held]
        slope = (ms[1] - ms[0]) / (held[1] - held[0]) if len(held) > 1 else ms[0] / held[0]
        start = max(ms[0] - slope * held[0], 0.0)
        return [0, *held, held[-1] * FAR], [start, *ms, ms[-1] * FAR]

    @cached_property
    def _corners(self) -> Floats:
        """The same, with the gaps of an eager run."""
        rows, ms = self._curve
        return np.array([rows, [each + self.eager_gap_ms for each in ms]])


def fit_attention(points: Sequence[tuple[Load, float]]) -> tuple[float, float]:
    """Milliseconds a row and a unit of area that explain ``points`` best, neither negative.

    Least squares of ``ms = row_ms * rows + area_ms * area``, each point in proportion to its size.
    """
    scaled = [(load.rows / ms, load.area / ms) for load, ms in points if ms > 0]
    rr = sum(r * r for r, _ in scaled)
    ra = sum(r * a for r, a in scaled)
    aa = sum(a * a for _, a in scaled)
    r1, a1 = sum(r for r, _ in scaled), sum(a for _, a in scaled)
    determinant = rr * aa - ra * ra
    if determinant > 1e-9 * rr * aa:
        row_ms = (r1 * aa - a1 * ra) / determinant
        area_ms = (a1 * rr - r1 * ra) / determinant
        if row_ms >= 0 and area_ms >= 0:
            return row_ms, area_ms
    return (0.0, a1 / aa) if aa else (0.0, 0.0)
