"""Budgets, the capacities of captured graphs, and the choice of the ones to capture.

A budget is named by its output tokens. A graph also fixes its input rows, attention segments,
longest segment and attention windows. A kernel launches blocks for segments times longest segment,
so a budget with many segments and a long longest segment would launch mostly empty blocks. One
token count may therefore be captured in two shapes: few long segments, and many short ones.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, SupportsIndex, TypeAlias

from encoders.contract import EncoderItemSpec, GraphableEncoder, Grid

from .budget_sizes import default_budgets, positive, positives, square_counts

LONG_SEGMENTS = 8
"""The segments of a budget's long shape; its short shape has this many times more, each shorter."""
SHORT_SHARE = 6
"""One graph in this many has the short shape: with 48, those of squares from 784 tokens on."""
Tokens: TypeAlias = Iterable[SupportsIndex] | None
"""The output tokens of each budget as the user gives them; None to infer the budgets."""


class Batch(NamedTuple):
    """Totals over items that run together; a tuple, because packing makes thousands of them."""

    items: int
    tokens: int
    rows: int
    segments: int
    longest_segment: int
    windows: int

    @classmethod
    def of(cls, specs: Iterable[EncoderItemSpec]) -> Batch:
        """Return the totals of the sizes of items that run together."""
        items = rows = tokens = segments = longest = windows = 0
        for more_rows, more_tokens, more_segments, length, more_windows in specs:
            items += 1
            rows += more_rows
            tokens += more_tokens
            segments += more_segments
            windows += more_windows
            if length > longest:
                longest = length
        return cls(items, tokens, rows, segments, longest, windows)


class Budget(NamedTuple):
    """Capacities of one graph; a tuple, because packing compares and hashes thousands of them."""

    tokens: int
    rows: int
    segments: int
    longest_segment: int
    windows: int

    @property
    def name(self) -> str:
        """The budget's name in tables and warnings: ``tokens (segments x longest segment)``."""
        return f"{self.tokens} ({self.segments}x{self.longest_segment})"

    def exceeded_by(self, batch: Batch) -> str | None:
        """Return the first capacity that a batch exceeds, or None if the batch fits."""
        _, tokens, rows, segments, longest, windows = batch
        if tokens > self[0] or rows > self[1]:
            return "tokens"
        if segments > self[2]:
            return "segments"
        if longest > self[3]:
            return "longest segment"
        return "windows" if windows > self[4] else None

    def fits(self, batch: Batch) -> bool:
        """Return whether the graph of this budget has room for a batch."""
        return self.exceeded_by(batch) is None


@dataclass(frozen=True)
class BudgetSet:
    """The budgets to capture, ascending, and how many items one replay takes."""

    budgets: tuple[Budget, ...]
    max_batch_size: int
    inferred: bool
    """Whether the budgets were inferred rather than given by the user."""


def choose_budgets(
    encoder: GraphableEncoder,
    budgets: Tokens = None,
    *,
    max_batch_size: SupportsIndex | None = None,
    max_frames_per_batch: SupportsIndex | None = None,
    min_budget: SupportsIndex | None = None,
    max_budget: SupportsIndex | None = None,
    max_graphs: SupportsIndex = 48,
) -> BudgetSet:
    """Check the settings that say which budgets to capture, and infer those that are not given.

    The settings are those of :class:`GraphedEncoder`. ``max_frames_per_batch`` has no effect where
    segments are tiles of one length: a budget's tokens decide there.
    """
    items = _given("max_batch_size", max_batch_size)
    frames = _given("max_frames_per_batch", max_frames_per_batch)
    low, high = _given("min_budget", min_budget), _given("max_budget", max_budget)
    most = positive("max_graphs", max_graphs)
    if budgets is not None:
        if low is not None or high is not None:
            raise ValueError("budgets given: min_budget and max_budget only bound inferred ones")
        given = sorted(set(positives("budgets", "budget", budgets)))
        if not given:
            raise ValueError("budgets is empty: give at least one number of output tokens, or None")
        if len(given) > most:
            raise ValueError(f"{len(given)} budgets, max_graphs={most}: drop some or raise it")
        tokens = _whole(encoder, given)
        if tokens != given:
            warnings.warn(
                f"budgets {given} rounded up to what items can make: {tokens}", stacklevel=3
            )
    else:
        low, high = _bounds(encoder, low, high, items)
        few, many = _segment_counts(frames, items or min(64, low))
        two_shapes = many > few and not _is_tiled(encoder, high)
        count = most - most // SHORT_SHARE if two_shapes else most
        tokens = default_budgets(low, high, count, partial(_whole, encoder))
    if items is None:
        items = min(64, tokens[0])
    elif items > tokens[0]:
        smallest = "budgets" if budgets is not None else "min_budget"
        raise ValueError(
            f"max_batch_size={items} items do not fit the smallest budget of {tokens[0]} tokens "
            f"(an item makes at least one): use max_batch_size<={tokens[0]} or {smallest}>={items}"
        )
    shapes = _shapes(encoder, tokens, _segment_counts(frames, items), most)
    return BudgetSet(tuple(sorted(shapes)), items, inferred=budgets is None)


def budgets_by_path(
    budgets: Tokens | Mapping[str, Tokens], paths: Mapping[str, object]
) -> dict[str, Tokens]:
    """Return the budgets that were given for each path of an encoder."""
    if not isinstance(budgets, Mapping) and (budgets is None or len(paths) == 1):
        return dict.fromkeys(paths, budgets)
    if isinstance(budgets, Mapping) and budgets.keys() == paths.keys():
        return dict(budgets)
    raise ValueError(
        f"budgets={budgets!r}: this encoder has the paths {', '.join(paths)}, whose items differ "
        "in size; give a mapping from the name of each to its budgets, or None"
    )


def read_specs(encoder: GraphableEncoder, grids: Sequence[Grid]) -> list[EncoderItemSpec]:
    """Return the sizes of items in Python's integers; encoders may count in NumPy's."""
    return [EncoderItemSpec(*map(operator.index, spec)) for spec in encoder.item_specs(grids)]


def _given(name: str, value: SupportsIndex | None) -> int | None:
    return None if value is None else positive(name, value)


def _specs(encoder: GraphableEncoder, tokens: Sequence[int]) -> list[EncoderItemSpec]:
    """Return the sizes of one item for each number of output tokens in a list."""
    return read_specs(encoder, [encoder.grid_for(count) for count in tokens]) if tokens else []


def _whole(encoder: GraphableEncoder, tokens: Sequence[int]) -> list[int]:
    """Round token counts up to numbers that an item can make, such as those of whole tiles."""
    return sorted({spec.output_tokens for spec in _specs(encoder, tokens)})


def _is_tiled(encoder: GraphableEncoder, tokens: int) -> bool:
    """Return whether a large image has several segments: tiles, which are all of one length."""
    return _specs(encoder, [4 * tokens])[0].segments > 1


def _bounds(
    encoder: GraphableEncoder, low: int | None, high: int | None, items: int | None
) -> tuple[int, int]:
    """Return the smallest and the largest number of tokens of the inferred budgets."""
    smallest, largest = map(operator.index, encoder.budget_range)
    start = low if low is not None else max(smallest, items or 1)
    if high is None or start <= high:
        return start, max(largest, start) if high is None else high
    why = f"min_budget={low}" if low is not None else f"the encoder's range starts at {smallest}"
    if low is None and smallest <= high:
        why = f"max_batch_size={items}, and an item makes at least one token"
    raise ValueError(
        f"max_budget={high} is too small: {why}; use max_budget>={start}, or lower that"
    )


def _segment_counts(frames: int | None, items: int) -> tuple[int, int]:
    """Return the segments of the long shape and of the short one; if equal, one shape serves."""
    most = frames or max(items, LONG_SEGMENTS**2)
    return min(most, LONG_SEGMENTS), most


def _shapes(
    encoder: GraphableEncoder, tokens: Sequence[int], segments: tuple[int, int], most: int
) -> list[Budget]:
    """Return budgets, at most ``most``: per token count one of few long segments, then of many."""
    specs = _specs(encoder, tokens)
    if _is_tiled(encoder, tokens[-1]):
        return [_budget(spec, spec.segments, spec.longest_segment) for spec in specs]
    few, many = segments
    shapes = [_budget(spec, few, spec.longest_segment) for spec in specs]
    free = most - len(shapes)
    if many > few and free > 0:
        squares = set(square_counts(tokens[0], tokens[-1]))
        by_use = sorted(specs, key=lambda s: (s.output_tokens not in squares, -s.output_tokens))
        shapes += [
            _budget(spec, many, -(-spec.longest_segment // LONG_SEGMENTS)) for spec in by_use[:free]
        ]
    return shapes


def _budget(spec: EncoderItemSpec, segments: int, longest: int) -> Budget:
    """Return a budget with twice the windows of one squarish item, and one more per segment."""
    # One more window per segment, because windows are cut off at the edges of an item.
    windows = 2 * spec.windows + segments if spec.windows else 0
    return Budget(spec.output_tokens, spec.input_size, segments, longest, windows)
