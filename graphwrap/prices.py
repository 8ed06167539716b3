"""What a replay and an eager run cost: measured once at capture, frozen, saved and loaded.

There is one time per budget, and the price of an eager run is interpolated between five sizes.
Attention takes as long in a replay as in an eager run of the same items, so it decides nothing: a
replay is timed with padding alone, and eager runs have as much taken off.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from encoders.contract import Accelerator, GraphableEncoder, Grid

from .budgets import LONG_SEGMENTS, Batch, Budget, BudgetSet, read_specs
from .runner import Runner, Target, capacity_metadata

RUN_ROWS = 64
"""What one more replay costs, in rows, where nothing is measured: fewer replays win ties."""
NEVER = 1e12
"""What a row costs eagerly where nothing is measured: more than any budget per row of an item."""
SHARES = (8, 4, 2, 1)
"""Eager runs are timed at these fractions of the largest budget, and with the fewest rows."""
ENOUGH_MS = 60.0
"""A call is timed two to seven times, and no more once its times come to so many milliseconds."""
SETTLING = 2
"""So many calls are not counted where an eager run is compared with a replay: after a pause a GPU
is up to 7 % faster for 100 ms."""
CLOSE = 0.98
"""The share of its time that an eager run counts: times are known to 2 %, and where a replay may be
as slow as that, the eager run is taken."""
MOST_MS = 1e12
"""More than thirty years: larger numbers in a file were not measured."""
REMEDY = "capture here and save_table again"


@dataclass(frozen=True)
class Prices:
    """Milliseconds (rows, where nothing is measured) of every budget and of eager runs."""

    replay_ms: Mapping[Budget, float]
    """A replay that holds padding alone, with the copies in and out."""
    eager_ms: Sequence[tuple[float, float]]
    """Rows and milliseconds of some eager runs, by rows; between them the price is interpolated."""
    measured: bool = True

    @classmethod
    def unmeasured(cls, budgets: Iterable[Budget]) -> Prices:
        """Return prices by which all that fits a budget is replayed, with few padded rows."""
        times = {budget: budget.rows + RUN_ROWS for budget in budgets}
        return cls(times, [(0, NEVER), (1, 2 * NEVER)], measured=False)

    def eager(self, rows: int) -> float:
        """Return the price of one eager run; beyond the sizes that were timed the price goes on."""
        last = len(self.eager_ms) - 1
        after = min(max(bisect_left(self.eager_ms, (rows, 0.0)), 1), last)
        (fewer, ms), (more, more_ms) = self.eager_ms[after - 1], self.eager_ms[after]
        return ms + (rows - fewer) * (more_ms - ms) / (more - fewer) if after else ms


# --- measuring ------------------------------------------------------------------------------------


def measure(
    encoder: GraphableEncoder, runners: Mapping[Budget, Runner], device: torch.device
) -> Prices:
    """Time every budget, and eager runs of five sizes, on a CUDA device.

    An eager run is compared with the replay of the same rows in the same moment, because the clocks
    of a GPU change by several per cent with what it did before.
    """
    large = max(runners, key=lambda budget: (budget.rows, budget.longest_segment))
    dice = torch.Generator(device).manual_seed(0)  # the caller's draws go on as they would
    pixels = torch.empty_like(runners[large].pixels)
    pixels.normal_(generator=dice)  # zeros would run faster
    by_rows = {budget.rows: runner for budget, runner in runners.items()}
    times = {rows: _replay_ms(encoder, one, [], pixels) for rows, one in by_rows.items()}
    few = [encoder.grid_for(min(encoder.budget_range[0], min(runners).tokens))]
    points = [(_rows(encoder, few), CLOSE * _eager_ms(encoder, few, pixels))]
    for share in SHARES:
        apart = {abs(one.rows - large.rows / share): one for one in sorted(runners)[::-1]}
        budget = apart[min(apart)]
        grids = full_grids(encoder, budget)
        if (rows := _rows(encoder, grids)) > points[-1][0]:
            full = _replay_ms(encoder, runners[budget], grids, pixels, SETTLING)
            ms = _eager_ms(encoder, grids, pixels, SETTLING)
            padding = _replay_ms(encoder, runners[budget], [], pixels, SETTLING)
            ms = times[budget.rows] * (ms - full + padding) / padding
            points.append((rows, max(CLOSE * ms, points[-1][1])))  # more rows cost no less
    return Prices({one: times[one.rows] for one in runners}, points)


def full_grids(encoder: GraphableEncoder, budget: Budget) -> list[Grid]:
    """Return equal items that fill a budget, in up to eight segments: a typical batch to time."""
    whole = encoder.grid_for(budget.tokens)
    spec = read_specs(encoder, [whole])[0]
    if spec.segments > 1 or budget.tokens < LONG_SEGMENTS:
        return [whole] if budget.fits(Batch.of([spec])) else []
    for tokens in range(budget.tokens // min(LONG_SEGMENTS, budget.segments), 0, -1):
        part = encoder.grid_for(tokens)
        spec = read_specs(encoder, [part])[0]
        count = min(budget.segments, budget.tokens // spec.output_tokens)
        if count and budget.fits(Batch.of([spec] * count)):
            return [part] * count
    return []


def _rows(encoder: GraphableEncoder, grids: Sequence[Grid]) -> int:
    return Batch.of(read_specs(encoder, grids)).rows


def _replay_ms(
    encoder: GraphableEncoder,
    runner: Runner,
    grids: Sequence[Grid],
    pixels: Tensor,
    skipped: int = 0,
) -> float:
    """Return the milliseconds of a call of a budget, its copies in and out included."""
    metadata = capacity_metadata(encoder, runner.budget, grids)
    runner.block.copy_(runner.layout.pack(metadata, _rows(encoder, grids)))

    def call() -> None:
        runner.pixels.copy_(pixels[: runner.budget.rows])
        runner.run()
        for output in runner.outputs.values():
            output.clone()

    return _milliseconds(call, pixels.device, skipped)


def _eager_ms(
    encoder: GraphableEncoder, grids: Sequence[Grid], pixels: Tensor, skipped: int = 0
) -> float:
    """Return the milliseconds of an eager run, its metadata included."""
    rows = pixels[: _rows(encoder, grids)]
    encoder(rows, list(grids))  # the first run may choose kernels
    return _milliseconds(lambda: encoder(rows, list(grids)), pixels.device, skipped)


def _milliseconds(call: Callable[[], object], device: torch.device, skipped: int = 0) -> float:
    """Return the least wall time of a few calls: what disturbs one only makes it longer."""
    times: list[float] = []
    most = skipped + 7
    while len(times) < skipped + 2 or (len(times) < most and sum(times[skipped:]) < ENOUGH_MS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) * 1e3)
    return min(times[skipped:])


# --- saving and loading ---------------------------------------------------------------------------


def fingerprint(encoder: nn.Module, target: Target) -> dict[str, str]:
    """Return all that times of a target depend on and that may differ between two processes."""
    weights = [*encoder.named_parameters(), *encoder.named_buffers()]
    shapes = "\n".join(f"{name} {tuple(weight.shape)}" for name, weight in weights)
    device = target.device
    return {
        "encoder": type(encoder).__name__,
        "weights": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "rows": "x".join(map(str, target.encoder.row_shape)),
        "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "outputs": " ".join(sorted(target.outputs)),
        **{name: str(value) for name, value in target.settings._asdict().items()},
    }


@dataclass(frozen=True)
class Table:
    """Prices and kernel choices of one path of an encoder, as a file holds them."""

    file: str
    made_on: Mapping[str, str]
    """The fingerprint of what was measured."""
    prices: Prices
    kernels: dict[str, Any] | None
    """Choices of the accelerator, None where there was none."""

    def apply(self, made_on: Mapping[str, str], accelerator: Accelerator | None) -> None:
        """Have an accelerator take the kernels of a table that was measured on the same."""
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

    def restrict(self, wanted: BudgetSet) -> BudgetSet:
        """Return the budgets to capture: inferred ones end where the table does.

        (Memory, or a capture that failed, had lowered them where the table was measured.)
        """
        times = self.prices.replay_ms
        most = max(budget.rows for budget in times)
        budgets = tuple(b for b in wanted.budgets if b.rows <= most or not wanted.inferred)
        missing = [budget.name for budget in budgets or wanted.budgets if budget not in times]
        if missing:
            raise ValueError(
                f"{self.file} has no times for budgets {missing}: use the budgets it was measured "
                f"for, or {REMEDY}"
            )
        return replace(wanted, budgets=budgets)


def write_tables(file: str | os.PathLike[str], tables: Mapping[str, Table]) -> None:
    """Write the table of each path of an encoder as JSON."""
    body = {}
    for path, table in tables.items():
        prices = table.prices
        body[path] = {
            "fingerprint": table.made_on,
            "eager_runs": [{"rows": rows, "ms": ms} for rows, ms in prices.eager_ms],
            "budgets": [{**one._asdict(), "ms": ms} for one, ms in prices.replay_ms.items()],
            "kernels": table.kernels,
        }
    Path(file).write_text(json.dumps(body, indent=1) + "\n")


def read_tables(file: str | os.PathLike[str], paths: Collection[str]) -> dict[str, Table]:
    """Read the table of each path that :func:`write_tables` wrote."""
    try:
        body = json.loads(Path(file).read_text())
        if body.keys() != set(paths):
            raise ValueError(f"it has the paths {list(body)}, this encoder has {list(paths)}")
        return {path: _parse(os.fspath(file), body[path]) for path in paths}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is no table that save_table wrote ({type(error).__name__}: {error}): {REMEDY}"
        ) from error


def _parse(file: str, body: Any) -> Table:
    """Return the table in a part of a file; an error says what is missing or wrong."""
    times = {
        Budget(*[_number(row, name, kinds=(int,)) for name in Budget._fields]): _number(row, "ms")
        for row in body["budgets"]
    }
    points = [
        (_number(run, "rows", kinds=(int,)), _number(run, "ms")) for run in body["eager_runs"]
    ]
    if not times or not points or any(a >= b for (a, _), (b, _) in pairwise(points)):
        raise ValueError("it has no budgets, or no eager_runs by ascending rows")
    kernels = body["kernels"]
    own = None if kernels is None else {**kernels}
    return Table(file, {**body["fingerprint"]}, Prices(times, points), own)


def _number(row: Any, name: str, kinds: tuple[type, ...] = (int, float)) -> Any:
    value = row[name]
    if type(value) not in kinds or not 0 <= value < MOST_MS:
        raise ValueError(f"{name} is {value!r}, not a number from 0 to {MOST_MS}")
    return value
