"""The token counts of budgets: default ones for sizes that are assumed, and fitted ones.

One search finds the token counts with the least padding: :func:`fit_budgets` is given the sizes of
the items (images or clips), :func:`default_budgets` assumes them.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import SupportsIndex, cast

import numpy as np

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
