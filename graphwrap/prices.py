"""What a replay and an eager run cost: measured once at capture, frozen, saved and loaded.

There is one time per budget and one line for eager runs. Attention takes as long in a replay as in
an eager run of the same items, so it decides nothing: a replay is timed with padding alone, and the
line for eager runs has as much taken off.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from encoders.contract import Accelerator, GraphableEncoder, Grid

from .budgets import LONG_SEGMENTS, Batch, Budget, BudgetSet, read_specs
from .runner import Runner, Target, capacity_metadata

RUN_ROWS = 64
"""What one more replay costs, in rows, where nothing is measured: fewer replays win ties."""
SLOW_MS = 8.0
"""A run of more milliseconds is timed twice, a faster one seven times."""
MOST_MS = 1e12
"""More than thirty years: larger numbers in a file were not measured."""
REMEDY = "capture here and save_table again"


@dataclass(frozen=True)
class Prices:
    """Milliseconds (rows, where nothing is measured) of every budget and of eager runs."""

    replay_ms: Mapping[Budget, float]
    """A replay that holds padding alone, with the copies in and out."""
    eager_ms: float
    """Intercept of the line for eager runs."""
    eager_row_ms: float
    """Slope of the line for eager runs, per row."""

    @classmethod
    def unmeasured(cls, budgets: Iterable[Budget]) -> Prices:
        """Return prices by which all that fits a budget is replayed, with few padded rows."""
        return cls({budget: budget.rows + RUN_ROWS for budget in budgets}, math.inf, 0.0)

    def eager(self, rows: int) -> float:
        """Return the price of one eager run."""
        return self.eager_ms + self.eager_row_ms * rows

    def cheapest(self, batch: Batch) -> Budget | None:
        """Return the cheapest budget that holds a batch, or None if no budget does."""
        budgets, tokens = self._by_price
        for place in range(bisect_left(tokens, batch.tokens), len(budgets)):
            if budgets[place].exceeded_by(batch) is None:
                return budgets[place]
        return None

    def least(self, replays: int, rows: int) -> float:
        """Return the least that so many replays or more can cost for so many rows together."""
        start, slope = self._lower_line
        return replays * start + slope * rows

    @cached_property
    def _by_price(self) -> tuple[list[Budget], list[int]]:
        """Budgets by ascending price, and the most tokens of any up to each: for bisection."""
        budgets = sorted(self.replay_ms, key=lambda budget: (self.replay_ms[budget], budget))
        most = [max(budget.tokens for budget in budgets[: k + 1]) for k in range(len(budgets))]
        return budgets, most

    @cached_property
    def _lower_line(self) -> tuple[float, float]:
        """Intercept and slope of a line that no budget's price lies below."""
        small, large = min(self.replay_ms), max(self.replay_ms)
        rise = self.replay_ms[large] - self.replay_ms[small]
        slope = max(rise / max(large.rows - small.rows, 1), 0.0)
        start = min(ms - slope * budget.rows for budget, ms in self.replay_ms.items())
        return start, slope


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meter:
    """Times runners on a CUDA device.

    Args:
        encoder: the form that was captured.
        runners: with their graphs.
        device: of the encoder.
    """

    encoder: GraphableEncoder
    runners: Mapping[Budget, Runner]
    device: torch.device

    def measure(self) -> tuple[Prices, dict[Budget, float]]:
        """Return the prices, and the milliseconds of a full replay of each budget.

        Raises:
            RuntimeError: an eager run failed, perhaps for want of memory.
        """
        large = max(self.runners, key=lambda budget: (budget.rows, budget.longest_segment))
        dice = torch.Generator(self.device).manual_seed(0)  # the caller's draws go on as they would
        pixels = torch.empty_like(self.runners[large].pixels)
        pixels.normal_(generator=dice)  # zeros would run faster
        by_rows = {budget.rows: budget for budget in self.runners}
        padding_ms = {rows: self._replay_ms(one, [], pixels) for rows, one in by_rows.items()}
        replay_ms = {budget: padding_ms[budget.rows] for budget in self.runners}
        full = {budget: full_grids(self.encoder, budget) for budget in self.runners}
        full_ms = {budget: self._replay_ms(budget, full[budget], pixels) for budget in full}
        few = [self.encoder.grid_for(min(self.encoder.budget_range[0], min(self.runners).tokens))]
        start = self._eager_ms(few, pixels)
        end = self._eager_ms(full[large], pixels) + replay_ms[large] - full_ms[large]
        rows = self._rows(few)
        slope = max(end - start, 0.0) / max(self._rows(full[large]) - rows, 1)
        return Prices(replay_ms, start - slope * rows, slope), full_ms

    def _rows(self, grids: Sequence[Grid]) -> int:
        return Batch.of(read_specs(self.encoder, grids)).rows

    def _replay_ms(self, budget: Budget, grids: Sequence[Grid], pixels: Tensor) -> float:
        """Return the milliseconds of a call of a budget, its copies in and out included."""
        runner = self.runners[budget]
        block = torch.zeros(runner.layout.nbytes, dtype=torch.uint8, device="cpu")
        metadata = capacity_metadata(self.encoder, budget, grids)
        runner.layout.write(block, metadata, self._rows(grids))
        runner.block.copy_(block)

        def call() -> None:
            runner.pixels.copy_(pixels[: budget.rows])
            runner.run()
            for field in runner.outputs.values():
                field.clone()

        return self._milliseconds(call)

    def _eager_ms(self, grids: Sequence[Grid], pixels: Tensor) -> float:
        """Return the milliseconds of an eager run, its metadata included."""
        rows = pixels[: self._rows(grids)]
        self.encoder(rows, list(grids))  # the first run may choose kernels
        return self._milliseconds(lambda: self.encoder(rows, list(grids)))

    def _milliseconds(self, call: Callable[[], object]) -> float:
        """Return the least wall time of a few calls: what disturbs one only makes it longer."""
        times: list[float] = []
        while len(times) < 2 or (len(times) < 7 and min(times) < SLOW_MS):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            call()
            torch.cuda.synchronize(self.device)
            times.append((time.perf_counter() - began) * 1e3)
        return min(times)


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


# --- saving and loading ---------------------------------------------------------------------------


def fingerprint(encoder: nn.Module, target: Target) -> dict[str, str]:
    """Return all that times depend on and that may differ between two processes.

    Args:
        encoder: the user's module.
        target: what is captured of it.
    """
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
    """Prices and kernel choices as a file holds them."""

    path: str
    made_on: Mapping[str, str]
    """The fingerprint of what was measured."""
    prices: Prices
    full_ms: Mapping[Budget, float]
    """Milliseconds of a full replay of each budget."""
    kernels: dict[str, Any] | None
    """Choices of the accelerator, None where there was none."""

    def write(self) -> None:
        """Write the table as JSON."""
        prices = self.prices
        budgets = [
            {**budget._asdict(), "ms": ms, "full_ms": self.full_ms[budget]}
            for budget, ms in sorted(prices.replay_ms.items())
        ]
        body = {
            "fingerprint": self.made_on,
            "eager_ms": prices.eager_ms,
            "eager_row_ms": prices.eager_row_ms,
            "budgets": budgets,
            "kernels": self.kernels,
        }
        Path(self.path).write_text(json.dumps(body, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Table:
        """Read a table that :meth:`write` wrote.

        Raises:
            ValueError: the file cannot be read or is not such a table.
        """
        try:
            body = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} cannot be read as a table ({error}): give a file that save_table wrote"
            ) from error
        try:
            return _parse(os.fspath(path), body)
        except ValueError as error:
            raise ValueError(
                f"{path} is no table that save_table wrote ({error}): {REMEDY}"
            ) from error

    def check(self, made_on: Mapping[str, str]) -> None:
        """Raise unless the table was measured on this.

        Raises:
            ValueError: the first difference.
        """
        for key, value in made_on.items():
            if self.made_on.get(key) != value:
                raise ValueError(
                    f"{self.path} was measured with {key}={self.made_on.get(key)!r}, this is "
                    f"{value!r}: {REMEDY}, or load_table(None) to measure"
                )

    def choose_kernels(self, accelerator: Accelerator | None) -> None:
        """Have an accelerator take the kernels that were chosen where the table was measured.

        Raises:
            ValueError: the table names a kernel that cannot run here.
        """
        if accelerator is None or self.kernels is None:
            return
        try:
            accelerator.load_choices(self.kernels)
        except ValueError as error:
            raise ValueError(f"kernels of {self.path}: {error}") from error

    def restrict(self, wanted: BudgetSet) -> BudgetSet:
        """Return the budgets to capture: inferred ones end where the table does.

        (Memory, or a capture that failed, had lowered them where the table was measured.)

        Raises:
            ValueError: a budget that the table has no time for.
        """
        times = self.prices.replay_ms
        most = max(budget.rows for budget in times)
        budgets = tuple(b for b in wanted.budgets if b.rows <= most or not wanted.inferred)
        missing = [budget.name for budget in budgets or wanted.budgets if budget not in times]
        if missing:
            raise ValueError(
                f"{self.path} has no times for budgets {missing}: use the budgets it was measured "
                f"for, or {REMEDY}"
            )
        return replace(wanted, budgets=budgets)


def _parse(path: str, body: Any) -> Table:
    """Return the table in what a file holds; a ValueError says what is wrong with it."""
    if type(body) is not dict:
        raise ValueError("it has no fingerprint")
    for name, kind in (("fingerprint", dict), ("budgets", list)):
        if type(body.get(name)) is not kind:
            raise ValueError(f"it has no {name}")
    if not body["budgets"]:
        raise ValueError("it has no budgets")
    kernels = body.get("kernels", "")
    if kernels is not None and type(kernels) is not dict:
        missing = "kernels" not in body
        raise ValueError("it has no kernels" if missing else f"kernels is {kernels!r}, not choices")
    times, full = dict[Budget, float](), dict[Budget, float]()
    for row in body["budgets"]:
        held = [row.get(name) for name in Budget._fields] if type(row) is dict else [None]
        if any(type(value) is not int or value < 0 for value in held):
            raise ValueError(f"{row!r} is no budget with {', '.join(Budget._fields)}")
        budget = Budget(*held)
        times[budget] = _number(f"ms of {budget.name}", row.get("ms"))
        full[budget] = _number(f"full_ms of {budget.name}", row.get("full_ms"))
    start = _number("eager_ms", body.get("eager_ms"), least=-MOST_MS)
    prices = Prices(times, start, _number("eager_row_ms", body.get("eager_row_ms")))
    return Table(path, body["fingerprint"], prices, full, kernels)


def _number(what: str, value: Any, least: float = 0.0) -> float:
    if type(value) not in (int, float) or not least <= value < MOST_MS:
        raise ValueError(f"{what} is {value!r}, not a number of milliseconds")
    return float(value)
