"""The CUDA streams of streams of items, and others for captures.

torch has 32 CUDA streams per device, and ``torch.cuda.Stream`` returns them in turn. If a graph
were captured on one that a thread copies or resizes images on, the kernels of that thread would
become part of the graph: they would not run, and the images would be whatever lay in their memory.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import NamedTuple

import torch

_LOCK = threading.Lock()


class ItemStreams(NamedTuple):
    """The CUDA streams of all streams of items on a device."""

    copies: torch.cuda.Stream
    """For copies to the device, and for images that are resized there."""
    runs: torch.cuda.Stream
    """For batches."""
    returns: torch.cuda.Stream
    """For copies to the host."""


def item_streams(device: torch.device) -> ItemStreams:
    """Return the CUDA streams of streams of items, the same ones at every call.

    torch keeps freed memory, and 32 MiB for cuBLAS, for each CUDA stream that was ever used.

    Args:
        device: a CUDA device, with its number.
    """
    with _LOCK:
        return _made(device)


@cache
def _made(device: torch.device) -> ItemStreams:
    return ItemStreams(*(torch.cuda.Stream(device) for _ in ItemStreams._fields))


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream to capture on, which is none of :func:`item_streams`.

    Args:
        device: a CUDA device, with its number.
    """
    taken = item_streams(device)
    while (stream := torch.cuda.Stream(device)) in taken:
        pass
    return stream
