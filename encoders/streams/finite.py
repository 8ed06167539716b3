"""Whether results are finite, which is checked where vectors are made.

A NaN or an infinity in one vector makes the mean of all vectors NaN, and with it every search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

NOT_FINITE = (
    "has features that are NaN or infinite: a number in the encoder is too large for its dtype, or "
    "a weight is NaN; load the encoder in bfloat16 or float32 (dtype=, --dtype)"
)
"""The error text for an item whose result is not finite."""


def finite_flags(results: Sequence[object]) -> Tensor:
    """Return for each result whether all of its numbers are finite, without waiting for the device.

    Args:
        results: vectors [D] of one width, or whole outputs.

    Returns:
        bool [results], on the device of the results.
    """
    vectors = [result for result in results if isinstance(result, Tensor)]
    if not results:
        return torch.ones(0, dtype=torch.bool, device="cpu")
    if len(vectors) == len(results):
        return torch.stack(vectors).isfinite().all(1)
    rows = [[part.isfinite().all() for part in tensors_of(result)] for result in results]
    return torch.stack([torch.stack(flags).all() for flags in rows])


def require_finite(vectors: Tensor) -> None:
    """Check that vectors [items, D] are finite, which waits for the device.

    Raises:
        ValueError: a vector has a NaN or an infinity; the message has the number of its item.
    """
    flags = vectors.isfinite().all(1).tolist() if len(vectors) else []  # no list of a meta tensor
    for number, is_finite in enumerate(flags):
        if not is_finite:
            raise ValueError(f"item {number}: {NOT_FINITE}")


def tensors_of(result: object) -> Iterator[Tensor]:
    """Yield the tensors of a result: the vector itself, or all tensors in an output."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | Mapping):
        for part in result.values() if isinstance(result, Mapping) else result:
            yield from tensors_of(part)
