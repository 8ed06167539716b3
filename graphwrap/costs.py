"""What a replay and an eager run cost: measured once at capture, then frozen.

Routing asks two questions, "what would a replay of this budget cost for this load?" and "what would
eager cost?". Both answers come from a table of milliseconds a budget, measured with no segments and
with one full item, so that attention (which grows with the sum of squared segment lengths) is told
from everything else (which grows with rows). Frozen and saved, the table makes the same choices in
every process.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from .budgets import Budget, Load

REPLAY_MARGIN = 0.97
"""A replay must promise to be 3 % cheaper than eager: eager never surprises anybody."""


class Costs(Protocol):
    """Prices for the packer, in any one unit."""

    def replay(self, budget: Budget, load: Load) -> float: ...

    def eager(self, load: Load) -> float: ...


class RowCosts:
    """Prices without a clock: the rows a replay computes. Everything that fits is replayed."""

    CALL = 64
    """What one more replay costs, in rows: fewer replays win where padding is equal."""

    def replay(self, budget: Budget, load: Load) -> float:
        """Rows of the budget."""
        return budget.rows + self.CALL

    def eager(self, load: Load) -> float:
        """More than any replay."""
        return 1e12 + load.rows


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one budget's replay: of an empty one, and of one full item."""

    empty_ms: float
    full_ms: float
    full_area: int


@dataclass(frozen=True)
class CostTable:
    """Measured prices in milliseconds."""

    timings: dict[Budget, Timing]
    eager_floor_ms: float
    """Host time of an eager run of any size: launches bind it below some size."""
    replay_host_ms: float
    """Host time of a replay beyond its graph: copies in and out."""

    def replay(self, budget: Budget, load: Load) -> float:
        """The empty replay, and attention for the segments that are there."""
        timing = self.timings[budget]
        share = min(load.area / max(timing.full_area, 1), 1.0)
        device = timing.empty_ms + max(timing.full_ms - timing.empty_ms, 0.0) * share
        return (device + self.replay_host_ms) / REPLAY_MARGIN

    def eager(self, load: Load) -> float:
        """The same device time without padding, but never under the host's floor."""
        return max(self._device(load), self.eager_floor_ms)

    def _device(self, load: Load) -> float:
        """Interpolated between the budgets of the long shape by rows; beyond them in proportion."""
        rungs = self._rungs()
        rows = [budget.rows for budget, _ in rungs]
        at = min(max(bisect_left(rows, load.rows), 1), len(rungs) - 1)
        (low, below), (high, above) = rungs[max(at - 1, 0)], rungs[at]
        span = max(high.rows - low.rows, 1)
        share = (load.rows - low.rows) / span
        empty = below.empty_ms + (above.empty_ms - below.empty_ms) * share
        slope = max(above.full_ms - above.empty_ms, 0.0) / max(above.full_area, 1)
        return max(empty, 0.0) + slope * load.area

    def _rungs(self) -> list[tuple[Budget, Timing]]:
        longest: dict[int, Budget] = {}
        for budget in self.timings:
            held = longest.get(budget.rows)
            if held is None or budget.longest_segment > held.longest_segment:
                longest[budget.rows] = budget
        return [(longest[rows], self.timings[longest[rows]]) for rows in sorted(longest)]

    def save(self, path: str | os.PathLike[str], fingerprint: dict[str, str]) -> None:
        """Write the table as JSON, with what it was measured on."""
        rows = [{**asdict(budget), **asdict(timing)} for budget, timing in self.timings.items()]
        body = {
            "fingerprint": fingerprint,
            "eager_floor_ms": self.eager_floor_ms,
            "replay_host_ms": self.replay_host_ms,
            "budgets": rows,
        }
        Path(path).write_text(json.dumps(body, indent=1) + "\n")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        fingerprint: dict[str, str],
        budgets: Sequence[Budget],
    ) -> CostTable:
        """Read a table for these budgets.

        Raises:
            ValueError: a table measured on something else, or for other budgets.
        """
        body = json.loads(Path(path).read_text())
        for key, value in fingerprint.items():
            if body["fingerprint"].get(key) != value:
                raise ValueError(
                    f"{path} was measured with {key}={body['fingerprint'].get(key)!r}, this is "
                    f"{value!r}: capture here and save_table again"
                )
        timings = {}
        for row in body["budgets"]:
            timing = Timing(row.pop("empty_ms"), row.pop("full_ms"), row.pop("full_area"))
            timings[Budget(**row)] = timing
        missing = [budget.name for budget in budgets if budget not in timings]
        if missing:
            raise ValueError(
                f"{path} has no times for budgets {missing}: use the ladder it was for"
            )
        kept = {budget: timings[budget] for budget in budgets}
        return cls(kept, body["eager_floor_ms"], body["replay_host_ms"])
