"""Budgets: how much one captured graph holds, and which budgets a ladder has.

A budget is named by its output tokens. What a graph bakes in is more: input rows, attention
segments, the longest segment, attention windows. A kernel launches blocks for segments times
longest segment, so many segments *and* a long longest segment would launch mostly empty blocks. One
token count may therefore be captured in two shapes of equal area: few long segments, or many short
ones.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

from encoders.contract import EncoderItemSpec, GraphableEncoder
from encoders.contract import Grid

from .ladder import default_ladder, fit_budgets, positive, positives, square_counts

__all__ = [
    "LONG_SEGMENTS",
    "Budget",
    "Ladder",
    "Load",
    "default_ladder",
    "fit_budgets",
    "plan_ladder",
    "read_specs",
    "square_counts",
]

LONG_SEGMENTS = 8
"""Segments of the long shape, and how many times shorter and more the short shape's are."""
SHORT_SHARE = 6
"""One graph in this many has the short shape: of 48, those for squares from 784 tokens on."""


class Budget(NamedTuple):
    """Capacities of one graph (a tuple: routing hashes and compares thousands)."""

    tokens: int
    rows: int
    segments: int
    longest_segment: int
    windows: int

    @property
    def name(self) -> str:
        """Short form for tables and warnings: tokens, segments x longest segment."""
        return f"{self.tokens} ({self.segments}x{self.longest_segment})"

    def refuses(self, load: Load) -> str | None:
        """The first capacity that ``load`` exceeds, or None if it fits."""
        if load.tokens > self.tokens or load.rows > self.rows:
            return "tokens"
        if load.segments > self.segments:
            return "segments"
        if load.longest_segment > self.longest_segment:
            return "longest segment"
        return "windows" if load.windows > self.windows else None


class Load(NamedTuple):
    """What a group of items asks for; ``area`` is the sum of squared segment lengths."""

    items: int
    tokens: int
    rows: int
    segments: int
    longest_segment: int
    windows: int
    area: int

    @classmethod
    def of(cls, specs: Sequence[EncoderItemSpec]) -> Load:
        """Sum of the items (a loop: a decision sums dozens of groups)."""
        rows = tokens = segments = longest = windows = area = 0
        for more_rows, more_tokens, more, length, more_windows in specs:
            rows += more_rows
            tokens += more_tokens
            segments += more
            windows += more_windows
            area += more * length * length
            if length > longest:
                longest = length
        return cls(len(specs), tokens, rows, segments, longest, windows, area)


@dataclass(frozen=True)
class Ladder:
    """The budgets to capture, ascending, and how many items one replay takes."""

    budgets: tuple[Budget, ...]
    max_batch_size: int
    inferred: bool


def plan_ladder(
    encoder: GraphableEncoder,
    budgets: Iterable[SupportsIndex] | None = None,
    *,
    max_batch_size: SupportsIndex | None = None,
    max_frames_per_batch: SupportsIndex | None = None,
    min_budget: SupportsIndex | None = None,
    max_budget: SupportsIndex | None = None,
    max_graphs: SupportsIndex = 48,
) -> Ladder:
    """Validate the four ways to configure budgets, and infer what is not given.

    Args:
        encoder: asked for its range, and for what one item of so many tokens costs.
        budgets: output tokens, any order, any iterable; inferred from the range if None.
        max_batch_size: items a replay; inferred as min(64, smallest budget).
        max_frames_per_batch: segments of every budget, by default 8 long or 64 short ones; without
            effect where segments are tiles of one length, which a budget's tokens decide.
        min_budget: smallest inferred budget; the encoder's smallest by default.
        max_budget: largest inferred budget; the encoder's largest by default.
        max_graphs: how many graphs at most.

    Raises:
        ValueError: a number that is not a positive integer, an empty list, bounds that cross,
            or more items a replay than the smallest budget has tokens.
    """
    items = _given("max_batch_size", max_batch_size)
    frames = _given("max_frames_per_batch", max_frames_per_batch)
    low, high = _given("min_budget", min_budget), _given("max_budget", max_budget)
    most = positive("max_graphs", max_graphs)
    if budgets is not None:
        if low is not None or high is not None:
            raise ValueError("budgets given: min_budget and max_budget only bound inferred ones")
        tokens = _read_budgets(encoder, budgets, most)
    else:
        low, high = _bounds(encoder, low, high, items)
        segments = _segment_counts(frames, items or min(64, low))
        count = _long_count(encoder, high, segments, most)
        tokens = default_ladder(low, high, count, lambda counts: _whole(encoder, counts))
    if items is None:
        items = min(64, tokens[0])
    elif items > tokens[0]:
        smallest = "budgets" if budgets is not None else "min_budget"
        raise ValueError(
            f"max_batch_size={items} items do not fit the smallest budget of {tokens[0]} tokens "
            f"(an item makes at least one): use max_batch_size<={tokens[0]} or {smallest}>={items}"
        )
    shapes = _shapes(encoder, tokens, _segment_counts(frames, items), most)
    return Ladder(tuple(sorted(shapes)), items, inferred=budgets is None)


def _given(name: str, value: SupportsIndex | None) -> int | None:
    return None if value is None else positive(name, value)


def _read_budgets(
    encoder: GraphableEncoder, budgets: Iterable[SupportsIndex], most: int
) -> list[int]:
    given = sorted(set(positives("budgets", "budget", budgets)))
    if not given:
        raise ValueError("budgets is empty: give at least one number of output tokens, or None")
    if len(given) > most:
        raise ValueError(f"{len(given)} budgets, max_graphs={most}: drop some or raise it")
    whole = _whole(encoder, given)
    if whole != given:
        warnings.warn(f"budgets {given} rounded up to what items can make: {whole}", stacklevel=4)
    return whole


def read_specs(encoder: GraphableEncoder, grids: Sequence[Grid]) -> list[EncoderItemSpec]:
    """What items cost, in Python's integers even if the encoder counts in NumPy's or torch's."""
    return [EncoderItemSpec(*map(operator.index, spec)) for spec in encoder.item_specs(grids)]


def _specs(encoder: GraphableEncoder, tokens: Sequence[int]) -> list[EncoderItemSpec]:
    """What one item of so many tokens costs, for each count."""
    return read_specs(encoder, [encoder.grid_for(count) for count in tokens]) if tokens else []


def _whole(encoder: GraphableEncoder, tokens: Sequence[int]) -> list[int]:
    """Round up to what an item can make (whole tiles)."""
    return sorted({spec.output_tokens for spec in _specs(encoder, tokens)})


def _bounds(
    encoder: GraphableEncoder, low: int | None, high: int | None, items: int | None
) -> tuple[int, int]:
    """Ends of an inferred ladder; an error names what the user gave, and what the encoder did."""
    smallest, largest = map(operator.index, encoder.budget_range)
    start = low if low is not None else max(smallest, items or 1)
    if high is None or start <= high:
        return start, max(largest, start) if high is None else high
    if low is not None:
        raise ValueError(f"min_budget={low} is above max_budget={high}: swap or widen them")
    if smallest > high:
        raise ValueError(
            f"max_budget={high} is below {smallest}, where the encoder's range starts: "
            f"use max_budget>={start}, or give a min_budget<={high} too"
        )
    raise ValueError(
        f"max_batch_size={items} items do not fit max_budget={high} tokens (an item makes at "
        f"least one): use max_batch_size<={high} or max_budget>={items}"
    )


def _segment_counts(frames: int | None, items: int) -> tuple[int, int]:
    """Segments of the long shape and of the short one; equal means that one shape does."""
    if frames is not None:
        return min(frames, LONG_SEGMENTS), frames
    return LONG_SEGMENTS, max(items, LONG_SEGMENTS**2)


def _long_count(encoder: GraphableEncoder, high: int, segments: tuple[int, int], most: int) -> int:
    """How many token counts leave room for the short shapes."""
    one_segment = _specs(encoder, [4 * high])[0].segments == 1
    few, many = segments
    return most - most // SHORT_SHARE if one_segment and many > few else most


def _shapes(
    encoder: GraphableEncoder, tokens: Sequence[int], segments: tuple[int, int], most: int
) -> list[Budget]:
    """A long shape for every token count, and a short one for as many as there is room for."""
    specs = _specs(encoder, tokens)
    larger = _specs(encoder, [4 * tokens[-1]])[0]
    if larger.segments > 1:  # tiles: every segment has one length, so one shape serves
        return [_budget(spec, spec.segments, spec.longest_segment) for spec in specs]
    few, many = segments
    shapes = [_budget(spec, few, spec.longest_segment) for spec in specs]
    room = most - len(shapes)
    if many > few and room > 0:
        squares = set(square_counts(tokens[0], tokens[-1]))
        by_use = sorted(specs, key=lambda s: (s.output_tokens not in squares, -s.output_tokens))
        shapes += [
            _budget(spec, many, -(-spec.longest_segment // LONG_SEGMENTS)) for spec in by_use[:room]
        ]
    return shapes


def _budget(spec: EncoderItemSpec, segments: int, longest: int) -> Budget:
    """Windows: twice those of one squarish item, and one more a segment for ragged edges."""
    windows = 2 * spec.windows + segments if spec.windows else 0
    return Budget(spec.output_tokens, spec.input_size, segments, longest, windows)
