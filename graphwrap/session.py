"""Capturing a ladder: arena, pool, one runner a budget, largest first, and the measured costs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from encoders.contract import GraphableEncoder, Grid

from .budgets import LONG_SEGMENTS, Budget, Ladder, Load
from .buffers import Arena, Layout
from .capture import (
    Forward,
    Runner,
    capacity_metadata,
    capture,
    make_runner,
    pool_bytes,
    time_replays,
)
from .costs import CostTable, fit_attention
from .stats import BudgetStats

MEMORY_SHARE = 3
"""Arena and pool of an inferred ladder take at most one part in this many of free memory."""


@dataclass
class Session:
    """Everything that capture makes and release drops."""

    runners: dict[Budget, Runner]
    arena: Arena
    stats: list[BudgetStats]
    dropped: list[str]
    seconds: float
    pool: tuple[int, int] | None = None
    stream: torch.cuda.Stream | None = None
    costs: CostTable | None = None
    pool_bytes: int = 0
    places: dict[Budget, int] = field(default_factory=dict)
    """Where each budget stands in ``stats``."""


@dataclass
class Capturer:
    """How to capture: the encoder, where, which outputs, and how to show it."""

    encoder: GraphableEncoder
    forward: Forward
    device: torch.device
    dtype: torch.dtype
    wanted: tuple[str, ...]
    graphs: bool
    progress: bool
    dropped: list[str] = field(default_factory=list)

    def run(self, ladder: Ladder, measure: bool) -> Session:
        """Capture every budget, largest first; those that fail are dropped with a warning each."""
        began = time.perf_counter()
        if self.graphs and ladder.inferred:
            ladder = self._fit_memory(ladder)
        layouts = {budget: self._layout(budget) for budget in ladder.budgets}
        arena = self._arena(layouts)
        pool = torch.cuda.graph_pool_handle() if self.graphs else None
        stream = torch.cuda.Stream(self.device) if self.graphs else None
        session = Session({}, arena, [], self.dropped, 0.0, pool, stream)
        with self._bar(len(layouts)) as bar:
            for budget in sorted(layouts, key=lambda budget: (-budget.rows, -budget.segments)):
                self._capture_one(session, budget, layouts[budget])
                bar.set_postfix_str(f"{budget.tokens} tokens, {session.pool_bytes / 2**20:.0f} MiB")
                bar.update()
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)
            if measure and session.runners:
                session.costs = self._measure(session)
        session.stats.reverse()
        session.places = {budget: at for at, budget in enumerate(reversed(session.runners))}
        session.seconds = time.perf_counter() - began
        return session

    def _layout(self, budget: Budget) -> Layout:
        return Layout.of(capacity_metadata(self.encoder, budget, []))

    def _arena(self, layouts: dict[Budget, Layout]) -> Arena:
        """The arena of the largest budget; where that does not fit, of the next smaller."""
        while True:
            rows = max((budget.rows for budget in layouts), default=0)
            block = max((layout.nbytes for layout in layouts.values()), default=0)
            try:
                return Arena(rows, self.encoder.row_shape, self.dtype, self.device, block)
            except RuntimeError as error:
                if not layouts:
                    raise
                largest = max(layouts)
                del layouts[largest]
                self._drop(largest, error)

    def _capture_one(self, session: Session, budget: Budget, layout: Layout) -> None:
        began = time.perf_counter()
        runner = make_runner(self.forward, budget, layout, session.arena, self.wanted)
        empty = torch.zeros(layout.nbytes, dtype=torch.uint8)
        try:
            layout.write(empty, capacity_metadata(self.encoder, budget, []), rows=0)
            runner.block.copy_(empty)
            if session.pool is not None and session.stream is not None:
                session.stream.wait_stream(torch.cuda.current_stream(self.device))
                runner.graph = capture(runner, session.pool, session.stream)
            else:
                runner.body()
        except RuntimeError as error:  # out of memory, or the allocator's assertion on a MIG slice
            runner.graph = None
            self._drop(budget, error)
            return
        added = 0
        if session.pool is not None:
            held = pool_bytes(session.pool)
            added, session.pool_bytes = held - session.pool_bytes, held
        session.runners[budget] = runner
        session.stats.append(
            BudgetStats(
                budget.tokens,
                budget.segments,
                budget.longest_segment,
                budget.windows,
                capture_seconds=time.perf_counter() - began,
                graph_bytes=added,
            )
        )

    def _drop(self, budget: Budget, error: RuntimeError) -> None:
        self.dropped.append(budget.name)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"budget {budget.name} could not be captured and is dropped ({reason}); smaller ones "
            "still serve, larger items run eagerly",
            stacklevel=2,
        )

    def _measure(self, session: Session) -> CostTable:
        """Time every budget empty and filled, and eager on a small and on a middling load."""
        assert session.stream is not None
        session.arena.pixels.normal_()  # zeros would run faster than real pixels
        session.stream.wait_stream(torch.cuda.current_stream(self.device))
        empty: dict[Budget, float] = {}
        filled: dict[Budget, tuple[list[Grid], Load, float]] = {}
        by_rows: dict[int, float] = {}  # the two shapes of a token count cost the same empty
        for budget, runner in session.runners.items():
            if budget.rows not in by_rows:
                by_rows[budget.rows] = self._time_grids(session, runner, [])
            empty[budget] = by_rows[budget.rows]
            grids = filling(self.encoder, budget)
            load = Load.of(self.encoder.item_specs(grids))
            filled[budget] = (grids, load, self._time_grids(session, runner, grids))
        for entry, budget in zip(session.stats, session.runners, strict=True):
            entry.replay_ms = filled[budget][2]
        points = [(load, ms - empty[budget]) for budget, (_, load, ms) in filled.items()]
        row_ms, area_ms = fit_attention(points)
        smallest = min(session.runners)
        floor = self._eager_wall(session.arena, [self.encoder.grid_for(smallest.tokens)])
        host = self._replay_host(session, smallest, filled[smallest][2])
        table = CostTable(empty, row_ms, area_ms, host, floor, eager_gap_ms=0.0)
        bound = [budget for budget, ms in empty.items() if ms > 2.5 * floor]
        if not bound:
            return table
        grids, load, _ = filled[min(bound)]  # the smallest that surely binds the device
        gap = self._eager_wall(session.arena, grids) - table.eager(load)
        return replace(table, eager_gap_ms=max(gap, 0.0))

    def _time_grids(self, session: Session, runner: Runner, grids: list[Grid]) -> float:
        assert session.stream is not None
        rows = sum(spec.input_size for spec in self.encoder.item_specs(grids))
        block = torch.zeros(runner.layout.nbytes, dtype=torch.uint8)
        runner.layout.write(block, capacity_metadata(self.encoder, runner.budget, grids), rows)
        with torch.cuda.stream(session.stream):
            runner.block.copy_(block)
        return time_replays(runner, session.stream)

    def _eager_wall(self, arena: Arena, grids: list[Grid]) -> float:
        """Wall milliseconds of an eager run as a user calls it, metadata made on the way."""
        rows = sum(spec.input_size for spec in self.encoder.item_specs(grids))
        return self._wall(lambda: self.encoder(arena.pixels[:rows], grids))

    def _replay_host(self, session: Session, budget: Budget, device_ms: float) -> float:
        """Wall milliseconds of a call around its graph: copies in, launch, results out."""
        runner = session.runners[budget]
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

    def _fit_memory(self, ladder: Ladder) -> Ladder:
        """Lower the largest inferred budget until arena and pool fit their share of free memory."""
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        share = (free + cached) // MEMORY_SHARE
        middle = ladder.budgets[len(ladder.budgets) // 4]
        each = self._bytes_a_row(middle)
        kept = tuple(budget for budget in ladder.budgets if budget.rows * each <= share)
        if len(kept) == len(ladder.budgets) or not kept:
            return ladder
        warnings.warn(
            f"largest budget lowered from {ladder.budgets[-1].tokens} to {kept[-1].tokens} tokens: "
            f"arena and graph pool are to fit a third of free memory ({share / 2**20:.0f} MiB); "
            "give max_budget to choose yourself",
            stacklevel=4,
        )
        return replace(ladder, budgets=kept)

    def _bytes_a_row(self, budget: Budget) -> float:
        """Peak bytes of an eager run over its rows: activations grow in proportion."""
        arena = self._arena({budget: self._layout(budget)})
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        make_runner(self.forward, budget, self._layout(budget), arena, self.wanted).body()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        return (peak + arena.nbytes) / budget.rows

    @contextmanager
    def _bar(self, count: int) -> Iterator[Any]:
        with tqdm(total=count, desc="capture", unit="budget", disable=not self.progress) as bar:
            yield bar


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
