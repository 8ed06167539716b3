"""Budgets, the capacities of captured graphs, and the choice of the ones to capture.

A budget is named by its output tokens. Its graph also fixes the number of input rows, of attention
segments (such as frames, whose rows attend to one another) and of attention windows, and the rows
of the longest segment. Attention kernels launch blocks for segments times longest segment, mostly
empty ones if segments are many and the longest is long. One token count may therefore be captured
in two shapes: few long segments, and many short ones.

:mod:`.budget_sizes` finds the token counts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, SupportsIndex, TypeAlias

from encoders.contract import EncoderItemSpec, GraphableEncoder, Grid, warn_caller

from .budget_sizes import (
    default_budgets,
    require_positive,
    require_positives,
    square_counts,
)

LONG_SEGMENTS = 8
"""The number of attention segments in the long shape of a budget. In the short shape segments are
shorter by this factor, and at least this many times as many unless the user limits them."""
SHORT_SHARE = 6
"""If budgets are inferred, one graph in this many has the short shape (many short segments). Of 48
graphs, they are the 8 of 784 tokens or more that batches of 224x224 images fill exactly."""
Tokens: TypeAlias = Iterable[SupportsIndex] | None
"""The output tokens of each budget as the user gives them; None to infer the budgets."""


class Batch(NamedTuple):
    """Totals over items (images or clips) that run together.

    They are the number of items, their output tokens, input rows, attention segments and attention
    windows, and the rows of the longest segment. A tuple, because packing makes thousands of them.
    """

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
        for more_rows, more_tokens, more_segments, length, more_windows, _ in specs:
            items += 1
            rows += more_rows
            tokens += more_tokens
            segments += more_segments
            windows += more_windows
            if length > longest:
                longest = length
        return cls(items, tokens, rows, segments, longest, windows)


class Budget(NamedTuple):
    """Capacities of one CUDA graph, the most that the items of a replay may have together.

    They are output tokens, input rows, attention segments, rows of the longest segment, and windows
    (0 without window attention). A tuple, because packing compares and hashes thousands of them.
    """

    tokens: int
    rows: int
    segments: int
    longest_segment: int
    windows: int

    @property
    def name(self) -> str:
        """The name in tables and warnings: ``tokens (segments x longest segment)``."""
        return f"{self.tokens} ({self.segments}x{self.longest_segment})"

    def exceeded_by(self, batch: Batch) -> str | None:
        """Return the name of a capacity that a batch exceeds, or None if the batch fits.

        The name is "tokens" (also for too many rows), "segments", "longest segment" or "windows".
        """
        _, tokens, rows, segments, longest, windows = batch
        if tokens > self[0] or rows > self[1]:
            return "tokens"
        if segments > self[2]:
            return "segments"
        if longest > self[3]:
            return "longest segment"
        return "windows" if windows > self[4] else None

    def fits(self, batch: Batch) -> bool:
        """Return whether a CUDA graph of this size has room for a batch."""
        return self.exceeded_by(batch) is None


@dataclass(frozen=True)
class BudgetSet:
    """The sizes of the CUDA graphs to capture, ascending, and the most items of one replay."""

    budgets: tuple[Budget, ...]
    max_batch_size: int
    inferred: bool
    """Whether the budgets were inferred rather than given by the user."""


def largest_first(budgets: Iterable[Budget]) -> list[Budget]:
    """Return budgets by descending rows, and then by descending segments."""
    return sorted(budgets, key=lambda budget: (-budget.rows, -budget.segments))


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

    They are arguments of :class:`GraphedEncoder`; a ValueError says which of them cannot be met.
    ``max_frames_per_batch`` has no effect if the encoder splits images into tiles of one size: the
    tokens of a budget then say how many tiles it holds.
    """
    items = _read_optional("max_batch_size", max_batch_size)
    frames = _read_optional("max_frames_per_batch", max_frames_per_batch)
    low, high = _read_optional("min_budget", min_budget), _read_optional("max_budget", max_budget)
    max_count = require_positive("max_graphs", max_graphs)
    if budgets is not None:
        if low is not None or high is not None:
            raise ValueError("budgets given: min_budget and max_budget only bound inferred ones")
        tokens = _given_tokens(encoder, budgets, max_count)
    else:
        low, high = _bounds(encoder, low, high, items)
        long_count, short_count = _segment_counts(frames, items or min(64, low))
        two_shapes = short_count > long_count and not _is_tiled(encoder, high)
        count = max_count - max_count // SHORT_SHARE if two_shapes else max_count
        tokens = default_budgets(low, high, count, partial(_round_up, encoder))
    if items is None:
        items = min(64, tokens[0])
    elif items > tokens[0]:
        smallest = "budgets" if budgets is not None else "min_budget"
        raise ValueError(
            f"max_batch_size={items} items do not fit the smallest budget of {tokens[0]} tokens "
            f"(an item makes at least one): use max_batch_size<={tokens[0]} or {smallest}>={items}"
        )
    shapes = _shapes(encoder, tokens, _segment_counts(frames, items), max_count)
    return BudgetSet(tuple(sorted(shapes)), items, inferred=budgets is None)


def _given_tokens(
    encoder: GraphableEncoder, budgets: Iterable[SupportsIndex], max_count: int
) -> list[int]:
    """Return the token counts that the user gives, ascending, rounded up to what items can make."""
    token_counts = sorted(set(require_positives("budgets", "budget", budgets)))
    if not token_counts:
        raise ValueError("budgets is empty: give at least one number of output tokens, or None")
    if len(token_counts) > max_count:
        raise ValueError(
            f"{len(token_counts)} budgets and max_graphs={max_count}: leave out some budgets, or "
            "raise max_graphs"
        )
    tokens = _round_up(encoder, token_counts)
    if tokens != token_counts:
        warn_caller(f"budgets {token_counts} rounded up to what items can make: {tokens}")
    return tokens


def budgets_by_path(
    budgets: Tokens | Mapping[str, Tokens], paths: Mapping[str, object]
) -> dict[str, Tokens]:
    """Return the budgets of each input path of an encoder, by the name of the path.

    Args:
        budgets: the user's argument: None, token counts (only for an encoder of one path), or a
            mapping from the name of every path to token counts or None.
        paths: input paths of the encoder by name, such as "image" and "tiles".

    Raises:
        ValueError: token counts for several paths, or a mapping whose keys are not these names.
    """
    if not isinstance(budgets, Mapping) and (budgets is None or len(paths) == 1):
        return dict.fromkeys(paths, budgets)
    if isinstance(budgets, Mapping) and budgets.keys() == paths.keys():
        return dict(budgets)
    raise ValueError(
        f"budgets={budgets!r}: this encoder has the paths {', '.join(paths)}, whose items differ "
        "in size; give a mapping from the name of each to its budgets, or None"
    )


def read_specs(encoder: GraphableEncoder, grids: Sequence[Grid]) -> list[EncoderItemSpec]:
    """Return the sizes of the items with these grids, as Python integers.

    The encoder's ``item_specs`` may return integers of NumPy.
    """
    return [EncoderItemSpec(*map(operator.index, spec)) for spec in encoder.item_specs(grids)]


def _read_optional(name: str, value: SupportsIndex | None) -> int | None:
    return None if value is None else require_positive(name, value)


def _specs(encoder: GraphableEncoder, tokens: Sequence[int]) -> list[EncoderItemSpec]:
    """Return for each token count the sizes of a nearly square item of as many tokens or more."""
    return read_specs(encoder, [encoder.grid_for(count) for count in tokens]) if tokens else []


def _round_up(encoder: GraphableEncoder, tokens: Sequence[int]) -> list[int]:
    """Return token counts rounded up to counts that one item can have, ascending and each once.

    If the encoder splits images into tiles, these are the tokens of whole tiles.
    """
    return sorted({spec.output_tokens for spec in _specs(encoder, tokens)})


def _is_tiled(encoder: GraphableEncoder, tokens: int) -> bool:
    """Return whether the encoder splits an image of ``4 * tokens`` output tokens into tiles.

    It does if the image has several attention segments: these are tiles of the same length.
    """
    return _specs(encoder, [4 * tokens])[0].segments > 1


def _bounds(
    encoder: GraphableEncoder, low: int | None, high: int | None, items: int | None
) -> tuple[int, int]:
    """Return the smallest and the largest number of output tokens of inferred budgets."""
    smallest, largest = map(operator.index, encoder.budget_range)
    start = low if low is not None else max(smallest, items or 1)
    if high is None or start <= high:
        return start, max(largest, start) if high is None else high
    reason = f"min_budget={low}" if low is not None else f"the encoder's range starts at {smallest}"
    if low is None and smallest <= high:
        reason = f"max_batch_size={items}, and an item makes at least one token"
    raise ValueError(
        f"max_budget={high} is too small: {reason}; use max_budget>={start}, or lower that"
    )


def _segment_counts(frames: int | None, items: int) -> tuple[int, int]:
    """Return how many attention segments budgets have in the long shape, and in the short shape.

    Equal numbers mean that every budget has a single shape.
    """
    short_count = frames or max(items, LONG_SEGMENTS**2)
    return min(short_count, LONG_SEGMENTS), short_count


def _shapes(
    encoder: GraphableEncoder, tokens: Sequence[int], segments: tuple[int, int], max_count: int
) -> list[Budget]:
    """Return the budgets (sizes of CUDA graphs) to capture, at most ``max_count``.

    Every token count gets a budget of few long segments. While ``max_count`` allows, token counts
    get a second budget of many short segments: first those of square images, the largest of them
    first.
    """
    specs = _specs(encoder, tokens)
    if _is_tiled(encoder, tokens[-1]):
        return [_budget(spec, spec.segments, spec.longest_segment) for spec in specs]
    long_count, short_count = segments
    shapes = [_budget(spec, long_count, spec.longest_segment) for spec in specs]
    shapes_left = max_count - len(shapes)
    if short_count > long_count and shapes_left > 0:
        squares = set(square_counts(tokens[0], tokens[-1]))
        by_use = sorted(specs, key=lambda s: (s.output_tokens not in squares, -s.output_tokens))
        shapes += [
            _budget(spec, short_count, -(-spec.longest_segment // LONG_SEGMENTS))
            for spec in by_use[:shapes_left]
        ]
    return shapes


def _budget(spec: EncoderItemSpec, segments: int, longest: int) -> Budget:
    """Return a budget with the tokens and rows of one item, and twice its attention windows."""
    # One more window per segment, because the windows at the edges of an item are smaller.
    windows = 2 * spec.windows + segments if spec.windows else 0
    return Budget(spec.output_tokens, spec.input_size, segments, longest, windows)
