"""How many items a thread of a stream takes in one turn: many quick ones, or a few slow ones.

Threads wait for each other when they take items, so they take arrays, which are copied in no time,
64 at once. Of files that a thread decodes for milliseconds, the other threads need some, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from ..inputs.gpu_decoding import Decode
from ..inputs.image_files import may_be_jpeg
from ..inputs.intake import is_rgb_array
from .group_resizing import MOST_BYTES
from .stream_item import StreamItem, unpaired

_QUICK, _QUICK_PART = 64, 0.25
"""The most arrays, or files that a GPU decodes, that a thread takes at once, and the most that they
make of what may be read ahead. Fewer would make threads wait for each other more often."""
_UNKNOWN = 16
"""The most of them while no image was resized with others, so that their sizes are not known. None
ever is for towers that make several views of an image."""
_SLOW, _SLOW_PART = 8, 0.4
"""The most files that a thread takes at once if the CPU decodes them or if reading takes long, and
the most that those in the hands of all threads make of what may be read ahead. The rest is in a
batch, or waits for a batch or for an earlier file; with more, some threads had no file."""
_LONG = 1e-3
"""The seconds from which on reading a file takes long. In memory or in the system's cache a file is
read in a twentieth of that, and on a network's disk or in a remote store in a multiple."""
_FEW_FILES = 128
"""A thread takes such files one by one until so many images were resized: of a few files, each
thread takes one."""


class TurnSizes:
    """Chooses the items of a turn, by the mean size of the images that were seen so far.

    Args:
        decode: where JPEG files are decoded.
        resizes: whether images that the CPU has decoded are resized in groups.
        limit: the tokens that may be read ahead.
        workers: the number of threads.
    """

    def __init__(self, decode: Decode, resizes: bool, limit: int, workers: int) -> None:
        self._gpu_decodes, self._resizes = decode == "gpu", resizes
        self._quick_tokens, self._slow_tokens = _QUICK_PART * limit, _SLOW_PART * limit / workers
        self._count = self._bytes = self._tokens = 0
        self._lock = threading.Lock()
        self._reads_long = False
        """Whether the files that were read last, for a GPU to decode, took long."""

    def learn(self, items: Sequence[StreamItem], nbytes: int) -> None:
        """Count images that are to be resized; ``nbytes`` are those of their pixels."""
        tokens = sum(item.tokens for item in items)
        with self._lock:
            self._count += len(items)
            self._bytes += nbytes
            self._tokens += tokens

    def learn_reading(self, count: int, seconds: float) -> None:
        """Learn how long it took to read so many files for a GPU to decode."""
        if count:
            self._reads_long = seconds > count * _LONG

    def share(self, given: object) -> float:
        """Return the part of a thread's turn that an item, or a pair (key, item), fills."""
        _, item, _ = unpaired(given)
        count = self._count
        gpu_decodes = self._gpu_decodes and not self._reads_long and is_file(item)
        if gpu_decodes or (self._resizes and is_rgb_array(item)):
            most, most_tokens = _QUICK if count else _UNKNOWN, self._quick_tokens
        elif self._resizes and count > _FEW_FILES and may_be_jpeg(item):
            most, most_tokens = _SLOW, self._slow_tokens
        else:
            return 1.0
        nbytes = item.nbytes if is_rgb_array(item) else self._bytes / max(count, 1)
        tokens = self._tokens / max(count, 1)
        return max(nbytes / MOST_BYTES, tokens / most_tokens, 1 / most)


def is_file(item: object) -> bool:
    """Return whether an item is a path, bytes or an open file, without running its own code."""
    is_open = callable(getattr(type(item), "read", None))
    return is_open or isinstance(item, str | os.PathLike | bytes)
