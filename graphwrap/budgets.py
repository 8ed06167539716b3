"""Budgets, the capacities of captured graphs, and the choice of the ones to capture.

A budget is named by its output tokens. Its graph also fixes the number of input rows, of attention
segments (such as frames, whose rows attend to one another) and of attention windows, and the rows
of the longest segment. Attention kernels launch blocks for segments times longest segment, mostly
empty ones if segments are many and the longest is long. One token count may therefore be captured
in two shapes: few long segments, and many short ones.

One search finds the token counts with the least padding: :func:`fit_budgets` is given the sizes of
the items (images or clips), :func:`default_budgets` assumes them.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, SupportsIndex, TypeAlias, cast

import numpy as np

from encoders.contract import EncoderItemSpec, GraphableEncoder, Grid, warn_caller

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
        token_counts = sorted(set(require_positives("budgets", "budget", budgets)))
        if not token_counts:
            raise ValueError("budgets is empty: give at least one number of output tokens, or None")
        if len(token_counts) > max_count:
            raise ValueError(
                f"{len(token_counts)} budgets, max_graphs={max_count}: drop some or raise it"
            )
        tokens = _round_up(encoder, token_counts)
        if tokens != token_counts:
            warn_caller(f"budgets {token_counts} rounded up to what items can make: {tokens}")
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


SIGNIFICANT_BITS = 6
"""The token counts of default budgets have at most this many significant bits: from 64 on they are
multiples of 2, from 512 of 16, and from 4096 of 128."""
COMMONEST = 0.4
"""The item size assumed to be commonest, as a position on a logarithmic scale of tokens from the
smallest budget (0) to the largest (1). Between 64 and 8192 tokens it is 446 tokens, an image
between 640x480 and 800x600 pixels."""
SQUARES = 0.25
"""The assumed number of square images, or clips and batches of them, per image of another shape."""
MOST = 2**31 - 1
"""The largest number of rows or items that is accepted, since offsets are int32."""


def default_budgets(
    low: int, high: int, count: int, round_up: Callable[[Sequence[int]], list[int]] = sorted
) -> list[int]:
    """Return at most ``count`` budgets from ``low`` to ``high`` that pad items of any size little.

    Padding counts relative to the image: a tenth of 100 tokens counts as much as a tenth of 5,000.
    Sizes are assumed to spread over a logarithmic scale, commonest below its middle (``COMMONEST``)
    and half as common at the top, where a replay gains least. One in five is assumed to be a
    square, a clip or a batch of squares (:func:`square_counts`). The budgets have the least padding
    for these assumed sizes, by the search of :func:`fit_budgets`.

    Args:
        low: smallest budget, in output tokens.
        high: largest budget, in output tokens.
        count: how many budgets at most.
        round_up: rounds token counts up to counts that items of the encoder can have, and returns
            them ascending without duplicates.
    """
    squares = set(round_up(square_counts(low, high)))
    sizes = round_up(sorted({*_round_numbers(low, high), *squares}))
    if count == 1 or len(sizes) == 1:
        return sizes[-1:]
    spread = [_commonness(a, b, sizes[0], sizes[-1]) for a, b in pairwise(sizes)]
    each_square = SQUARES * sum(spread) / max(len(squares), 1)
    weights = [
        (often + each_square * (size in squares)) / size
        for size, often in zip(sizes[1:], spread, strict=True)
    ]
    return sizes[:1] + _least_padding(sizes[1:], weights, count - 1)


def square_counts(low: int, high: int) -> list[int]:
    """Return the token counts from ``low`` to ``high`` that images of 224x224 pixels add up to.

    With 2x2 patches per token, one image has 64 tokens for patches of 14 pixels and 49 for 16. A
    clip or a batch has a power of two times as many, and needs no padding in such a budget.
    """
    counts = {side << power for side in (49, 64) for power in range(max(high, 1).bit_length())}
    return sorted(count for count in counts if low <= count <= high)


def fit_budgets(token_counts: Iterable[SupportsIndex], max_graphs: SupportsIndex = 48) -> list[int]:
    """Return the budgets, at most ``max_graphs``, that pad items of these token counts the least.

    Args:
        token_counts: output tokens of each item seen, one item per replay; a list, an array, a
            tensor, or anything else that yields integers.
        max_graphs: how many budgets at most.

    Returns:
        Ascending budgets; the largest is the largest count.

    Raises:
        ValueError: no counts, or a number that is not a positive integer.
    """
    max_count = require_positive("max_graphs", max_graphs)
    tally = Counter(require_positives("token_counts", "token count", token_counts))
    if not tally:
        raise ValueError("token_counts is empty: pass the output tokens of the items you saw")
    sizes = sorted(tally)
    return _least_padding(sizes, [tally[size] for size in sizes], max_count)


def require_positive(name: str, value: SupportsIndex) -> int:
    """Return ``value`` as an int; it may be an integer of NumPy or torch.

    A ValueError, whose message calls the value ``name``, is raised unless it is from 1 to ``MOST``.
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if not 1 <= number <= MOST:
        raise ValueError(
            f"{name}={value!r}: must be a positive integer, and at most {MOST} because offsets are "
            "32-bit integers"
        )
    return number


def require_positives(names: str, name: str, values: Iterable[SupportsIndex]) -> list[int]:
    """Return the entries of ``values`` as ints; raise a ValueError if one is not positive.

    The error's message calls the whole argument ``names`` and one entry ``name``.
    """
    try:
        is_text = isinstance(values, (str, bytes))
        # A text is one bad entry, which `require_positive` rejects by its own error.
        entries = [cast(SupportsIndex, values)] if is_text else list(values)
    except TypeError as error:
        raise ValueError(f"{names}={values!r}: must be a list: write [{values}]") from error
    return [require_positive(name, value) for value in entries]


def _round_numbers(low: int, high: int) -> list[int]:
    """Return ``low``, ``high``, and numbers between them of at most six significant bits."""
    numbers, number = [], low
    while number < high:
        numbers.append(number)
        step = 1 << max(number.bit_length() - SIGNIFICANT_BITS, 0)
        number = (number // step + 1) * step
    return [*numbers, high]


def _commonness(smaller_size: int, size: int, low: int, high: int) -> float:
    """Return how common items above ``smaller_size`` and up to ``size`` tokens are assumed to be.

    The result is a relative weight: the weights of all sizes, ``low`` to ``high``, do not sum to 1.
    """
    position = math.log(size / low) / math.log(high / low)
    return math.log(size / smaller_size) * (2 - ((position - COMMONEST) / (1 - COMMONEST)) ** 2)


def _least_padding(sizes: Sequence[int], weights: Sequence[float], max_count: int) -> list[int]:
    """Return the budgets with the least weighted sum of (budget - size), by dynamic programming.

    With n budgets for the sizes up to some end, the last budget serves the sizes from some start
    to that end, and the best n - 1 budgets serve those before. All starts are tried.
    """
    weight = np.cumsum([0.0, *weights])  # entry i is the total weight of the first i sizes
    tokens = np.cumsum([0.0, *map(operator.mul, sizes, weights)])
    # Entry i is the least padding of the first i sizes.
    best = np.array([0.0, *[math.inf] * len(sizes)])
    starts = []
    for _ in range(min(max_count, len(sizes))):
        padding_and_tokens = best + tokens
        next_best, best_starts = np.zeros_like(best), np.zeros(len(best), int)
        for end, size in enumerate(sizes, 1):
            padding = padding_and_tokens[:end] - size * weight[:end]
            best_starts[end] = start = padding.argmin()
            next_best[end] = padding[start] + size * weight[end] - tokens[end]
        best = next_best
        starts.append(best_starts)
    budgets, end = [], len(sizes)
    while end:
        budgets.append(sizes[end - 1])
        end = int(starts.pop()[end])
    return budgets[::-1]
