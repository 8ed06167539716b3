"""Turn the items of an iterable into results, in order and in bounded memory.

Threads prepare the items, and the consumer's own thread encodes batches of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence, Sized
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from math import inf
from operator import length_hint
from typing import Literal, NamedTuple, TypeAlias, TypedDict, cast, get_args

import torch
from torch import Tensor

from ..data import EncoderOutput, Grid, Limits, PartialOutput, VisionInputs
from ..grids import read_grid
from ..inputs.clips import read_item
from ..inputs.exact_resize import is_exact_on
from ..inputs.gpu_decoding import (
    MOST_FILES,
    Decode,
    DeviceImage,
    active_decoder,
    check_decode,
    decoding,
)
from ..inputs.image_files import NO_RUN, JpegRun, Readable, decode_jpegs, may_be_jpeg
from ..inputs.images import (
    PlannedImage,
    StagedItem,
    StagedPreprocessor,
    hold_to_resize,
    split_planned,
    stage_planned,
)
from ..inputs.intake import (
    KEY_IS_IMAGE,
    AnyArray,
    ImageLike,
    ItemLike,
    VideoLike,
    is_array,
    is_one_item,
    is_pixels,
    read_array,
    read_rows,
    to_rows,
)
from ..layers.torch_internals import copies_of
from .calls import EitherItemEncoder, MakeInputs, ResultSettings, join_inputs
from .collecting import Arrays, Collect, Collected, EncodedItem
from .device import DeviceQueue
from .finite import NOT_FINITE, finite_flags, tensors_of
from .item_errors import (
    FAILURES,
    ItemError,
    advising_limit,
    raise_if_not_the_items,
    without_item_name,
    without_traceback,
)
from .pooling import VectorPool
from .prefetch import Prefetch
from .progress import Progress

BATCHES_AHEAD, STAGED_AHEAD = 4, 8
"""The number of batches that are prepared ahead of the results that were yielded, and where pixels
are kept as uint8 on a GPU, a quarter of the bytes of float32 or less."""
OnError: TypeAlias = Literal["raise", "keep"]
"""Whether a bad item stops a stream with its error, or an :class:`ItemError` is its result."""
Encoded: TypeAlias = EncoderOutput | PartialOutput | Tensor
"""An item that was encoded: its whole output, or a vector [D]."""
_FAILED_TOKENS = 64
"""The tokens that an item which could not be prepared counts as, so that batches stay bounded."""


_KNOWN_SIZES = 4096
"""The most sizes of images whose plans a stream keeps."""
_TOGETHER, _BYTES = 32, 1 << 25
"""A thread takes so many arrays, or so many bytes of images, at once, and half as many images are
resized at once without waiting for more. Fewer would make threads wait for each other more often;
if more waited, the consumer would have to resize them."""
_FILES = (str, os.PathLike, bytes, Readable)
"""The items of which a thread takes several at once for a GPU to decode."""
_DECODED_TOGETHER, _FEW_FILES = 8, 128
"""A thread takes so many JPEG files at once for the CPU to decode, after the first ones: of a few
files, each thread takes one."""
_IN_HAND = 0.4
"""The part of what may be read ahead that files in the hands of all threads make at most. The rest
is in a batch, or waits for a batch or for an earlier file; with more, some threads had no file."""


class ItemResult(NamedTuple):
    """The result of one item of a stream, with the item's number, key and layout."""

    number: int
    """Number of the item, from 0."""
    key: object
    value: Encoded | Arrays | ItemError
    """The whole output, a vector [D], or the error if the item failed; arrays on the host if the
    stream has ``collect``."""
    grid: Grid | None
    """The grid (t, h, w) of the item, None if it could not be prepared."""
    layout: VisionInputs | None
    """The grids and tiles of the item without its pixels; None if it could not be prepared."""
    paired: bool
    """Whether the item came as a pair of key and item."""


class StreamOptions(NamedTuple):
    """The options of a stream: tokens per batch, workers, errors and the progress shown."""

    batch_tokens: int | None = None
    workers: int | None = None
    progress: bool = True
    on_error: OnError = "raise"
    total: int | None = None
    """The number of items for the progress; None takes ``len(items)`` if it is known."""
    per_line: int | None = None
    """The number of items per line of the progress in a log, see :class:`Progress`."""
    decode: Decode = "cpu"
    """Where JPEG files are decoded: "cpu", or "gpu" for the encoder's CUDA device."""
    collect: Collect | None = None
    """Makes arrays on the host of the results of each batch; None leaves them on the device."""


class StreamKeywords(TypedDict, total=False):
    """The keywords of ``encode_many`` except ``on_error``, for its overloads."""

    batch_tokens: int | None
    workers: int | None
    progress: bool
    decode: Decode
    max_tokens_per_call: int | None
    min_pixels: int | None
    max_pixels: int | None
    max_tiles: int | None
    max_soft_tokens: int | None
    fps: float | None
    num_frames: int | None


class VectorKeywords(StreamKeywords, total=False):
    """The keywords of ``embed_many`` except ``on_error``, for its overloads."""

    pool: VectorPool
    normalize: bool


def stream_items(
    item_encoder: EitherItemEncoder,
    items: Iterable[ItemLike | tuple[object, ItemLike]],
    limits: Limits,
    settings: ResultSettings,
    options: StreamOptions,
) -> Generator[ItemResult, None, None]:
    """Encode items in order, in batches of tokens, with bounded memory.

    Args:
        item_encoder: the object that calls the encoder, one function per input path.
        items: images, clips, or pairs of a key and one of these.
        limits: keywords of ``preprocess`` that bound the sizes of items.
        settings: whole outputs or vectors, and the most output tokens per call.
        options: tokens per batch, workers, errors and progress.

    Returns:
        A generator of one :class:`ItemResult` per item.

    Raises:
        ValueError: wrong arguments; while iterating, a bad item or one whose features are not
            finite, unless ``on_error`` is "keep".
    """
    item_encoder.check(settings)
    if options.on_error not in get_args(OnError):
        raise ValueError(f"on_error={options.on_error!r}: must be 'raise' or 'keep'")
    check_decode(options.decode, item_encoder.device)
    tokens, workers, total = options.batch_tokens, options.workers, options.total
    if tokens is None:
        tokens = 1024 if item_encoder.device.type == "cpu" else 8192
    if workers is None:
        workers = min(os.cpu_count() or 1, 16)
    for name, value in (("batch_tokens", tokens), ("workers", workers)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive integer, or None")
    try:
        if is_one_item(items):
            raise TypeError("its letters, bytes or rows are not items")
        iterator = iter(items)
    except TypeError:
        raise ValueError(
            f"items is one {type(items).__name__}: pass an iterable of items, [item] for one; for "
            "the images of a folder, sorted(Path(folder).rglob('*.jpg'))"
        ) from None
    # Without items, this raises for wrong keywords at once, before an item gets the blame.
    item_encoder.preprocess((), (), limits)
    if total is None and isinstance(items, Sized):
        total = length_hint(items)  # a loader of an iterable dataset is Sized, and has no len()
    keep = options.on_error == "keep"
    stream = _Stream(item_encoder, limits, settings, tokens, keep, options)
    return stream.results(iterator, workers, Progress(total, options.progress, options.per_line))


def as_given(results: Generator[ItemResult, None, None]) -> Iterator[object]:
    """Yield the value of each result, or (key, value) if the item came with a key and succeeded."""
    with closing(results):
        for result in results:
            plain = not result.paired or isinstance(result.value, ItemError)
            yield result.value if plain else (result.key, result.value)


class _Known(NamedTuple):
    """What is the same for all images of a size."""

    planned: PlannedImage | None
    """How they are resized with others; None if they are staged alone."""
    layout: VisionInputs
    grid: Grid
    tokens: int


@dataclass(slots=True)
class _StreamItem:
    """One item of a stream, from its preprocessing to its result."""

    index: int
    key: object
    paired: bool
    tokens: int = _FAILED_TOKENS
    known: _Known | None = None
    """What is the same for all images of its size; None if it could not be prepared."""
    inputs: VisionInputs | StagedItem | None = None
    """The pixels; None before they are resized, and after the device has encoded them."""
    staged: torch.cuda.Event | None = None
    """The CUDA event after which the pixels of a staged item may be read; None on the CPU."""
    value: Encoded | Arrays | Exception | None = None
    """The result of the item, or its exception; None before the item is encoded."""


class _Planned(NamedTuple):
    """Images that wait to be resized with others."""

    items: Sequence[_StreamItem]
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


class _Fetched(NamedTuple):
    """Items whose results are copied to the host, and what is made of the copies."""

    items: list[_StreamItem]
    collected: Collected
    host: dict[str, Tensor]


class _Embedded(NamedTuple):
    """Items whose results are vectors, [items, D]."""

    items: list[_StreamItem]
    vectors: Tensor


class _Started(NamedTuple):
    """A batch that is being encoded, or that the device has yet to encode."""

    items: list[_StreamItem]
    encoded: list[_StreamItem]
    """The items that have results on the device and no errors."""
    finite: Tensor
    """bool [encoded]: whether all numbers of the result of each are finite."""
    parts: list[_Fetched | _Embedded]
    """The items whose results are copied to the host or are vectors; none of whole outputs that
    stay on the device, which are values of their items already."""
    mark: torch.cuda.Event | None
    """The CUDA event that comes after the work of the batch; None on the CPU."""


class _Stream:
    """One pass over a stream of items; with ``keep``, errors become results."""

    def __init__(
        self,
        item_encoder: EitherItemEncoder,
        limits: Limits,
        settings: ResultSettings,
        batch_tokens: int,
        keep: bool,
        options: StreamOptions,
    ) -> None:
        self.item_encoder, self.limits, self.settings = item_encoder, limits, settings
        self.batch_tokens, self.keep, self.decode = batch_tokens, keep, options.decode
        self.collect = options.collect
        self.queue = DeviceQueue(item_encoder.device)
        self.stager = item_encoder.stager if self.queue.stages else None
        device = item_encoder.device
        self.resizes = self.stager is not None and (device.type == "cpu" or is_exact_on(device))
        """Whether images that the CPU has decoded are resized in groups, on the device."""
        self.planned: list[_Planned] = []
        """The images that wait to be resized with others, guarded by ``turn``."""
        self.planned_count = self.planned_bytes = 0
        self.known: dict[tuple[int, ...], _Known] = {}
        """What is known of the sizes [H, W, 3] of images seen so far."""
        self.taken_count = self.resized_count = self.resized_bytes = self.resized_tokens = 0
        """The items that threads have taken, and the images that waited to be resized so far."""
        self.turn_tokens = 1.0
        """The most tokens of JPEG files that a thread takes at once for the CPU to decode."""
        self.turn, self.resizing = threading.Lock(), threading.Lock()
        """Locks: of the images that wait, and of the thread that resizes them."""
        self.seconds = {"decoding": 0.0, "encoding": 0.0, "the consumer": 0.0}
        """The seconds that the stream spent waiting for each of these three."""
        self.tokens, self.start_time = 0, 0.0

    def results(
        self, items: Iterator[object], workers: int, progress: Progress
    ) -> Generator[ItemResult, None, None]:
        """Yield one result per item, in order; the generator ends its ``workers`` threads."""
        self.queue.begin()
        ahead = BATCHES_AHEAD if self.stager is None else STAGED_AHEAD
        limit = ahead * self.batch_tokens
        self.turn_tokens = _IN_HAND * limit / workers
        with (
            Prefetch(
                items, self._prepare, share=self._share, limit=limit, workers=workers
            ) as prefetch,
            progress,
        ):
            self.start_time = time.perf_counter()
            started: deque[_Started] = deque()
            for batch in self._batches(prefetch):
                started.append(self._start(batch))
                if len(started) > self.queue.ahead:
                    yield from self._finish(started.popleft(), prefetch, progress)
            self.item_encoder.agree(lambda: "no more batches")
            while started:
                yield from self._finish(started.popleft(), prefetch, progress)
            prefetch.check()

    def _share(self, given: object) -> float:
        """Return the part of a thread's turn that an item fills.

        Arrays are copied in no time, and a GPU decodes files fastest together.
        """
        _, item, _ = _unpaired(given)
        self.taken_count += 1
        mean = self.resized_bytes / self.resized_count / _BYTES if self.resized_count else 0.0
        if self.decode == "gpu" and isinstance(item, _FILES):
            return max(mean, 1 / _TOGETHER) if mean else 1 / MOST_FILES
        if self.stager is None:
            return 1.0
        if is_array(item):
            return max(item.nbytes / _BYTES, 1 / _TOGETHER)
        if self.taken_count <= _FEW_FILES or not mean or not may_be_jpeg(item):
            return 1.0
        tokens = self.resized_tokens / self.resized_count / self.turn_tokens
        return max(mean, tokens, 1 / _DECODED_TOGETHER)

    def _prepare(self, number: int, given: Sequence[object]) -> list[tuple[_StreamItem, int]]:
        """Decode and preprocess items in a worker thread.

        ``number`` is that of the first one, and ``given`` are items or pairs (key, item). Returns
        the items with their inputs or errors, and their numbers of tokens.
        """
        items = list[_StreamItem]()
        waiting: dict[bool, list[tuple[_StreamItem, Tensor | AnyArray]]] = {True: [], False: []}
        size = 0
        with decoding(self.decode, self.item_encoder.device):
            unpaired = [_unpaired(one) for one in given]
            decoded, run = self._decoded([plain for _, plain, _ in unpaired])
            for (key, _, is_paired), plain in zip(unpaired, decoded, strict=True):
                item = _StreamItem(number + len(items), key, is_paired)
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
        numbers = [number for number, item in enumerate(given) if isinstance(item, _FILES)]
        with self.queue.staging():
            images = decoder.decode_files([given[number] for number in numbers])
        made = list(given)
        for number, image in zip(numbers, images, strict=True):
            made[number] = image
        return made, NO_RUN

    def _read(self, item: _StreamItem, given: object) -> Tensor | AnyArray | None:
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
            # Reading an item runs the user's code (a member of a zip file, a lazy data set, a
            # store), which may raise any class; other items may still be good.
            item.value = without_item_name(self._kept(error))
        return None

    def _kept(self, error: Exception) -> Exception:
        """Return the error of an item, without its traceback if it becomes a result."""
        return without_traceback(error) if self.keep else error

    def _hold(
        self, item: _StreamItem, images: Sequence[ImageLike], videos: Sequence[VideoLike]
    ) -> None:
        """Preprocess an item, and keep its pixels where they can be sent to the device."""
        inputs = self.item_encoder.preprocess(images, videos, self.limits)
        item.inputs = inputs.with_pixels(self.queue.hold)
        self._describe(item, self._measured(inputs.with_pixels(lambda x: x.new_empty(0))))

    def _measured(self, layout: VisionInputs, planned: PlannedImage | None = None) -> _Known:
        """Return a layout with the grid and the tokens that it says."""
        tokens = self.item_encoder.tokens(layout)
        return _Known(planned, layout, read_grid(layout.grid_thw)[0], tokens)

    def _describe(self, item: _StreamItem, known: _Known) -> None:
        item.known, item.tokens = known, known.tokens

    def _stage(
        self,
        item: _StreamItem,
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

    def _known(self, rows: Tensor | AnyArray, stager: StagedPreprocessor) -> _Known | None:
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
        self, images: Sequence[tuple[_StreamItem, Tensor | AnyArray]], run: JpegRun
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
                item.value = self._kept(error)
            return
        with self.turn:
            self.planned.append(waiting)
            self.planned_count += len(items)
            self.planned_bytes += waiting.nbytes
            self.resized_count += len(items)
            self.resized_bytes += waiting.nbytes
            self.resized_tokens += sum(item.tokens for item in items)
            is_enough = self.planned_bytes >= _BYTES / 2 or self.planned_count >= _TOGETHER / 2
        # If another thread is resizing, this one goes on: some later call will find the images.
        if is_enough and self.resizing.acquire(blocking=False):
            try:
                self._resize_waiting()
            finally:
                self.resizing.release()

    def _resize_planned(self) -> None:
        """Resize all images that wait; when this returns, no thread is resizing any."""
        with self.resizing:
            self._resize_waiting()

    def _resize_waiting(self) -> None:
        """Resize all images that wait at once, or ``_BYTES`` at a time."""
        with self.turn:
            planned, self.planned = self.planned, []
            self.planned_count = self.planned_bytes = 0
        start = size = 0
        for stop, images in enumerate(planned, 1):
            size += images.nbytes
            if size >= _BYTES or stop == len(planned):
                with self.queue.staging():
                    self._resize(planned[start:stop])
                start, size = stop, 0

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
                    image.items[0].value = self._kept(error)

    def _stage_planned(self, planned: Sequence[_Planned]) -> None:
        plans = [plan for images in planned for plan in images.planned]
        pixels = [part for images in planned for part in images.pixels]
        staged = iter(stage_planned(pixels, plans, self.item_encoder.device))
        mark = self.queue.mark_staged()
        for images in planned:
            for item in images.items:
                # In this order, as the consumer goes on when it sees the pixels.
                item.staged, item.inputs = mark, next(staged)

    def _batches(self, items: Iterable[_StreamItem]) -> Iterator[list[_StreamItem]]:
        """Yield batches of consecutive items with at most ``batch_tokens`` tokens; a larger item is
        a batch alone."""
        batch: list[_StreamItem] = []
        tokens = 0
        for item in items:
            if batch and tokens + item.tokens > self.batch_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(item)
            tokens += item.tokens
        if batch:
            yield batch

    def _start(self, batch: list[_StreamItem]) -> _Started:
        """Encode a batch; on a GPU, only queue its work."""
        start_time = time.perf_counter()
        if any(item.inputs is None and item.value is None for item in batch):
            self._resize_planned()
        self.item_encoder.agree(lambda: _facts(batch))
        with torch.no_grad(), self.queue.running():
            parts = self._encode([item for item in batch if item.inputs is not None])
            encoded, finite = self._finite(batch, parts)
        self.seconds["encoding"] += time.perf_counter() - start_time
        mark = self.queue.mark(fetched=any(isinstance(part, _Fetched) for part in parts))
        return _Started(batch, encoded, finite, parts, mark)

    def _finite(
        self, batch: Sequence[_StreamItem], parts: Sequence[_Fetched | _Embedded]
    ) -> tuple[list[_StreamItem], Tensor]:
        """Return the items with results on the device, and whether those of each are finite."""
        embedded = [part for part in parts if isinstance(part, _Embedded)]
        if embedded:
            norms = [torch.linalg.vector_norm(vectors, inf, dim=1) for _, vectors in embedded]
            return [item for part in embedded for item in part.items], torch.cat(norms) < inf
        encoded = [
            item
            for item in batch
            if item.value is not None and not isinstance(item.value, Exception)
        ]
        return encoded, finite_flags([item.value for item in encoded])

    def _encode(self, items: list[_StreamItem]) -> list[_Fetched | _Embedded]:
        """Encode items as one batch; if that fails and errors are kept, encode them one by one."""
        if not items:
            return []
        values: Sequence[Encoded | Exception | None] = [None] * len(items)
        parts: list[_Fetched | _Embedded] = []
        try:
            with advising_limit(
                lambda: sum(item.tokens for item in items), self.item_encoder.device
            ):
                inputs = self._inputs(items)
            if self.collect is not None:
                parts = [self._fetch(self.collect, items, inputs)]
            elif self.settings.pool != "none":
                parts = [_Embedded(items, self.item_encoder.embed(lambda: inputs, self.settings))]
            else:
                values = self._outputs(lambda: inputs)
        except torch.AcceleratorError:
            raise  # a CUDA device does not recover from this error
        except FAILURES as error:
            values = [self._kept(error)] * len(items)
        for item, value in zip(items, values, strict=True):
            item.value = value
        if self.keep and len(items) > 1 and isinstance(values[0], Exception):
            parts = [part for item in items for part in self._encode([item])]
            raise_if_not_the_items([item.value for item in items])
        return parts

    def _fetch(self, collect: Collect, items: list[_StreamItem], inputs: VisionInputs) -> _Fetched:
        """Encode items as one batch, and queue the copies of its results to the host."""
        values: Iterable[Encoded]
        if self.settings.pool == "none":
            values = self.item_encoder.views(inputs, self.settings.max_tokens_per_call)
        else:
            values = self.item_encoder.embed(lambda: inputs, self.settings)
        encoded = [
            EncodedItem(item.key, value, item.known.layout)
            for item, value in zip(items, values, strict=True)
            if item.known is not None  # it is not: these items have inputs
        ]
        collected = collect(encoded)
        return _Fetched(items, collected, self.queue.fetch(collected.tensors))

    def _outputs(self, make_inputs: MakeInputs) -> Sequence[Encoded]:
        """Return the whole outputs of items, each in its own memory."""
        outputs = self.item_encoder.encode(make_inputs, self.settings.max_tokens_per_call)
        # A wrapper may return views of its static buffers, which the next batch overwrites.
        return outputs if self.item_encoder.owns_results else [one.clone() for one in outputs]

    def _inputs(self, items: Sequence[_StreamItem]) -> VisionInputs:
        """Return the inputs of several items as one batch, on the device if that is a GPU."""
        staged_inputs = [item.inputs for item in items if isinstance(item.inputs, StagedItem)]
        plain = [item.inputs for item in items if isinstance(item.inputs, VisionInputs)]
        if self.stager is not None:
            self.queue.take({item.staged for item in items})
            return self.stager.finish(staged_inputs, self.item_encoder.pixel_dtype)
        rows = [path.pixel_values for inputs in plain for path in inputs.paths.values()]
        sent = iter(self.queue.send(rows))
        return join_inputs([inputs.with_pixels(lambda _: next(sent)) for inputs in plain])

    def _finish(
        self,
        started: _Started,
        prefetch: Prefetch[object, _StreamItem],
        progress: Progress,
    ) -> Iterator[ItemResult]:
        """Yield the results of a batch once the device has reached the event recorded after it."""
        start_time = time.perf_counter()
        batch, encoded, finite, parts, mark = started
        whole = [item.value for item in encoded if item.value is not None]
        results = [tensor for value in whole for tensor in tensors_of(value)]
        results += [part.vectors for part in parts if isinstance(part, _Embedded)]
        self.queue.wait(mark, results)
        for part in parts:
            for item, value in zip(part.items, _values_of(part), strict=True):
                item.value = value
        for item, is_finite in zip(encoded, finite.tolist(), strict=True):
            if not is_finite:
                item.value = ValueError(NOT_FINITE)
        ready_time = time.perf_counter()
        tokens = sum(item.tokens for item in batch)
        for item in batch:
            item.inputs = None  # the device has read them
            progress.update()
            yield self._result(item)
            item.value = None
        prefetch.release(tokens)
        self._count(tokens, ready_time - start_time, ready_time, prefetch, progress)

    def _result(self, item: _StreamItem) -> ItemResult:
        value: Encoded | Arrays | Exception | ItemError | None = item.value
        if isinstance(value, Exception):
            if self.keep:
                value = ItemError(item.index, item.key, value)
            elif isinstance(value, ValueError):
                name = f"item {item.index}" + (f" ({item.key})" if item.paired else "")
                raise ValueError(f"{name}: {value}") from value
            else:
                raise value
        assert value is not None  # set when its batch was encoded
        grid, layout = (item.known.grid, item.known.layout) if item.known else (None, None)
        return ItemResult(item.index, item.key, value, grid, layout, item.paired)

    def _count(
        self,
        tokens: int,
        device_seconds: float,
        ready_time: float,
        prefetch: Prefetch[object, _StreamItem],
        progress: Progress,
    ) -> None:
        """Write tokens per second, and what the stream waits for most, into the progress."""
        self.tokens += tokens
        self.seconds["decoding"] = prefetch.wait_seconds
        self.seconds["encoding"] += device_seconds
        self.seconds["the consumer"] += time.perf_counter() - ready_time
        rate = self.tokens / max(time.perf_counter() - self.start_time, 1e-9)
        slowest = max(self.seconds, key=self.seconds.__getitem__)
        progress.note = f"{rate:,.0f} tokens/s, waiting for {slowest}"


def _values_of(part: _Fetched | _Embedded) -> Sequence[Arrays | Exception | Tensor]:
    """Return the arrays of items, or their vectors, each in its own memory."""
    if isinstance(part, _Fetched):
        return part.collected.results(part.host)
    return copies_of(part.vectors.unbind())


def _as_tensor(rows: Tensor | AnyArray) -> Tensor:
    return rows if isinstance(rows, Tensor) else to_rows(rows)


def _unpaired(given: object) -> tuple[object, object, bool]:
    """Return the key of an item of a stream or None, the item, and whether it came with a key."""
    if isinstance(given, tuple) and len(given) == 2:
        return given[0], given[1], True
    return None, given, False


def _facts(batch: Sequence[_StreamItem]) -> str:
    """Return what processes that share a batch compare of it."""
    return repr([(item.index, item.tokens, type(item.value).__name__) for item in batch])
