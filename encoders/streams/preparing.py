"""Items of a stream are decoded and preprocessed by threads, several of them in one turn.

Where an encoder's pixels are made on its device, images of several turns are resized together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from torch import Tensor

from ..data import Limits, VisionInputs
from ..grids import read_grid
from ..inputs.clips import read_item
from ..inputs.exact_resize import is_exact_on
from ..inputs.gpu_decoding import Decode, DeviceImage, active_decoder, decoding
from ..inputs.image_files import NO_RUN, JpegRun, decode_jpegs
from ..inputs.intake import (
    KEY_IS_IMAGE,
    AnyArray,
    ImageLike,
    VideoLike,
    is_array,
    is_pixels,
    read_array,
    read_rows,
    to_rows,
)
from ..inputs.staging import PlannedImage, StagedPreprocessor, hold_to_resize
from .calls import EitherItemEncoder
from .device import DeviceQueue
from .group_resizing import MOST_BYTES, GroupResizer, WaitingImages
from .item_errors import FAILURES, kept, without_item_name
from .stream_item import Known, StreamItem, unpaired
from .turns import TurnSizes, is_file

_KNOWN_SIZES = 4096
"""The most sizes of images whose plans a stream keeps."""


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
        self.turns = TurnSizes(decode, self.resizes, limit, workers)
        self.resizer = GroupResizer(queue, keep)
        self.known: dict[tuple[int, ...], Known] = {}
        """What is known of the sizes [H, W, 3] of images seen so far."""

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
                if size >= MOST_BYTES or len(items) == len(given):  # larger images wait alone
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
        numbers = [number for number, item in enumerate(given) if is_file(item)]
        began = time.perf_counter()
        files = decoder.read_files([given[number] for number in numbers])
        self.turns.learn_reading(len(files), time.perf_counter() - began)
        with self.queue.staging():
            images = decoder.decode_read(files)
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
            item.value = without_item_name(kept(error, self.keep))
        return None

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
        except FAILURES as error:
            for item in items:
                item.value = kept(error, self.keep)
            return
        waiting = WaitingImages(items, plans, pixels)
        self.turns.learn(items, waiting.nbytes)
        self.resizer.add(waiting)


def _as_tensor(rows: Tensor | AnyArray) -> Tensor:
    return rows if isinstance(rows, Tensor) else to_rows(rows)
