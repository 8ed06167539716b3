"""Costs of replays and of eager runs, which packing compares, and the JSON file that keeps them.

A captured budget has one time, and the time of an eager run is interpolated between a few sizes.
``measuring`` measures the times at capture. They never change afterwards, so that the
same call is packed in the same way every time. They can be saved and loaded.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

from encoders.contract import Accelerator

from .budgets import Budget, BudgetSet

RUN_ROWS = 64
"""The cost of a replay besides its input rows, in rows, if no times were measured: of two packings
with equally many rows, the one with fewer replays is cheaper."""
NEVER = 1e12
"""Assumed cost of a row that runs eagerly, in rows of a replay, if no times were measured: a replay
is then always cheaper."""
MOST_MS = 1e12
"""The largest number of milliseconds (over thirty years) that is accepted in a file of costs."""
REMEDY = "capture here and save_table again"


@dataclass(frozen=True)
class Costs:
    """The cost of each graph's replay and of eager runs.

    Costs are milliseconds if they were measured, else input rows.
    """

    replays: Mapping[Budget, float]
    """The cost of one replay of each budget. If it was measured, the replay had only padding as
    input, and the copies of inputs and outputs are included."""
    eager_runs: Sequence[tuple[float, float]]
    """The input rows and the cost of some eager runs, by ascending rows; the cost of other numbers
    of rows is interpolated."""
    measured: bool = True
    """Whether the costs are measured milliseconds, and not input rows."""

    @classmethod
    def unmeasured(cls, budgets: Iterable[Budget]) -> Costs:
        """Return costs with which every item that fits a graph is replayed, with little padding."""
        replays = {budget: budget.rows + RUN_ROWS for budget in budgets}
        return cls(replays, [(0, NEVER), (1, 2 * NEVER)], measured=False)

    def eager(self, rows: int) -> float:
        """Return the cost of an eager run of so many input rows, interpolated between timed runs.

        Beyond the largest timed run, it is extrapolated.
        """
        return interpolated(self.eager_runs, rows)


def interpolated(points: Sequence[tuple[float, float]], rows: float) -> float:
    """Return the cost of so many rows on a line from point to point (rows, cost), by rows.

    It is extrapolated beyond the points; a single one has the cost of all.
    """
    if len(points) == 1:
        return points[0][1]
    upper = min(max(bisect_left(points, (rows, 0.0)), 1), len(points) - 1)
    (rows_below, cost_below), (rows_above, cost_above) = points[upper - 1 :][:2]
    gradient = (cost_above - cost_below) / (rows_above - rows_below)
    return cost_below + (rows - rows_below) * gradient


@dataclass(frozen=True)
class CostTable:
    """The measured times and kernel choices of one input path ("image"), read from a file."""

    file: str
    made_on: Mapping[str, str]
    """The :func:`~graphwrap.measuring.fingerprint` of what was measured: encoder, device."""
    costs: Costs
    kernels: dict[str, object] | None
    """The kernel choices of the encoder's accelerator, None if it had no accelerator."""
    kept: bool = False
    """Whether the user did not name the file: a table that does not suit is then measured anew."""

    def covers(self, budget_set: BudgetSet) -> bool:
        """Return whether the table has the time of every budget."""
        return self.costs.replays.keys() >= set(budget_set.budgets)

    def apply(self, made_on: Mapping[str, str], accelerator: Accelerator | None) -> None:
        """Check what the table was measured on, and load its kernel choices into ``accelerator``.

        Args:
            made_on: fingerprint of the encoder and device of this process.
            accelerator: the accelerator of the encoder to capture, None if it has none.

        Raises:
            ValueError: the table was measured on another encoder or device, or names a kernel that
                cannot run here.
        """
        for key, value in made_on.items():
            if self.made_on.get(key) != value:
                raise ValueError(
                    f"{self.file} was measured with {key}={self.made_on.get(key)!r}, this is "
                    f"{value!r}: {REMEDY}, or load_table(None) to measure"
                )
        if accelerator is not None and self.kernels is not None:
            try:
                accelerator.load_choices(self.kernels)
            except ValueError as error:
                raise ValueError(f"kernels of {self.file}: {error}") from error

    def restrict(self, budget_set: BudgetSet) -> BudgetSet:
        """Return ``budget_set`` without inferred budgets larger than the largest in the table.

        The table may lack larger ones, because memory had run out when it was measured. A
        ValueError is raised if it lacks any other budget.
        """
        times = self.costs.replays
        most_rows = max(budget.rows for budget in times)
        inferred = budget_set.inferred
        budgets = tuple(b for b in budget_set.budgets if b.rows <= most_rows or not inferred)
        missing = [budget.name for budget in budgets or budget_set.budgets if budget not in times]
        if missing:
            raise ValueError(
                f"{self.file} has no times for budgets {missing}: use the budgets it was measured "
                f"for, or {REMEDY}"
            )
        return replace(budget_set, budgets=budgets)


class TableRecord(TypedDict):
    """The JSON of the measured times of one input path of an encoder, such as "image"."""

    fingerprint: Mapping[str, str]
    eager_runs: list[dict[str, float]]
    """The "rows" and the milliseconds ("ms") of each eager run."""
    budgets: list[dict[str, float]]
    """The capacities of each budget by name, and the milliseconds ("ms") of its replay."""
    kernels: dict[str, object] | None


def write_tables(file: str | os.PathLike[str], tables: Mapping[str, CostTable]) -> None:
    """Write the ``tables`` of costs, by name of input path ("image", "tiles"), to one JSON file."""
    body: dict[str, TableRecord] = {}
    for path_name, table in tables.items():
        costs = table.costs
        body[path_name] = {
            "fingerprint": table.made_on,
            "eager_runs": [{"rows": rows, "ms": ms} for rows, ms in costs.eager_runs],
            "budgets": [{**budget._asdict(), "ms": ms} for budget, ms in costs.replays.items()],
            "kernels": table.kernels,
        }
    Path(file).write_text(json.dumps(body, indent=1) + "\n")


def read_tables(file: str | os.PathLike[str], path_names: Collection[str]) -> dict[str, CostTable]:
    """Read the table of costs of each input path from a file that :func:`write_tables` wrote.

    A ValueError is raised for any other file, or if its paths are not exactly ``path_names``.
    """
    try:
        body = json.loads(Path(file).read_text())
        if body.keys() != set(path_names):
            raise ValueError(
                f"it has the paths {list(body)}, and this encoder has {list(path_names)}"
            )
        return {path_name: _parse(os.fspath(file), body[path_name]) for path_name in path_names}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not a table that save_table wrote ({type(error).__name__}: {error}): "
            f"{REMEDY}"
        ) from error


def _parse(file: str, body: TableRecord) -> CostTable:
    """Read the table of one input path from ``body``, its part of the JSON in ``file``.

    A missing entry raises a KeyError, a number out of range a ValueError that names it.
    """
    times = {
        Budget(*[_count(row, name) for name in Budget._fields]): _number(row, "ms")
        for row in body["budgets"]
    }
    points = [(_count(run, "rows"), _number(run, "ms")) for run in body["eager_runs"]]
    if not times or not points or any(a >= b for (a, _), (b, _) in pairwise(points)):
        raise ValueError("it has no budgets, or no eager_runs by ascending rows")
    kernels = body["kernels"]
    kernel_choices = None if kernels is None else {**kernels}
    return CostTable(file, {**body["fingerprint"]}, Costs(times, points), kernel_choices)


def _count(row: Mapping[str, float], name: str) -> int:
    return int(_number(row, name, kinds=(int,)))


def _number(row: Mapping[str, float], name: str, kinds: tuple[type, ...] = (int, float)) -> float:
    value = row[name]
    if type(value) not in kinds or not 0 <= value < MOST_MS:
        raise ValueError(f"{name} is {value!r}, not a number from 0 to {MOST_MS}")
    return value
