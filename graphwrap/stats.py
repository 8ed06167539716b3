"""Counters of replays, of padding, and of eager runs with their reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from .settings import BackendInUse


@dataclass
class BudgetStats:
    """Capacities of a CUDA graph, facts of its capture, and counters of its replays (``hits``)."""

    tokens: int
    segments: int
    longest_segment: int
    windows: int
    path: str = "image"
    """The input path of the encoder that the budget is for, such as "image" or "tiles"."""
    capture_seconds: float = 0.0
    replay_ms: float | None = None
    """Milliseconds of a replay, without the attention of its items; None if not measured."""
    graph_bytes: int = 0
    """Bytes that capturing this budget added to the pool (smaller budgets reuse the largest's)."""
    kernel: str = "reference"
    """The attention kernels in the graph, or "reference" for those of the plain encoder."""
    hits: int = 0
    items: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0

    def reset(self) -> None:
        """Set the counters to zero."""
        self.hits = self.items = self.real_tokens = self.padded_tokens = 0

    def count(self, items: int, tokens: int) -> None:
        """Count one replay of this many items and output tokens, not including padding."""
        self.hits += 1
        self.items += items
        self.real_tokens += tokens
        self.padded_tokens += self.tokens


@dataclass
class GraphStats:
    """The counters that :meth:`GraphedEncoder.stats` returns; printed, they are a table."""

    backend: BackendInUse
    budgets: list[BudgetStats] = field(default_factory=list)
    eager_calls: int = 0
    eager_items: int = 0
    eager_reasons: Counter[str] = field(default_factory=Counter)
    """How many items ran eagerly for each reason: a budget's capacity was exceeded, an eager run
    was cheaper than a replay, or the backend is "eager"."""
    arena_bytes: int = 0
    pool_bytes: int = 0
    cache_bytes: int = 0
    """Bytes of metadata kept for grids seen before, most of it on the device."""
    derived_bytes: int = 0
    """The bytes of weights that an accelerated encoder derived from the encoder's own."""
    note: str = ""
    """The reason why an accelerated encoder runs like the plain one; empty if it does not."""
    capture_seconds: float = 0.0
    dropped: list[str] = field(default_factory=list)
    """The names of the budgets whose capture failed."""

    def reset(self) -> None:
        """Set the counters of calls to zero; times and bytes measured at capture are kept."""
        self.eager_calls = self.eager_items = 0
        self.eager_reasons = Counter()
        for budget in self.budgets:
            budget.reset()

    @property
    def padding(self) -> float:
        """The padding: padded tokens over real tokens, minus one, of all replays."""
        real = sum(budget.real_tokens for budget in self.budgets)
        padded = sum(budget.padded_tokens for budget in self.budgets)
        return padded / real - 1 if real else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return the counters by name as plain data, ready for JSON."""
        reasons = dict(self.eager_reasons)  # asdict would count the pairs of a Counter
        return {**asdict(self), "eager_reasons": reasons, "padding": self.padding}

    def __str__(self) -> str:
        row = "{:>7} {:>13} {:>7} {:>7} {:>9} {:>9} {:>8} {:>9} {:>7} {}".format
        head = "tokens segments hits items real padded ms capture_s MiB kernel"
        lines = [row(*head.split()).replace("_", " ")]
        several = len({stats.path for stats in self.budgets}) > 1
        for stats in self.budgets:
            shape, ms = f"{stats.segments}x{stats.longest_segment}", stats.replay_ms
            counts = stats.hits, stats.items, stats.real_tokens, stats.padded_tokens
            times = "-" if ms is None else f"{ms:.2f}", f"{stats.capture_seconds:.2f}"
            mib = f"{stats.graph_bytes / 2**20:.1f}"
            kernel = f"{stats.kernel}, {stats.path} path" if several else stats.kernel
            lines.append(row(stats.tokens, shape, *counts, *times, mib, kernel))
        reasons = ", ".join(
            f"{reason}: {count}" for reason, count in sorted(self.eager_reasons.items())
        )
        items = f"{self.eager_items} item{'s' * (self.eager_items != 1)}"
        runs = f"{self.eager_calls} run{'s' * (self.eager_calls != 1)}"
        sizes = [self.arena_bytes, self.pool_bytes, self.cache_bytes, self.derived_bytes]
        arena, pool, metadata, derived = [f"{size / 2**20:.1f}" for size in sizes]
        lines += [
            f"eager: {items} in {runs} ({reasons or '-'})",
            f"{self.backend}: arena {arena}, pool {pool}, metadata {metadata}, derived {derived} "
            f"MiB; captured in {self.capture_seconds:.2f} s; padding {self.padding:.1%}",
        ]
        if self.note:
            lines.append(f"accelerated encoder runs the reference: {self.note}")
        return "\n".join([*lines, *[f"dropped: {name}" for name in self.dropped]])
