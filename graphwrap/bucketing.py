"""Which token counts to capture, for sizes that are known and for sizes that are not.

Both are one search: :func:`fit_budgets` is given the sizes, :func:`default_budgets` assumes them.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, SupportsIndex

SIGNIFICANT_BITS = 6
"""Default budgets are round: steps of 2 tokens from 64 on, of 16 from 512, of 128 from 4096."""
COMMONEST = 0.4
"""Where the commonest size lies between the ends of the range, on a logarithmic scale: at 446 of 64
to 8192 tokens, which images between 640x480 and 800x600 come to."""
SQUARES = 0.25
"""How many images, clips and batches of squares there are for every other image."""
MOST = 2**31 - 1
"""The largest number that makes sense: offsets into rows are int32."""


def default_budgets(
    low: int,
    high: int,
    count: int,
    whole: Callable[[Sequence[int]], list[int]] = sorted,
) -> list[int]:
    """Return at most ``count`` budgets from ``low`` to ``high`` with little padding for any sizes.

    Padding counts relative to the image: a tenth of 100 tokens counts as much as a tenth of 5,000.
    Sizes are assumed to spread over a logarithmic scale, commonest below its middle (``COMMONEST``)
    and half as common at the top, where a replay gains least. One in five is assumed to be a
    square, a clip or a batch of squares (:func:`square_counts`). The budgets are the best there are
    for that, by the search of :func:`fit_budgets`.

    Args:
        low: the smallest budget, always returned unless ``count`` is 1.
        high: the largest budget, always returned.
        count: how many budgets at most.
        whole: rounds token counts up to what items can make, ascending, each once.
    """
    squares = set(whole(square_counts(low, high)))
    sizes = whole(sorted({*_round_numbers(low, high), *squares}))
    if count == 1 or len(sizes) == 1:
        return sizes[-1:]
    spread = [_commonness(a, b, sizes[0], sizes[-1]) for a, b in pairwise(sizes)]
    each_square = SQUARES * sum(spread) / max(len(squares), 1)
    return sizes[:1] + _least_padding(
        [
            (size, (often + each_square * (size in squares)) / size)
            for size, often in zip(sizes[1:], spread, strict=True)
        ],
        count - 1,
    )


def square_counts(low: int, high: int) -> list[int]:
    """Return token counts of 224x224 images, their clips and batches.

    They are 64 tokens per image with patches of 14 pixels and 49 with 16, times powers of two. A
    clip or a batch of squares then replays without padding.
    """
    counts = {side << power for side in (49, 64) for power in range(max(high, 1).bit_length())}
    return sorted(count for count in counts if low <= count <= high)


def fit_budgets(token_counts: Iterable[SupportsIndex], max_graphs: SupportsIndex = 48) -> list[int]:
    """Return the budgets, at most ``max_graphs``, that pad these counts least, exactly.

    Args:
        token_counts: output tokens of each item seen, one item per replay; a list, an array, a
            tensor, or anything else that yields integers.
        max_graphs: how many budgets at most.

    Returns:
        Ascending budgets; the largest is the largest count.

    Raises:
        ValueError: no counts, or a number that is not a positive integer.
    """
    most = positive("max_graphs", max_graphs)
    counts = positives("token_counts", "token count", token_counts)
    if not counts:
        raise ValueError("token_counts is empty: pass the output tokens of the items you saw")
    return _least_padding(sorted(Counter(counts).items()), most)


def positive(name: str, value: Any) -> int:
    """Return the integer in ``value``, which may be NumPy's or torch's.

    Raises:
        ValueError: it is not a positive integer of at most 32 bits.
    """
    number = value if type(value) is int else _index(value)
    if number < 1:
        raise ValueError(f"{name}={value!r}: must be a positive integer")
    if number > MOST:
        raise ValueError(f"{name}={value!r}: must be at most {MOST}, offsets are 32-bit integers")
    return number


def _index(value: Any) -> int:
    """Return the integer in ``value``; 0 for a float, a string, a truth value or an array."""
    shape: Any = getattr(value, "shape", ())
    if shape or "bool" in str(getattr(value, "dtype", type(value))):
        return 0
    try:
        return operator.index(value)
    except TypeError:
        return 0


def positives(names: str, name: str, values: Any) -> list[int]:
    """Return the positive integers in ``values``.

    Raises:
        ValueError: a lone number instead of a list, or an entry that is no positive integer.
    """
    try:
        listed = [values] if isinstance(values, (str, bytes)) else list(values)
    except TypeError as error:
        raise ValueError(f"{names}={values!r}: must be a list: write [{values}]") from error
    return [positive(name, value) for value in listed]


def _round_numbers(low: int, high: int) -> list[int]:
    """Return ``low``, ``high``, and every number between that has few significant bits."""
    numbers, number = [], low
    while number < high:
        numbers.append(number)
        step = 1 << max(number.bit_length() - SIGNIFICANT_BITS, 0)
        number = (number // step + 1) * step
    return [*numbers, high]


def _commonness(below: int, size: int, low: int, high: int) -> float:
    """Return how many sizes fall on ``size`` when ``below`` is the next smaller one."""
    place = math.log(size / low) / math.log(high / low)
    return math.log(size / below) * (2 - ((place - COMMONEST) / (1 - COMMONEST)) ** 2)


def _least_padding(tally: Sequence[tuple[int, float]], most: int) -> list[int]:
    """Return the budgets with the least sum of (budget - size) times weight.

    Args:
        tally: ascending sizes with their weights.
        most: how many budgets at most.
    """
    sizes = [size for size, _ in tally]
    if len(sizes) <= most:
        return sizes
    weights, tokens = [0.0], [0.0]  # sums over the sizes below each place
    for size, weight in tally:
        weights.append(weights[-1] + weight)
        tokens.append(tokens[-1] + weight * size)

    def padding(first: int, last: int) -> float:
        """Return the tokens added when sizes ``first..last`` all use the budget ``sizes[last]``."""
        return sizes[last] * (weights[last + 1] - weights[first]) - (
            tokens[last + 1] - tokens[first]
        )

    best = [padding(0, last) for last in range(len(sizes))]
    choices: list[list[int]] = []
    for _ in range(most - 1):
        best, choice = _one_more(best, padding)
        choices.append(choice)
    budgets, last = [], len(sizes) - 1
    for choice in reversed(choices):
        budgets.append(sizes[last])
        last = choice[last] - 1
        if last < 0:
            return budgets[::-1]
    return [*budgets, sizes[last]][::-1]


def _one_more(
    previous: list[float], padding: Callable[[int, int], float]
) -> tuple[list[float], list[int]]:
    """Return the least padding with one more budget for each last size, and where that one starts.

    The best start moves right as the last size does (padding satisfies the quadrangle inequality),
    so each half of the sizes needs only its own part of the starts.
    """
    count = len(previous)
    row, choice = list(previous), [0] * count
    stack = [(0, count - 1, 0, count - 1)]
    while stack:
        low, high, first, final = stack.pop()
        if low > high:
            continue
        middle = (low + high) // 2
        best, start = padding(0, middle), 0
        for split in range(max(first, 1), min(final, middle) + 1):
            cost = previous[split - 1] + padding(split, middle)
            if cost < best:
                best, start = cost, split
        row[middle], choice[middle] = best, start
        stack.append((low, middle - 1, first, start))
        stack.append((middle + 1, high, start, final))
    return row, choice
