"""One item on its way through a stream, and what is known of all images of its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..data import EncoderOutput, Grid, PartialOutput, VisionInputs
from ..inputs.staging import PlannedImage, StagedItem
from .collecting import Arrays

Encoded: TypeAlias = EncoderOutput | PartialOutput | Tensor
"""An item that was encoded: its whole output, or a vector [D]."""
_FAILED_TOKENS = 64
"""The tokens that an item which could not be prepared counts as, so that batches stay bounded."""


class Known(NamedTuple):
    """What is the same for all images of a size."""

    planned: PlannedImage | None
    """How they are resized with others; None if they are staged alone."""
    layout: VisionInputs
    grid: Grid
    tokens: int


@dataclass(slots=True)
class StreamItem:
    """One item of a stream, from its preprocessing to its result."""

    index: int
    key: object
    paired: bool
    tokens: int = _FAILED_TOKENS
    known: Known | None = None
    """What is the same for all images of its size; None if it could not be prepared."""
    inputs: VisionInputs | StagedItem | None = None
    """The pixels; None before they are resized, and after the device has encoded them."""
    staged: torch.cuda.Event | None = None
    """The CUDA event after which the pixels of a staged item may be read; None on the CPU."""
    value: Encoded | Arrays | Exception | None = None
    """The result of the item, or its exception; None before the item is encoded."""


def unpaired(given: object) -> tuple[object, object, bool]:
    """Return the key of an item of a stream or None, the item, and whether it came with a key."""
    if isinstance(given, tuple) and len(given) == 2:
        return given[0], given[1], True
    return None, given, False
