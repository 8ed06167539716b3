"""Timing what was captured: every budget empty and filled, and eager beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from encoders.contract import GraphableEncoder
from encoders.contract import Grid

from .budgets import LONG_SEGMENTS, Budget, Load
from .capture import Runner, capacity_metadata, time_replays
from .costs import CostTable, fit_attention


@dataclass(frozen=True)
class Meter:
    """Times runners on the stream that they were captured on."""

    encoder: GraphableEncoder
    runners: Mapping[Budget, Runner]
    stream: torch.cuda.Stream
    device: torch.device

    def measure(self) -> tuple[CostTable, dict[Budget, float]]:
        """The table of prices, and milliseconds of a full replay of each budget.

        Every budget is timed empty and filled, eager on a small and on a middling load.
        """
        largest = max(self.runners, key=lambda budget: budget.rows)
        dice = torch.Generator(self.device).manual_seed(0)  # the caller's draws go on as they would
        pixels = self.runners[largest].pixels
        pixels.normal_(generator=dice)  # zeros would run faster than real pixels
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        by_rows = self._empty()  # the two shapes of a token count cost the same empty
        empty = {budget: by_rows[budget.rows] for budget in self.runners}
        filled: dict[Budget, tuple[list[Grid], Load, float]] = {}
        for budget, runner in self.runners.items():
            grids = filling(self.encoder, budget)
            load = Load.of(self.encoder.item_specs(grids))
            filled[budget] = (grids, load, self._time(runner, grids))
        points = [(load, ms - empty[budget]) for budget, (_, load, ms) in filled.items()]
        row_ms, area_ms = fit_attention(points)
        smallest = min(self.runners)
        floor = self._eager_wall(pixels, [self.encoder.grid_for(smallest.tokens)])
        host = self._replay_host(smallest, filled[smallest][2])
        table = CostTable(empty, row_ms, area_ms, host, floor, eager_gap_ms=0.0)
        replay_ms = {budget: ms for budget, (_, _, ms) in filled.items()}
        bound = [budget for budget, ms in empty.items() if ms > 2.5 * floor]
        if bound:
            grids, load, _ = filled[min(bound)]  # the smallest that surely binds the device
            gap = self._eager_wall(pixels, grids) - table.eager(load)
            table = replace(table, eager_gap_ms=max(gap, 0.0))
        return table, replay_ms

    def _empty(self) -> dict[int, float]:
        """Milliseconds of a replay without segments, by rows."""
        by_rows = {budget.rows: runner for budget, runner in self.runners.items()}
        times = {rows: self._time(runner, []) for rows, runner in by_rows.items()}
        return levelled(times, lambda rows: self._time(by_rows[rows], []))

    def _time(self, runner: Runner, grids: list[Grid]) -> float:
        rows = sum(spec.input_size for spec in self.encoder.item_specs(grids))
        block = torch.zeros(runner.layout.nbytes, dtype=torch.uint8, device="cpu")
        runner.layout.write(block, capacity_metadata(self.encoder, runner.budget, grids), rows)
        with torch.cuda.stream(self.stream):
            runner.block.copy_(block)
        return time_replays(runner, self.stream)

    def _eager_wall(self, pixels: torch.Tensor, grids: list[Grid]) -> float:
        """Wall milliseconds of an eager run as a user calls it, metadata made on the way."""
        rows = sum(spec.input_size for spec in self.encoder.item_specs(grids))
        return self._wall(lambda: self.encoder(pixels[:rows], grids))

    def _replay_host(self, budget: Budget, device_ms: float) -> float:
        """Wall milliseconds of a call around its graph: copies in, launch, results out."""
        runner = self.runners[budget]
        pixels = torch.empty_like(runner.pixels)

        def call() -> None:
            runner.pixels.copy_(pixels)
            runner.run()
            for buffer in runner.outputs.values():
                buffer.clone()

        return max(self._wall(call) - device_ms, 0.0)

    def _wall(self, call: Callable[[], object]) -> float:
        """The median of seven."""
        times = []
        for _ in range(8):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            call()
            torch.cuda.synchronize(self.device)
            times.append((time.perf_counter() - began) * 1e3)
        return sorted(times[1:])[3]


def levelled(times: Mapping[int, float], again: Callable[[int], float]) -> dict[int, float]:
    """Times by rows, with those taken ``again`` that are above the next larger one's.

    A slow graph is timed once, and one sample may be a tenth too high. Of both of a pair that
    stands the wrong way round, the lesser of two times is kept; from the top down, so that what is
    lowered is compared with its smaller neighbour after that.
    """
    kept = dict(times)
    for smaller, larger in reversed(list(pairwise(sorted(kept)))):
        if kept[smaller] > kept[larger]:
            for rows in (larger, smaller):
                kept[rows] = min(kept[rows], again(rows))
    return kept


def filling(encoder: GraphableEncoder, budget: Budget) -> list[Grid]:
    """Equal items that fill a budget, in eight segments or more: a typical load to time."""
    whole = encoder.grid_for(budget.tokens)
    spec = encoder.item_specs([whole])[0]
    if spec.segments > 1 or budget.tokens < LONG_SEGMENTS:
        return [whole]
    tokens = budget.tokens // min(LONG_SEGMENTS, budget.segments)
    while tokens:
        part = encoder.grid_for(tokens)
        spec = encoder.item_specs([part])[0]
        count = min(budget.segments, budget.tokens // spec.output_tokens)
        if count and budget.refuses(Load.of([spec] * count)) is None:
            return [part] * count
        tokens -= 1
    return []
