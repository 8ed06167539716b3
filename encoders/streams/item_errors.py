"""The results of items that could not be encoded, and which errors an item is to blame for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

FAILURES = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    OSError,
    RuntimeError,
    MemoryError,
)
"""The exceptions that a bad item, such as a broken file, may raise while it is encoded."""


class ItemError(NamedTuple):
    """The result of an item that could not be encoded, from ``encode_many(on_error="keep")``."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    """Number of the item, from 0."""
    key: object
    """Key of the item, if it came as a pair (key, item); else None."""
    error: Exception
    """The exception, without its traceback, which would keep the pixels in memory."""


def without_traceback(error: Exception) -> Exception:
    """Drop the tracebacks of an error and of its causes, which would keep pixels in memory."""
    cause: BaseException | None = error
    cause_ids: set[int] = set()
    # `raise error from error` makes an error its own cause.
    while cause is not None and id(cause) not in cause_ids:
        cause_ids.add(id(cause))
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def kept(error: Exception, keep: bool) -> Exception:
    """Return the error of an item; without its traceback if it becomes a result (``keep``)."""
    return without_traceback(error) if keep else error


def without_item_name(error: Exception) -> Exception:
    """Drop "image 0: " or "video 0: " from an error, as the stream adds the item's real number."""
    if not isinstance(error, ValueError):
        return error
    message = str(error)
    return ValueError(message.removeprefix("image 0: ").removeprefix("video 0: "))


def raise_if_not_the_items(values: Sequence[object]) -> None:
    """Raise the first of a batch's values if all are RuntimeErrors and none is an out-of-memory.

    If every item fails, the encoder or the device is to blame, not the items.
    """
    errors = [value for value in values if isinstance(value, RuntimeError)]
    if len(errors) == len(values) and not any(map(is_out_of_memory, errors)):
        raise errors[0]


@contextmanager
def advising_limit(count: Callable[[], int], device: torch.device) -> Iterator[None]:
    """Advise to lower ``max_tokens_per_call`` if the ``with`` block runs out of memory.

    Args:
        count: returns the output tokens that the block encodes, half of which the message proposes
            as the limit.
        device: the device that the block runs on.

    Raises:
        torch.OutOfMemoryError: the device ran out of memory.
        MemoryError: the host ran out of memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        tokens = count()
        kind = torch.OutOfMemoryError if device.type != "cpu" else MemoryError
        raise kind(
            f"a call of {tokens:,} output tokens ran out of memory on {device}: pass "
            f"max_tokens_per_call={max(tokens // 2, 1)} or less to encode in more calls (an item "
            "is cut between its frames or tiles); one image that is too large needs a smaller "
            "max_pixels, pixels of a batch that do not fit need a smaller batch_tokens"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out.

    On the CPU, torch raises a plain RuntimeError, which is recognised by its message.
    """
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
