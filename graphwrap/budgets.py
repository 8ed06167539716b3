"""Budgets: how much one captured graph holds, and which budgets a ladder has.

A budget is named by its output tokens. What a graph bakes in is more: input rows, attention
segments, the longest segment, attention windows. A kernel launches blocks for segments times
longest segment, so many segments *and* a long longest segment would launch mostly empty blocks. One
token count may therefore be captured in two shapes of equal area: few long segments, or many short
ones.
"""

from __future__ import annotations

import math
import warnings
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, SupportsIndex

from encoders.contract import EncoderItemSpec, GraphableEncoder

LONG_SEGMENTS = 8
"""Segments of the long shape, and how many times shorter and more the short shape's are."""
SHORT_SHARE = 4
"""One graph in this many has the short shape."""


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
    budgets: Sequence[int] | None = None,
    *,
    max_batch_size: int | None = None,
    max_frames_per_batch: int | None = None,
    min_budget: int | None = None,
    max_budget: int | None = None,
    max_graphs: int = 48,
) -> Ladder:
    """Validate the four ways to configure budgets, and infer what is not given.

    Args:
        encoder: asked for its range, and for what one item of so many tokens costs.
        budgets: output tokens, any order; inferred from the range if None.
        max_batch_size: items a replay; inferred as min(64, smallest budget).
        max_frames_per_batch: segments of every budget; by default 8 long or 64 short ones.
        min_budget: smallest inferred budget; the encoder's smallest by default.
        max_budget: largest inferred budget; the encoder's largest by default.
        max_graphs: how many graphs at most.

    Raises:
        ValueError: a number that is not a positive integer, an empty list, bounds that cross,
            or more items a replay than the smallest budget has tokens.
    """
    for name, value in (
        ("max_batch_size", max_batch_size),
        ("max_frames_per_batch", max_frames_per_batch),
        ("min_budget", min_budget),
        ("max_budget", max_budget),
        ("max_graphs", max_graphs),
    ):
        if value is not None:
            _require_positive(name, value)
    if budgets is not None:
        if min_budget is not None or max_budget is not None:
            raise ValueError("budgets given: min_budget and max_budget only bound inferred ones")
        tokens = _read_budgets(encoder, budgets, max_graphs)
    else:
        low, high = _bounds(encoder, min_budget, max_budget, max_batch_size)
        segments = _segment_counts(max_frames_per_batch, max_batch_size or min(64, low))
        count = _long_count(encoder, high, segments, max_graphs)
        tokens = _whole(encoder, default_ladder(low, high, count))
    items = min(64, tokens[0]) if max_batch_size is None else max_batch_size
    if items > tokens[0]:
        raise ValueError(
            f"max_batch_size={items} items do not fit the smallest budget of {tokens[0]} tokens "
            f"(an item makes at least one): use max_batch_size<={tokens[0]} or budgets>={items}"
        )
    segments = _segment_counts(max_frames_per_batch, items)
    shapes = _shapes(encoder, tokens, segments, max_graphs)
    return Ladder(tuple(sorted(shapes)), items, inferred=budgets is None)


def default_ladder(low: int, high: int, count: int) -> list[int]:
    """At most ``count`` budgets from ``low`` to ``high``, each where it saves most padding.

    First what squares come to (:func:`square_counts`), largest first; then, one after another, the
    budget that takes most padded tokens away, for sizes spread evenly on a logarithmic scale.
    """
    ladder = sorted({low, high} if count > 1 else {high})
    for tokens in reversed(square_counts(low, high)):
        if len(ladder) < count and tokens not in ladder:
            insort(ladder, tokens)
    while len(ladder) < count:
        gaps = [(_padding(a, b), a, b) for a, b in pairwise(ladder) if b - a > 16]
        if not gaps:
            break
        _, below, above = max(gaps)
        insort(ladder, min(_round_up((below + above) / 2, 16), above - 1))
    return ladder


def square_counts(low: int, high: int) -> list[int]:
    """Token counts of 224x224 images, their clips and batches: 49 and 64 times powers of two.

    (64 tokens an image with patches of 14 pixels, 49 with 16.) A clip or a batch of squares then
    replays without padding.
    """
    counts = {side << power for side in (49, 64) for power in range(max(high, 1).bit_length())}
    return sorted(count for count in counts if low <= count <= high)


def _padding(low: int, high: int) -> float:
    """Padded tokens of sizes between two budgets, log-uniform: the integral of (high - x) / x."""
    return high * math.log(high / low) - (high - low)


def fit_budgets(token_counts: Sequence[int], max_graphs: int = 48) -> list[int]:
    """The ladder of at most ``max_graphs`` budgets that pads these counts least, exactly.

    Args:
        token_counts: output tokens of each item seen, one item a replay.
        max_graphs: how many budgets at most.

    Returns:
        Ascending budgets; the largest is the largest count.

    Raises:
        ValueError: no counts, or a number that is not a positive integer.
    """
    _require_positive("max_graphs", max_graphs)
    for count in token_counts:
        _require_positive("token count", count)
    if not token_counts:
        raise ValueError("token_counts is empty: pass the output tokens of the items you saw")
    tally = sorted(Counter(token_counts).items())
    sizes = [size for size, _ in tally]
    if len(sizes) <= max_graphs:
        return sizes
    seen, total = [0], [0]
    for size, times in tally:
        seen.append(seen[-1] + times)
        total.append(total[-1] + times * size)

    def padding(first: int, last: int) -> int:
        """Tokens added when counts ``first..last`` all use the budget ``sizes[last]``."""
        return sizes[last] * (seen[last + 1] - seen[first]) - (total[last + 1] - total[first])

    best = [padding(0, last) for last in range(len(sizes))]
    choices: list[list[int]] = []
    for _ in range(max_graphs - 1):
        best, choice = _next_row(best, padding)
        choices.append(choice)
    ladder, last = [], len(sizes) - 1
    for choice in reversed(choices):
        ladder.append(sizes[last])
        last = choice[last] - 1
        if last < 0:
            break
    else:
        ladder.append(sizes[last])
    return ladder[::-1]


def _next_row(
    previous: list[int], padding: Callable[[int, int], int]
) -> tuple[list[int], list[int]]:
    """One more budget: for each last count the best first count of the new budget's stretch.

    The best split moves right as the last count does (padding satisfies the quadrangle
    inequality), so each half of the range needs only its own part of the splits.
    """
    count = len(previous)
    row, choice = list(previous), [0] * count
    stack = [(0, count - 1, 0, count - 1)]
    while stack:
        low, high, first, final = stack.pop()
        if low > high:
            continue
        middle = (low + high) // 2
        best, at = padding(0, middle), 0
        for split in range(max(first, 1), min(final, middle) + 1):
            cost = previous[split - 1] + padding(split, middle)
            if cost < best:
                best, at = cost, split
        row[middle], choice[middle] = best, at
        stack.append((low, middle - 1, first, at))
        stack.append((middle + 1, high, at, final))
    return row, choice


def _require_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive integer")


def _round_up(value: float, step: int) -> int:
    return math.ceil(value / step) * step


def _read_budgets(encoder: GraphableEncoder, budgets: Sequence[int], max_graphs: int) -> list[int]:
    if not budgets:
        raise ValueError("budgets is empty: give at least one number of output tokens, or None")
    for budget in budgets:
        _require_positive("budget", budget)
    given = sorted({int(budget) for budget in budgets})
    if len(given) > max_graphs:
        raise ValueError(f"{len(given)} budgets, max_graphs={max_graphs}: drop some or raise it")
    whole = _whole(encoder, given)
    if whole != given:
        warnings.warn(f"budgets {given} rounded up to what items can make: {whole}", stacklevel=4)
    return whole


def _whole(encoder: GraphableEncoder, tokens: Sequence[int]) -> list[int]:
    """Round up to what an item can make (whole tiles)."""
    specs = encoder.item_specs([encoder.grid_for(count) for count in tokens])
    return sorted({spec.output_tokens for spec in specs})


def _bounds(
    encoder: GraphableEncoder, low: int | None, high: int | None, items: int | None
) -> tuple[int, int]:
    smallest, largest = encoder.budget_range
    start = low if low is not None else max(smallest, items or 1)
    stop = high if high is not None else max(largest, start)
    if start > stop:
        raise ValueError(f"min_budget={start} is above max_budget={stop}: swap or widen them")
    return start, stop


def _segment_counts(frames: int | None, items: int) -> tuple[int, int]:
    """Segments of the long shape and of the short one; equal means that one shape does."""
    if frames is not None:
        return min(frames, LONG_SEGMENTS), frames
    return min(items, LONG_SEGMENTS), max(items, LONG_SEGMENTS**2)


def _long_count(encoder: GraphableEncoder, high: int, segments: tuple[int, int], most: int) -> int:
    """How many token counts leave room for the short shapes."""
    one_segment = encoder.item_specs([encoder.grid_for(4 * high)])[0].segments == 1
    few, many = segments
    return most - most // SHORT_SHARE if one_segment and many > few else most


def _shapes(
    encoder: GraphableEncoder, tokens: Sequence[int], segments: tuple[int, int], most: int
) -> list[Budget]:
    """A long shape for every token count, and a short one for as many as there is room for."""
    specs = encoder.item_specs([encoder.grid_for(count) for count in tokens])
    larger = encoder.item_specs([encoder.grid_for(4 * tokens[-1])])[0]
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
