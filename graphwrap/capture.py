"""Capturing all budgets: one arena and pool, one runner per budget, largest first, and prices."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from .budgets import Budget, BudgetSet
from .buffers import Arena, Layout, Pool
from .prices import Meter, Prices, Table
from .runner import Forward, Runner, Target, capacity_metadata
from .stats import BudgetStats, GraphStats

MEMORY_SHARE = 3
"""Arena and pool of inferred budgets take at most one part in this many of free memory."""
MEMORY_WORDS = ("out of memory", "Allocator", "alloc_cpu", "ALLOC_FAILED", "NVML")
"""Words of a RuntimeError without a class of its own that says that memory ran out."""


@dataclass
class Graphs:
    """Everything that capture makes and release drops."""

    arena: Arena
    pool: Pool | None = None
    stream: torch.cuda.Stream | None = None
    runners: dict[Budget, Runner] = field(default_factory=dict)
    stats: dict[Budget, BudgetStats] = field(default_factory=dict)
    prices: Prices | None = None
    """Measured prices, None where nothing was measured."""
    pool_bytes: int = 0
    dropped: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def fresh_stats(self, backend: str) -> GraphStats:
        """Return what capture measured, with counters at zero."""
        return GraphStats(
            backend,
            [stats.fresh() for _, stats in sorted(self.stats.items())],
            arena_bytes=self.arena.nbytes,
            pool_bytes=self.pool_bytes,
            capture_seconds=self.seconds,
            dropped=list(self.dropped),
        )


@dataclass
class Capturer:
    """Captures the budgets of one target."""

    target: Target
    forward: Forward
    """What is captured: the target's encoder, perhaps compiled."""
    table: Table | None = None
    """Prices and kernels of another process, instead of measured ones."""
    bounded: bool = False
    """Whether the largest budgets are left out to fit their share of memory."""
    progress: bool = False
    _failed: dict[Budget, Exception] = field(default_factory=dict)

    def run(self, wanted: BudgetSet) -> Graphs:
        """Capture every budget, largest first; those that fail are dropped with a warning each.

        Raises:
            RuntimeError: every budget failed, and not for want of memory: the encoder's own error.
        """
        began = time.perf_counter()
        if self.target.has_graphs and self.table is not None:
            wanted = self.table.restrict(wanted)
        if self.target.has_graphs and self.bounded:
            wanted = self._fit_memory(wanted)
        layouts = self._layouts(wanted)
        graphs = Graphs(self._largest_arena(layouts))
        if self.target.has_graphs:
            graphs.pool = Pool(self.target.device)
            graphs.stream = torch.cuda.Stream(self.target.device)
        with self._bar(len(layouts)) as bar:
            for budget in sorted(layouts, key=lambda budget: (-budget.rows, -budget.segments)):
                self._capture_one(graphs, budget, layouts[budget])
                bar.set_postfix_str(f"{budget.tokens} tokens, {graphs.pool_bytes / 2**20:.0f} MiB")
                bar.update()
        self._report(graphs)
        if graphs.stream is not None and graphs.runners:
            torch.cuda.current_stream(self.target.device).wait_stream(graphs.stream)
            self._price(graphs)
            torch.cuda.empty_cache()  # of warm-ups and timings: arena and pool are held
        graphs.seconds = time.perf_counter() - began
        return graphs

    def _price(self, graphs: Graphs) -> None:
        """Take prices from the table, or measure them."""
        if self.table is not None:
            times = self.table.prices.replay_ms
            kept = {budget: times[budget] for budget in graphs.runners}
            graphs.prices = replace(self.table.prices, replay_ms=kept)
            full_ms = self.table.full_ms
        else:
            meter = Meter(self.target.encoder, graphs.runners, self.target.device)
            try:
                graphs.prices, full_ms = meter.measure()
            except RuntimeError as error:
                if not is_memory_error(error):
                    raise
                traceback.clear_frames(error.__traceback__)
                warnings.warn(
                    "eager runs could not be timed, there is no memory for one beside the graphs: "
                    "all that fits a budget is replayed; give fewer tokens (max_budget, budgets) "
                    "to have them timed",
                    stacklevel=7,
                )
                return
        for budget, stats in graphs.stats.items():
            stats.replay_ms = full_ms[budget]

    def _layout(self, budget: Budget) -> Layout:
        return Layout.of(capacity_metadata(self.target.encoder, budget, []), budget.rows)

    def _layouts(self, wanted: BudgetSet) -> dict[Budget, Layout]:
        """Return the metadata layout of every budget whose metadata the host can hold."""
        layouts = {}
        for budget in wanted.budgets:
            try:
                layouts[budget] = self._layout(budget)
            except (RuntimeError, MemoryError) as error:
                self._drop(budget, error)
        return layouts

    def _largest_arena(self, layouts: dict[Budget, Layout]) -> Arena:
        """Return the arena of the largest budget that memory has room for; drop larger ones."""
        while True:
            try:
                return self._arena(layouts)
            except RuntimeError as error:
                if not layouts:
                    raise
                largest = max(layouts)
                del layouts[largest]
                self._drop(largest, error)

    def _arena(self, layouts: dict[Budget, Layout]) -> Arena:
        rows = max((budget.rows for budget in layouts), default=0)
        block = max((layout.nbytes for layout in layouts.values()), default=0)
        target = self.target
        return Arena(rows, target.encoder.row_shape, target.dtype, target.device, block)

    def _runner(self, budget: Budget, layout: Layout, arena: Arena) -> Runner:
        return Runner.of(self.forward, budget, layout, arena, self.target.outputs)

    def _capture_one(self, graphs: Graphs, budget: Budget, layout: Layout) -> None:
        began = time.perf_counter()
        runner = self._runner(budget, layout, graphs.arena)
        empty = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
        try:
            layout.write(empty, capacity_metadata(self.target.encoder, budget, []), rows=0)
            if graphs.stream is not None:  # the last warm-up may still be reading its metadata
                torch.cuda.current_stream(self.target.device).wait_stream(graphs.stream)
            runner.block.copy_(empty)
            if graphs.pool is not None and graphs.stream is not None:
                graphs.stream.wait_stream(torch.cuda.current_stream(self.target.device))
                runner.capture(graphs.pool, graphs.stream)
            else:
                runner.body()
        except (RuntimeError, MemoryError) as error:  # or the allocator's assertion on a MIG slice
            self._drop(budget, error)
            if graphs.pool is not None and not graphs.runners:  # none is using it
                graphs.pool.renew()
            return
        before = graphs.pool_bytes
        graphs.pool_bytes = graphs.pool.nbytes if graphs.pool is not None else 0
        graphs.runners[budget] = runner
        accelerator = self.target.accelerator
        graphs.stats[budget] = BudgetStats(
            budget.tokens,
            budget.segments,
            budget.longest_segment,
            budget.windows,
            capture_seconds=time.perf_counter() - began,
            graph_bytes=graphs.pool_bytes - before,
            kernel=accelerator.taken if accelerator is not None else "reference",
        )

    def _drop(self, budget: Budget, error: Exception) -> None:
        """Note a budget that failed, and free what the frames of its error hold."""
        traceback.clear_frames(error.__traceback__)
        self._failed[budget] = error.with_traceback(None) if is_memory_error(error) else error
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
            torch.cuda.empty_cache()

    def _report(self, graphs: Graphs) -> None:
        """Warn of every budget that failed; where all did, and not by memory, raise the error."""
        bugs = [error for error in self._failed.values() if not is_memory_error(error)]
        if bugs and not graphs.runners:
            raise bugs[-1]
        for budget, error in self._failed.items():
            graphs.dropped.append(budget.name)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(
                f"budget {budget.name} could not be captured and is dropped ({reason}); smaller "
                "ones still serve, larger items run eagerly",
                stacklevel=6,
            )
        self._failed.clear()

    def _fit_memory(self, wanted: BudgetSet) -> BudgetSet:
        """Leave out the largest budgets until arena and pool fit their share of free memory."""
        share = self._available() // MEMORY_SHARE
        row_bytes = self._bytes_per_row(wanted.budgets)
        kept = tuple(budget for budget in wanted.budgets if budget.rows * row_bytes <= share)
        if len(kept) == len(wanted.budgets):
            return wanted
        if kept:
            what = f"largest budget lowered from {wanted.budgets[-1].tokens} to {kept[-1].tokens}"
        else:
            kept = tuple(b for b in wanted.budgets if b.rows == wanted.budgets[0].rows)
            what = f"no budget fits, only the smallest is captured: {kept[0].tokens}"
        warnings.warn(
            f"{what} tokens: arena and graph pool are to fit a third of free memory "
            f"({share / 2**20:.0f} MiB); give max_budget to choose yourself",
            stacklevel=6,
        )
        return replace(wanted, budgets=kept)

    def _available(self) -> int:
        """Return the bytes that tensors could take: free or cached by torch, within its limit."""
        device = self.target.device
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - held
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return max(min(free + cached, limit - held), 0)

    def _bytes_per_row(self, budgets: tuple[Budget, ...]) -> float:
        """Return the peak bytes of an eager run per row: activations grow in proportion.

        Infinite where not even the smallest budget's run fits.
        """
        place = len(budgets) // 4
        while True:
            try:
                return self._probe(budgets[place])
            except RuntimeError as error:
                if not is_memory_error(error):
                    raise
                traceback.clear_frames(error.__traceback__)
            if place == 0:
                return math.inf
            place //= 2

    def _probe(self, budget: Budget) -> float:
        """Return the peak bytes of one budget's eager run and arena, per row."""
        layout, device = self._layout(budget), self.target.device
        arena = self._arena({budget: layout})
        runner = self._runner(budget, layout, arena)
        if self.target.accelerator is not None:  # its first run derives weights and times kernels
            runner.body()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        runner.body()
        return (torch.cuda.max_memory_allocated(device) - before + arena.nbytes) / budget.rows

    @contextmanager
    def _bar(self, count: int) -> Iterator[Any]:
        what = "compile and capture" if self.target.settings.compile else "capture"
        with tqdm(total=count, desc=what, unit="budget", disable=not self.progress) as bar:
            yield bar


def is_memory_error(error: Exception) -> bool:
    """Return whether an error says that memory ran out."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(word in str(error) for word in MEMORY_WORDS)
