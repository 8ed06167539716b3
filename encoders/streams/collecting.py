"""Results of a stream as arrays on the host: one copy per batch, while the device goes on.

A consumer that stores results would otherwise copy them item by item, and wait for each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor

from ..data import EncoderOutput, PartialOutput, VisionInputs

if TYPE_CHECKING:
    from ..data import Array

    Arrays: TypeAlias = dict[str, Array]
    """The result of one item as NumPy arrays by name."""
else:
    Arrays = dict


class EncodedItem(NamedTuple):
    """One item of a batch that was encoded on the device."""

    key: object
    """The key that came with the item, or None."""
    value: EncoderOutput | PartialOutput | Tensor
    """The whole output or the vector [D]; the next batch may overwrite it."""
    layout: VisionInputs
    """The grids and tiles of the item without its pixels."""


class Collected(NamedTuple):
    """What is copied to the host of a batch, and what is made of it there."""

    tensors: Mapping[str, Tensor]
    """Tensors of the whole batch, on the device."""
    results: Callable[[Mapping[str, Tensor]], Sequence[Arrays | Exception]]
    """Takes these tensors on the host; returns the arrays of each item, which may be views of them,
    or its error."""


Collect: TypeAlias = Callable[[Sequence[EncodedItem] | Tensor], Collected]
"""Queues operations on the items of a batch, or on their vectors [items, D], and does not wait for
the device."""
