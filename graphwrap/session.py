"""Capturing a ladder: arena, pool, one runner a budget, largest first, and its prices."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from encoders.contract import Accelerator, GraphableEncoder

from .budgets import Budget, Ladder
from .buffers import Arena, Layout
from .capture import Runner, capacity_metadata, capture, make_runner
from .costs import CostTable
from .forward import Forward
from .measure import Meter
from .pool import Pool
from .stats import BudgetStats, GraphStats
from .tables import SavedTable

MEMORY_SHARE = 3
"""Arena and pool of an inferred ladder take at most one part in this many of free memory."""
MEMORY_WORDS = ("out of memory", "Allocator", "alloc_cpu", "ALLOC_FAILED", "NVML")
"""What a plain RuntimeError says when memory ran out: allocators' own assertions have no class."""


@dataclass
class Session:
    """Everything that capture makes and release drops."""

    runners: dict[Budget, Runner]
    arena: Arena
    stats: list[BudgetStats]
    dropped: list[str]
    seconds: float
    pool: Pool | None = None
    stream: torch.cuda.Stream | None = None
    costs: CostTable | None = None
    pool_bytes: int = 0
    places: dict[Budget, int] = field(default_factory=dict)
    """Where each budget stands in ``stats``."""

    def fresh_stats(self, backend: str) -> GraphStats:
        """What capture measured, and counters at zero."""
        return GraphStats(
            backend,
            [budget.fresh() for budget in self.stats],
            arena_bytes=self.arena.nbytes,
            pool_bytes=self.pool_bytes,
            capture_seconds=self.seconds,
            dropped=list(self.dropped),
        )

    def saved_table(
        self, path: str, made_on: Mapping[str, object], kernels: Mapping[str, Any] | None
    ) -> SavedTable:
        """The measured times, of which there must be some, as a table to write.

        Args:
            path: where it will lie.
            made_on: what the times were measured on.
            kernels: the choices of the accelerator, None where there is none.
        """
        assert self.costs is not None
        times = {
            budget: ms
            for budget, at in self.places.items()
            if (ms := self.stats[at].replay_ms) is not None
        }
        chosen = None if kernels is None else dict(kernels)
        return SavedTable(path, dict(made_on), self.costs, times, chosen)


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
    table: SavedTable | None = None
    """Prices of another process, instead of measured ones."""
    bounded: bool = False
    """Whether the ladder is lowered to fit its share of memory."""
    accelerator: Accelerator | None = None
    """Of the encoder, if it is accelerated."""
    compiled: bool = False
    """Whether the forward is compiled anew for every budget: some seconds to half a minute each."""
    _failed: dict[Budget, Exception] = field(default_factory=dict)

    def run(self, ladder: Ladder) -> Session:
        """Capture every budget, largest first; those that fail are dropped with a warning each.

        Raises:
            RuntimeError: all of them failed, and not for want of memory: what the encoder raised.
        """
        began = time.perf_counter()
        if self.graphs and self.table is not None:
            ladder = self.table.timed(ladder)
        if self.graphs and self.bounded:
            ladder = self._fit_memory(ladder)
        layouts = self._layouts(ladder)
        arena = self._arena(layouts)
        pool = Pool(self.device) if self.graphs else None
        stream = torch.cuda.Stream(self.device) if self.graphs else None
        session = Session({}, arena, [], [], 0.0, pool, stream)
        with self._bar(len(layouts)) as bar:
            for budget in sorted(layouts, key=lambda budget: (-budget.rows, -budget.segments)):
                self._capture_one(session, budget, layouts[budget])
                bar.set_postfix_str(f"{budget.tokens} tokens, {session.pool_bytes / 2**20:.0f} MiB")
                bar.update()
        self._report(session)
        if stream is not None and session.runners:
            self._price(session, stream)
            torch.cuda.current_stream(self.device).wait_stream(stream)
            torch.cuda.empty_cache()  # of warm-ups and timings: what is held is arena and pool
        session.stats.reverse()
        session.places = {budget: at for at, budget in enumerate(reversed(session.runners))}
        session.seconds = time.perf_counter() - began
        return session

    def _price(self, session: Session, stream: torch.cuda.Stream) -> None:
        """Prices for routing: from the table given, else measured."""
        if self.table is not None:
            session.costs = self.table.prices(list(session.runners))
            replay_ms = self.table.replay_ms
        else:
            torch.cuda.current_stream(self.device).wait_stream(stream)
            meter = Meter(self.encoder, session.runners, stream, self.device)
            try:
                session.costs, replay_ms = meter.measure()
            except RuntimeError as error:
                self._unmeasured(error)
                return
        for entry, budget in zip(session.stats, session.runners, strict=True):
            entry.replay_ms = replay_ms.get(budget)

    def _unmeasured(self, error: RuntimeError) -> None:
        """Go on without prices where memory is too short to run the encoder beside the pool."""
        if not is_memory(error):
            raise error
        traceback.clear_frames(error.__traceback__)
        warnings.warn(
            "eager runs could not be timed, there is no memory for one beside the graphs: all that "
            "fits a budget is replayed; give fewer tokens (max_budget, budgets) to have them timed",
            stacklevel=7,
        )

    def _layout(self, budget: Budget) -> Layout:
        return Layout.of(capacity_metadata(self.encoder, budget, []), budget.rows)

    def _layouts(self, ladder: Ladder) -> dict[Budget, Layout]:
        """Where metadata lies, for every budget whose metadata the host can hold."""
        layouts = {}
        for budget in ladder.budgets:
            try:
                layouts[budget] = self._layout(budget)
            except (RuntimeError, MemoryError) as error:
                self._drop(budget, error)
        return layouts

    def _arena(self, layouts: dict[Budget, Layout]) -> Arena:
        """The arena of the largest budget; where that does not fit, of the next smaller."""
        while True:
            rows = max((budget.rows for budget in layouts), default=0)
            block = max((layout.nbytes for layout in layouts.values()), default=0)
            try:
                return self._new_arena(rows, block)
            except RuntimeError as error:
                if not layouts:
                    raise
                largest = max(layouts)
                del layouts[largest]
                self._drop(largest, error)

    def _new_arena(self, rows: int, block: int) -> Arena:
        return Arena(rows, tuple(self.encoder.row_shape), self.dtype, self.device, block)

    def _capture_one(self, session: Session, budget: Budget, layout: Layout) -> None:
        began = time.perf_counter()
        runner = make_runner(self.forward, budget, layout, session.arena, self.wanted)
        empty = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
        try:
            layout.write(empty, capacity_metadata(self.encoder, budget, []), rows=0)
            if session.stream is not None:  # the last warm-up may still be reading its metadata
                torch.cuda.current_stream(self.device).wait_stream(session.stream)
            runner.block.copy_(empty)
            if session.pool is not None and session.stream is not None:
                session.stream.wait_stream(torch.cuda.current_stream(self.device))
                runner.graph = capture(runner, session.pool, session.stream)
            else:
                runner.body()
        except (RuntimeError, MemoryError) as error:  # or the allocator's assertion on a MIG slice
            runner.graph = None
            self._drop(budget, error)
            if session.pool is not None and not session.runners:  # none is using it
                session.pool.renew()
            return
        added = 0
        if session.pool is not None:
            held = session.pool.nbytes
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
                kernel=self.accelerator.taken if self.accelerator is not None else "reference",
            )
        )

    def _drop(self, budget: Budget, error: Exception) -> None:
        """Note a budget that failed, and free what its frames hold."""
        traceback.clear_frames(error.__traceback__)
        self._failed[budget] = error.with_traceback(None) if is_memory(error) else error
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _report(self, session: Session) -> None:
        """Warn of every budget lost; where all are, and not by memory, the encoder is broken."""
        bugs = [error for error in self._failed.values() if not is_memory(error)]
        if bugs and not session.runners:
            raise bugs[-1]
        for budget, error in self._failed.items():
            session.dropped.append(budget.name)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(
                f"budget {budget.name} could not be captured and is dropped ({reason}); smaller "
                "ones still serve, larger items run eagerly",
                stacklevel=6,
            )
        self._failed.clear()

    def _fit_memory(self, ladder: Ladder) -> Ladder:
        """Lower the largest inferred budget until arena and pool fit their share of free memory."""
        share = self._available() // MEMORY_SHARE
        each = self._bytes_a_row(ladder.budgets)
        kept = tuple(budget for budget in ladder.budgets if budget.rows * each <= share)
        if len(kept) == len(ladder.budgets):
            return ladder
        limit = f"arena and graph pool are to fit a third of free memory ({share / 2**20:.0f} MiB)"
        if kept:
            what = f"largest budget lowered from {ladder.budgets[-1].tokens} to {kept[-1].tokens}"
        else:
            kept = tuple(b for b in ladder.budgets if b.rows == ladder.budgets[0].rows)
            what = f"no budget fits, only the smallest is captured: {kept[0].tokens}"
        warnings.warn(f"{what} tokens: {limit}; give max_budget to choose yourself", stacklevel=6)
        return replace(ladder, budgets=kept)

    def _available(self) -> int:
        """Bytes that tensors could take: free, or cached by torch, and within its limit."""
        free, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_allocated(self.device)
        cached = torch.cuda.memory_reserved(self.device) - held
        limit = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        return max(min(free + cached, limit - held), 0)

    def _bytes_a_row(self, budgets: tuple[Budget, ...]) -> float:
        """Peak bytes of an eager run over its rows: activations grow in proportion.

        Infinite where not even the smallest budget's run fits.
        """
        at = len(budgets) // 4
        while True:
            try:
                return self._probe(budgets[at])
            except RuntimeError as error:
                if not is_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
            if at == 0:
                return math.inf
            at //= 2

    def _probe(self, budget: Budget) -> float:
        layout = self._layout(budget)
        arena = self._new_arena(budget.rows, layout.nbytes)
        runner = make_runner(self.forward, budget, layout, arena, self.wanted)
        if self.accelerator is not None:  # derives weights and times kernels at its first forward
            runner.body()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        runner.body()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        return (peak + arena.nbytes) / budget.rows

    @contextmanager
    def _bar(self, count: int) -> Iterator[Any]:
        what = "compile and capture" if self.compiled else "capture"
        with tqdm(total=count, desc=what, unit="budget", disable=not self.progress) as bar:
            yield bar


def is_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(word in str(error) for word in MEMORY_WORDS)
