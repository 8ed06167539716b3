"""Items of a stream are decoded and preprocessed by threads, several of them in one turn.

Where an encoder's pixels are made on its device, images of several turns are resized together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..data import EncoderOutput, Grid, Limits, PartialOutput, VisionInputs
from ..grids import read_grid
from ..inputs.clips import read_item
from ..inputs.exact_resize import is_exact_on
from ..inputs.gpu_decoding import Decode, DeviceImage, active_decoder, decoding
from ..inputs.image_files import NO_RUN, JpegRun, decode_jpegs, may_be_jpeg
from ..inputs.intake import (
    KEY_IS_IMAGE,
    AnyArray,
    ImageLike,
    VideoLike,
    is_array,
    is_pixels,
    is_rgb_array,
    read_array,
    read_rows,
    to_rows,
)
from ..inputs.staging import (
    PlannedImage,
    StagedItem,
    StagedPreprocessor,
    hold_to_resize,
    split_planned,
    stage_planned,
)
from .calls import EitherItemEncoder
from .collecting import Arrays
from .device import DeviceQueue
from .item_errors import FAILURES, without_item_name, without_traceback

Encoded: TypeAlias = EncoderOutput | PartialOutput | Tensor
"""An item that was encoded: its whole output, or a vector [D]."""
_FAILED_TOKENS = 64
"""The tokens that an item which could not be prepared counts as, so that batches stay bounded."""
_KNOWN_SIZES = 4096
"""The most sizes of images whose plans a stream keeps."""
_BYTES = 1 << 26
"""The most bytes of images that a thread takes at once, and that are resized at once."""
_QUICK, _QUICK_PART = 64, 0.25
"""The most arrays, or files that a GPU decodes, that a thread takes at once, and the most that they
make of what may be read ahead. Fewer would make threads wait for each other more often."""
_UNKNOWN = 16
"""The most of them while no image was resized with others, so that their sizes are not known. None
ever is for towers that make several views of an image."""
_SLOW, _SLOW_PART = 8, 0.4
"""The most files that a thread takes at once if the CPU decodes them or if they are open files,
which may lie in a remote store, and the most that those in the hands of all threads make of what
may be read ahead. The rest is in a batch, or waits for a batch or for an earlier file; with more,
some threads had no file."""
_FEW_FILES = 128
"""A thread takes such files one by one until so many images were resized: of a few files, each
thread takes one."""
_ENOUGH, _ENOUGH_BYTES = 16, 1 << 24
"""So many images, or so many bytes, are resized at once without waiting for more. If more waited,
the consumer would have to resize them."""


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


class _Planned(NamedTuple):
    """Images that wait to be resized with others."""

    items: Sequence[StreamItem]
    planned: Sequence[PlannedImage]
    pixels: Sequence[Tensor]
    """The bytes of the images, of one or of several after each other in a tensor."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.pixels)

    def split(self) -> Iterator[_Planned]:
        """Yield each of the images alone."""
        parts = split_planned(self.pixels, self.planned)
        for item, one, pixels in zip(self.items, self.planned, parts, strict=True):
            yield _Planned([item], [one], [pixels])


class Preparer:
    """Prepares the items of one stream in the turns of its threads; errors become their values.

    Args:
        item_encoder: the object that calls the encoder.
        limits: keywords of ``preprocess`` that bound the sizes of items.
        decode: where JPEG files are decoded.
        keep: whether errors become results, and lose their tracebacks.
        queue: copies pixels to the encoder's device.
        limit: the tokens that may be read ahead.
        workers: the number of threads.
    """

    def __init__(
        self,
        item_encoder: EitherItemEncoder,
        limits: Limits,
        decode: Decode,
        keep: bool,
        queue: DeviceQueue,
        *,
        limit: int,
        workers: int,
    ) -> None:
        self.item_encoder, self.limits = item_encoder, limits
        self.decode, self.keep, self.queue = decode, keep, queue
        self.stager = item_encoder.stager if queue.stages else None
        device = item_encoder.device
        self.resizes = self.stager is not None and (device.type == "cpu" or is_exact_on(device))
        """Whether images that the CPU has decoded are resized in groups, on the device."""
        self.planned: list[_Planned] = []
        """The images that wait to be resized with others, guarded by ``turn``."""
        self.planned_count = self.planned_bytes = 0
        self.failure: Exception | None = None
        """The error, no item's own, that ended a thread while it resized images of several turns;
        guarded by ``resizing``."""
        self.known: dict[tuple[int, ...], Known] = {}
        """What is known of the sizes [H, W, 3] of images seen so far."""
        self.resized_count = self.resized_bytes = self.resized_tokens = 0
        """The images that waited to be resized so far, guarded by ``turn``."""
        self.quick_tokens, self.slow_tokens = _QUICK_PART * limit, _SLOW_PART * limit / workers
        """The most tokens of items that a thread takes at once: see ``_QUICK`` and ``_SLOW``."""
        self.turn, self.resizing = threading.Lock(), threading.Lock()
        """Locks: of the images that wait, and of the thread that resizes them."""

    def share(self, given: object) -> float:
        """Return the part of a thread's turn that an item fills.

        Arrays are copied in no time, and a GPU decodes files fastest together.
        """
        _, item, _ = unpaired(given)
        count = self.resized_count
        if (self.resizes and is_rgb_array(item)) or (self.decode == "gpu" and _is_at_hand(item)):
            most, most_tokens = _QUICK if count else _UNKNOWN, self.quick_tokens
        elif self.resizes and count > _FEW_FILES and may_be_jpeg(item):
            most, most_tokens = _SLOW, self.slow_tokens
        else:
            return 1.0
        nbytes = item.nbytes if is_rgb_array(item) else self.resized_bytes / max(count, 1)
        tokens = self.resized_tokens / max(count, 1)
        return max(nbytes / _BYTES, tokens / most_tokens, 1 / most)

    def prepare(self, number: int, given: Sequence[object]) -> list[tuple[StreamItem, int]]:
        """Decode and preprocess items in a worker thread.

        ``number`` is that of the first one, and ``given`` are items or pairs (key, item). Returns
        the items with their inputs or errors, and their numbers of tokens.
        """
        items = list[StreamItem]()
        waiting: dict[bool, list[tuple[StreamItem, Tensor | AnyArray]]] = {True: [], False: []}
        size = 0
        with decoding(self.decode, self.item_encoder.device):
            pairs = [unpaired(one) for one in given]
            decoded, run = self._decoded([plain for _, plain, _ in pairs])
            for (key, _, is_paired), plain in zip(pairs, decoded, strict=True):
                item = StreamItem(number + len(items), key, is_paired)
                items.append(item)
                image = self._read(item, plain)
                if image is not None:
                    waiting[isinstance(image, Tensor) and image.is_cuda].append((item, image))
                    size += image.nbytes
                if size >= _BYTES or len(items) == len(given):  # larger images wait alone
                    for images in filter(None, waiting.values()):
                        self._resize_later(images, run)
                        images.clear()
                    size = 0
        return [(item, item.tokens) for item in items]

    def _decoded(self, given: Sequence[object]) -> tuple[Sequence[object], JpegRun]:
        """Return items, with its pixels for each JPEG file that was decoded with others."""
        if (decoder := active_decoder()) is None:
            if not self.resizes or len(given) == 1:
                return given, NO_RUN
            try:
                return decode_jpegs(given)
            except Exception:  # noqa: BLE001  # of one item, or of memory: one by one, others fit
                return given, NO_RUN
        numbers = [number for number, item in enumerate(given) if _is_file(item)]
        with self.queue.staging():
            images = decoder.decode_files([given[number] for number in numbers])
        made = list(given)
        for number, image in zip(numbers, images, strict=True):
            made[number] = image
        return made, NO_RUN

    def _read(self, item: StreamItem, given: object) -> Tensor | AnyArray | None:
        """Decode and preprocess an item, or return the pixels [H, W, 3] of one to be resized."""
        try:
            if is_pixels(item.key):  # the error names the item without it
                item.key, item.paired = None, False
                raise ValueError(KEY_IS_IMAGE)
            images, videos = read_item(given)
            if self.stager is not None:
                return self._stage(item, self.stager, images, videos)
            self._hold(item, images, videos)
        except Exception as error:  # noqa: BLE001
            # Reading an item runs the user's code (a member of a zip file, a lazy dataset, a
            # store), which may raise any class; other items may still be good.
            item.value = without_item_name(self.kept(error))
        return None

    def kept(self, error: Exception) -> Exception:
        """Return the error of an item, without its traceback if it becomes a result."""
        return without_traceback(error) if self.keep else error

    def _hold(
        self, item: StreamItem, images: Sequence[ImageLike], videos: Sequence[VideoLike]
    ) -> None:
        """Preprocess an item, and keep its pixels where they can be sent to the device."""
        with self.queue.staging():  # the CUDA stream that waits for images that the GPU decoded
            inputs = self.item_encoder.preprocess(images, videos, self.limits)
        item.inputs = inputs.with_pixels(self.queue.hold)
        self._describe(item, self._measured(inputs.with_pixels(lambda x: x.new_empty(0))))

    def _measured(self, layout: VisionInputs, planned: PlannedImage | None = None) -> Known:
        """Return a layout with the grid and the tokens that it says."""
        tokens = self.item_encoder.tokens(layout)
        return Known(planned, layout, read_grid(layout.grid_thw)[0], tokens)

    def _describe(self, item: StreamItem, known: Known) -> None:
        item.known, item.tokens = known, known.tokens

    def _stage(
        self,
        item: StreamItem,
        stager: StagedPreprocessor,
        images: Sequence[ImageLike],
        videos: Sequence[VideoLike],
    ) -> Tensor | AnyArray | None:
        """Put the pixels of an item on the device, or return those of an image to be resized."""
        device = self.item_encoder.device
        if images:
            rows = self._decode(images[0])
            known = self._known(rows, stager)
            if known is not None:
                self._describe(item, known)
                return rows
            images = [cast("ImageLike", DeviceImage(_as_tensor(rows)))]
        with self.queue.staging():
            (staged,) = stager.stage(images, videos, self.limits, device)
            item.staged = self.queue.mark_staged()
        self._describe(item, self._measured(staged.layout(self.item_encoder.paths)))
        item.inputs = staged
        return None

    def _decode(self, image: ImageLike | DeviceImage) -> Tensor | AnyArray:
        """Return the pixels [H, W, 3] of an image, on the GPU if it was decoded there."""
        if isinstance(image, DeviceImage):
            return image.pixels
        if is_array(image):
            return read_array(image)
        if self.decode == "cpu":
            return read_rows([image])[0]
        with self.queue.staging():
            return read_rows([image])[0]

    def _known(self, rows: Tensor | AnyArray, stager: StagedPreprocessor) -> Known | None:
        """Return what is known of images of this one's size; None if each is staged alone."""
        if not self.resizes and not (isinstance(rows, Tensor) and rows.is_cuda):
            return None  # images are resized on the CPU
        known = self.known.get(rows.shape)
        if known is None:
            planned = stager.plan(_as_tensor(rows).permute(2, 0, 1), self.limits)
            if planned is None:
                return None
            known = self._measured(planned.layout(), planned)
            if len(self.known) >= _KNOWN_SIZES:
                self.known.clear()
            self.known[rows.shape] = known
        return known

    def _resize_later(
        self, images: Sequence[tuple[StreamItem, Tensor | AnyArray]], run: JpegRun
    ) -> None:
        """Keep images, all on one device, until enough of them wait to be resized at once.

        If they are the images of ``run``, they are not copied.
        """
        items, rows = [item for item, _ in images], [image for _, image in images]
        plans = [item.known.planned for item in items if item.known and item.known.planned]
        device = self.item_encoder.device
        try:
            pixels = [run.pixels] if run.has_just(rows) else hold_to_resize(rows, device)
            waiting = _Planned(items, plans, pixels)
        except FAILURES as error:
            for item in items:
                item.value = self.kept(error)
            return
        with self.turn:
            self.planned.append(waiting)
            self.planned_count += len(items)
            self.planned_bytes += waiting.nbytes
            self.resized_count += len(items)
            self.resized_bytes += waiting.nbytes
            self.resized_tokens += sum(item.tokens for item in items)
            is_enough = self.planned_bytes >= _ENOUGH_BYTES or self.planned_count >= _ENOUGH
        # If another thread is resizing, this one goes on: some later call will find the images.
        if is_enough and self.resizing.acquire(blocking=False):
            try:
                self._resize_all()
            finally:
                self.resizing.release()

    def resize_waiting(self) -> None:
        """Resize all images that wait; when this returns, no thread is resizing any."""
        with self.resizing:
            self._resize_all()

    def _resize_all(self) -> None:
        """Resize all images that wait at once, or ``_BYTES`` at a time."""
        if self.failure is not None:
            raise self.failure
        with self.turn:
            planned, self.planned = self.planned, []
            self.planned_count = self.planned_bytes = 0
        start = size = 0
        try:
            for stop, images in enumerate(planned, 1):
                size += images.nbytes
                if size >= _BYTES or stop == len(planned):
                    with self.queue.staging():
                        self._resize(planned[start:stop])
                    start, size = stop, 0
        except Exception as error:
            self.failure = error
            raise

    def _resize(self, planned: Sequence[_Planned]) -> None:
        """Resize images at once; if that fails, one by one."""
        try:
            self._stage_planned(planned)
        except torch.AcceleratorError:
            raise  # a CUDA device does not recover from this error
        except FAILURES:
            for image in chain.from_iterable(images.split() for images in planned):
                try:
                    self._stage_planned([image])
                except FAILURES as error:
                    image.items[0].value = self.kept(error)

    def _stage_planned(self, planned: Sequence[_Planned]) -> None:
        plans = [plan for images in planned for plan in images.planned]
        pixels = [part for images in planned for part in images.pixels]
        staged = iter(stage_planned(pixels, plans, self.item_encoder.device))
        mark = self.queue.mark_staged()
        for images in planned:
            for item in images.items:
                # In this order, as the consumer goes on when it sees the pixels.
                item.staged, item.inputs = mark, next(staged)


def _is_file(item: object) -> bool:
    """Return whether an item is a path, bytes or an open file, without running its own code."""
    is_open = callable(getattr(type(item), "read", None))
    return is_open or isinstance(item, str | os.PathLike | bytes)


def _is_at_hand(item: object) -> bool:
    """Return whether an item is a file that is read without waiting for a network, as a rule."""
    return isinstance(item, str | os.PathLike | bytes | BytesIO)


def _as_tensor(rows: Tensor | AnyArray) -> Tensor:
    return rows if isinstance(rows, Tensor) else to_rows(rows)


def unpaired(given: object) -> tuple[object, object, bool]:
    """Return the key of an item of a stream or None, the item, and whether it came with a key."""
    if isinstance(given, tuple) and len(given) == 2:
        return given[0], given[1], True
    return None, given, False
