"""Images of several turns of a stream's threads, resized together on the encoder's device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..inputs.staging import PlannedImage, split_planned, stage_planned
from .device import DeviceQueue
from .item_errors import FAILURES, kept
from .stream_item import StreamItem

MOST_BYTES = 1 << 26
"""The most bytes of images that are resized at once, if it is not one image; and the most that a
thread takes in a turn."""
_ENOUGH, _ENOUGH_BYTES = 16, 1 << 24
"""So many images, or so many bytes, are resized at once without waiting for more. If more waited,
the consumer would have to resize them."""


class WaitingImages(NamedTuple):
    """Images that wait to be resized with others."""

    items: Sequence[StreamItem]
    planned: Sequence[PlannedImage]
    """How each is resized."""
    pixels: Sequence[Tensor]
    """The bytes of the images, of one or of several after each other in a tensor."""

    @property
    def nbytes(self) -> int:
        """The bytes of all of the images."""
        return sum(one.nbytes for one in self.pixels)

    def split(self) -> Iterator[WaitingImages]:
        """Yield each of the images alone."""
        parts = split_planned(self.pixels, self.planned)
        for item, one, pixels in zip(self.items, self.planned, parts, strict=True):
            yield WaitingImages([item], [one], [pixels])


class GroupResizer:
    """Resizes the images that the threads of a stream have decoded, many at once.

    Args:
        queue: the queue of the stream's device, on which images are resized.
        keep: whether errors become results, and lose their tracebacks.
    """

    def __init__(self, queue: DeviceQueue, keep: bool) -> None:
        self._queue, self._keep = queue, keep
        self._waiting: list[WaitingImages] = []
        """The images that wait to be resized, guarded by ``_adding``."""
        self._failure: Exception | None = None
        """The error, no item's own, that ended a thread while it resized images of several turns;
        guarded by ``_resizing``."""
        self._adding, self._resizing = threading.Lock(), threading.Lock()

    def add(self, images: WaitingImages) -> None:
        """Keep images until enough of them wait, and then resize all."""
        with self._adding:
            self._waiting.append(images)
            is_enough = (
                sum(one.nbytes for one in self._waiting) >= _ENOUGH_BYTES
                or sum(len(one.items) for one in self._waiting) >= _ENOUGH
            )
        # If another thread is resizing, this one goes on: some later call will find the images.
        if is_enough and self._resizing.acquire(blocking=False):
            try:
                self._resize_all()
            finally:
                self._resizing.release()

    def resize_waiting(self) -> None:
        """Resize all images that wait; when this returns, no thread is resizing any."""
        with self._resizing:
            self._resize_all()

    def _resize_all(self) -> None:
        """Resize all images that wait at once, or ``MOST_BYTES`` at a time."""
        if self._failure is not None:
            raise self._failure
        with self._adding:
            waiting, self._waiting = self._waiting, []
        start = size = 0
        try:
            for stop, images in enumerate(waiting, 1):
                size += images.nbytes
                if size >= MOST_BYTES or stop == len(waiting):
                    with self._queue.staging():
                        self._resize(waiting[start:stop])
                    start, size = stop, 0
        except Exception as error:
            self._failure = error
            raise

    def _resize(self, waiting: Sequence[WaitingImages]) -> None:
        """Resize images at once; if that fails, one by one."""
        try:
            self._stage(waiting)
        except torch.AcceleratorError:
            raise  # a CUDA device does not recover from this error
        except FAILURES:
            for image in chain.from_iterable(images.split() for images in waiting):
                try:
                    self._stage([image])
                except FAILURES as error:
                    image.items[0].value = kept(error, self._keep)

    def _stage(self, waiting: Sequence[WaitingImages]) -> None:
        plans = [plan for images in waiting for plan in images.planned]
        pixels = [part for images in waiting for part in images.pixels]
        staged = iter(stage_planned(pixels, plans, self._queue.device))
        mark = self._queue.mark_staged()
        for images in waiting:
            for item in images.items:
                # In this order, as the consumer goes on when it sees the pixels.
                item.staged, item.inputs = mark, next(staged)
