"""Counters: what was replayed, what was padding, what ran eagerly and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass
class BudgetStats:
    """Counters of one captured budget."""

    tokens: int
    segments: int
    longest_segment: int
    windows: int
    capture_seconds: float = 0.0
    replay_ms: float | None = None
    """Milliseconds of a full replay, measured at capture or in the table loaded; else None."""
    graph_bytes: int = 0
    """Bytes that capturing this budget added to the pool (smaller budgets reuse the largest's)."""
    kernel: str = "reference"
    """Attention kernels in the graph, or "reference" where nothing chose any."""
    hits: int = 0
    items: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0

    def fresh(self) -> BudgetStats:
        """Return the same budget with counters at zero."""
        return replace(self, hits=0, items=0, real_tokens=0, padded_tokens=0)

    def count(self, items: int, tokens: int) -> None:
        """Count one replay of so many items and real tokens."""
        self.hits += 1
        self.items += items
        self.real_tokens += tokens
        self.padded_tokens += self.tokens


@dataclass
class GraphStats:
    """What :meth:`GraphedEncoder.stats` returns; prints as a table."""

    backend: str
    budgets: list[BudgetStats] = field(default_factory=list)
    eager_calls: int = 0
    eager_items: int = 0
    eager_reasons: Counter[str] = field(default_factory=Counter)
    """How many items ran eagerly for each reason: a capacity exceeded, or eager was cheaper."""
    arena_bytes: int = 0
    pool_bytes: int = 0
    cache_bytes: int = 0
    """What is kept for grids seen before, most of it metadata on the device."""
    derived_bytes: int = 0
    """Weights that an accelerated encoder made from its own."""
    note: str = ""
    """Why an accelerated encoder runs the reference, empty where it does not."""
    capture_seconds: float = 0.0
    dropped: list[str] = field(default_factory=list)
    """Budgets whose capture failed."""

    @property
    def padding(self) -> float:
        """Padded tokens over real tokens, minus one, of everything replayed."""
        real = sum(budget.real_tokens for budget in self.budgets)
        padded = sum(budget.padded_tokens for budget in self.budgets)
        return padded / real - 1 if real else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        reasons = dict(self.eager_reasons)  # asdict makes a Counter of pairs out of a Counter
        return {**asdict(self), "eager_reasons": reasons, "padding": self.padding}

    def __str__(self) -> str:
        head = f"{'tokens':>7} {'segments':>13} {'hits':>7} {'items':>7} {'real':>9} {'padded':>9} "
        lines = [head + f"{'ms':>8} {'capture s':>9} {'MiB':>7} kernel"]
        for budget in self.budgets:
            shape = f"{budget.segments}x{budget.longest_segment}"
            ms = "-" if budget.replay_ms is None else f"{budget.replay_ms:.2f}"
            lines.append(
                f"{budget.tokens:>7} {shape:>13} {budget.hits:>7} {budget.items:>7} "
                f"{budget.real_tokens:>9} {budget.padded_tokens:>9} {ms:>8} "
                f"{budget.capture_seconds:>9.2f} {budget.graph_bytes / 2**20:>7.1f} {budget.kernel}"
            )
        reasons = ", ".join(f"{why}: {count}" for why, count in sorted(self.eager_reasons.items()))
        lines.append(
            f"eager: {self.eager_items} items in {self.eager_calls} runs ({reasons or '-'})"
        )
        lines.append(
            f"{self.backend}: arena {self.arena_bytes / 2**20:.1f}, pool "
            f"{self.pool_bytes / 2**20:.1f}, metadata {self.cache_bytes / 2**20:.1f}, "
            f"derived {self.derived_bytes / 2**20:.1f} MiB; captured in "
            f"{self.capture_seconds:.2f} s; padding {self.padding:.1%}"
        )
        lines += [f"accelerated encoder runs the reference: {self.note}"] * bool(self.note)
        lines += [f"dropped: {name}" for name in self.dropped]
        return "\n".join(lines)
