"""Turn the items of an iterable into results, in order and in bounded memory.

Threads prepare the items, and the consumer's own thread encodes batches of them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence, Sized
from contextlib import closing
from math import inf
from operator import length_hint
from typing import Literal, NamedTuple, TypeAlias, TypedDict, get_args

import torch
from torch import Tensor

from ..data import EncoderOutput, Grid, Limits, PartialOutput, VisionInputs
from ..inputs.gpu_decoding import Decode, check_decode
from ..inputs.intake import ItemLike, is_one_item
from ..inputs.staging import StagedItem
from ..layers.torch_internals import copies_of
from .calls import EitherItemEncoder, MakeInputs, ResultSettings, join_inputs
from .collecting import Arrays, Collect, Collected, EncodedItem
from .device import DeviceQueue
from .finite import NOT_FINITE, finite_flags, tensors_of
from .item_errors import FAILURES, ItemError, advising_limit, kept, raise_if_not_the_items
from .pooling import VectorPool
from .prefetch import Prefetch
from .preparing import Preparer
from .progress import Progress
from .stream_item import Encoded, StreamItem

BATCHES_AHEAD, STAGED_AHEAD = 4, 8
"""The number of batches that are prepared ahead of the results that were yielded, and where pixels
are kept as uint8 on a GPU, a quarter of the bytes of float32 or less."""
OnError: TypeAlias = Literal["raise", "keep"]
"""Whether a bad item stops a stream with its error, or an :class:`ItemError` is its result."""


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
    stream = _Stream(item_encoder, limits, settings, tokens, workers, keep, options)
    return stream.results(iterator, Progress(total, options.progress, options.per_line))


def as_given(results: Generator[ItemResult, None, None]) -> Iterator[object]:
    """Yield the value of each result, or (key, value) if the item came with a key and succeeded."""
    with closing(results):
        for result in results:
            plain = not result.paired or isinstance(result.value, ItemError)
            yield result.value if plain else (result.key, result.value)


class _Fetched(NamedTuple):
    """Items whose results are copied to the host, and what is made of the copies."""

    items: list[StreamItem]
    collected: Collected
    host: dict[str, Tensor]


class _Embedded(NamedTuple):
    """Items whose results are vectors, [items, D]."""

    items: list[StreamItem]
    vectors: Tensor


class _Started(NamedTuple):
    """A batch that is being encoded, or that the device has yet to encode."""

    items: list[StreamItem]
    encoded: list[StreamItem]
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
        workers: int,
        keep: bool,
        options: StreamOptions,
    ) -> None:
        self.item_encoder, self.settings = item_encoder, settings
        self.batch_tokens, self.keep, self.collect = batch_tokens, keep, options.collect
        self.queue = DeviceQueue(item_encoder.device)
        stages = self.queue.stages and item_encoder.stager is not None
        self.limit = (STAGED_AHEAD if stages else BATCHES_AHEAD) * batch_tokens
        """The tokens that may be read ahead."""
        self.workers = workers
        self.preparer = Preparer(
            item_encoder,
            limits,
            options.decode,
            keep,
            self.queue,
            limit=self.limit,
            workers=workers,
        )
        self.seconds = {"decoding": 0.0, "encoding": 0.0, "the consumer": 0.0}
        """The seconds that the stream spent waiting for each of these three."""
        self.tokens, self.start_time = 0, 0.0

    def results(
        self, items: Iterator[object], progress: Progress
    ) -> Generator[ItemResult, None, None]:
        """Yield one result per item, in order; the generator ends its threads."""
        self.queue.begin()
        with (
            Prefetch(
                items,
                self.preparer.prepare,
                share=self.preparer.turns.share,
                limit=self.limit,
                workers=self.workers,
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

    def _batches(self, items: Iterable[StreamItem]) -> Iterator[list[StreamItem]]:
        """Yield batches of consecutive items with at most ``batch_tokens`` tokens; a larger item is
        a batch alone."""
        batch: list[StreamItem] = []
        tokens = 0
        for item in items:
            if batch and tokens + item.tokens > self.batch_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(item)
            tokens += item.tokens
        if batch:
            yield batch

    def _start(self, batch: list[StreamItem]) -> _Started:
        """Encode a batch; on a GPU, only queue its work."""
        start_time = time.perf_counter()
        if any(item.inputs is None and item.value is None for item in batch):
            self.preparer.resizer.resize_waiting()
        self.item_encoder.agree(lambda: _facts(batch))
        with torch.no_grad(), self.queue.running():
            parts = self._encode([item for item in batch if item.inputs is not None])
            encoded, finite = self._finite(batch, parts)
        self.seconds["encoding"] += time.perf_counter() - start_time
        mark = self.queue.mark(fetched=any(isinstance(part, _Fetched) for part in parts))
        return _Started(batch, encoded, finite, parts, mark)

    def _finite(
        self, batch: Sequence[StreamItem], parts: Sequence[_Fetched | _Embedded]
    ) -> tuple[list[StreamItem], Tensor]:
        """Return the items with results on the device, and whether those of each are finite."""
        embedded = [part for part in parts if isinstance(part, _Embedded)]
        if embedded:
            norms = [torch.linalg.vector_norm(vectors, inf, dim=1) for _, vectors in embedded]
            items = [item for part in embedded for item in part.items]
            return items, (norms[0] if len(norms) == 1 else torch.cat(norms)) < inf
        encoded = [
            item
            for item in batch
            if item.value is not None and not isinstance(item.value, Exception)
        ]
        return encoded, finite_flags([item.value for item in encoded])

    def _encode(self, items: list[StreamItem]) -> list[_Fetched | _Embedded]:
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
            values = [kept(error, self.keep)] * len(items)
        for item, value in zip(items, values, strict=True):
            item.value = value
        if self.keep and len(items) > 1 and isinstance(values[0], Exception):
            parts = [part for item in items for part in self._encode([item])]
            raise_if_not_the_items([item.value for item in items])
        return parts

    def _fetch(self, collect: Collect, items: list[StreamItem], inputs: VisionInputs) -> _Fetched:
        """Encode items as one batch, and queue the copies of its results to the host."""
        encoded: list[EncodedItem] | Tensor
        if self.settings.pool == "none":
            values: Iterable[EncoderOutput | PartialOutput] = self.item_encoder.views(
                inputs, self.settings.max_tokens_per_call
            )
            encoded = [
                EncodedItem(item.key, value, item.known.layout)
                for item, value in zip(items, values, strict=True)
                if item.known is not None  # it is not: these items have inputs
            ]
        else:
            encoded = self.item_encoder.embed(lambda: inputs, self.settings)
        collected = collect(encoded)
        return _Fetched(items, collected, self.queue.fetch(collected.tensors))

    def _outputs(self, make_inputs: MakeInputs) -> Sequence[Encoded]:
        """Return the whole outputs of items, each in its own memory."""
        outputs = self.item_encoder.encode(make_inputs, self.settings.max_tokens_per_call)
        # A wrapper may return views of its static buffers, which the next batch overwrites.
        return outputs if self.item_encoder.owns_results else [one.clone() for one in outputs]

    def _inputs(self, items: Sequence[StreamItem]) -> VisionInputs:
        """Return the inputs of several items as one batch, on the device if that is a GPU."""
        staged_inputs = [item.inputs for item in items if isinstance(item.inputs, StagedItem)]
        plain = [item.inputs for item in items if isinstance(item.inputs, VisionInputs)]
        if self.preparer.stager is not None:
            self.queue.take({item.staged for item in items})
            return self.preparer.stager.finish(staged_inputs, self.item_encoder.pixel_dtype)
        rows = [path.pixel_values for inputs in plain for path in inputs.paths.values()]
        sent = iter(self.queue.send(rows))
        return join_inputs([inputs.with_pixels(lambda _: next(sent)) for inputs in plain])

    def _finish(
        self,
        started: _Started,
        prefetch: Prefetch[object, StreamItem],
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
            result = self._result(item)
            progress.update()  # an item that raised is not done
            yield result
            del result
            item.value = None
        prefetch.release(tokens)
        self._count(tokens, ready_time - start_time, ready_time, prefetch, progress)

    def _result(self, item: StreamItem) -> ItemResult:
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
        prefetch: Prefetch[object, StreamItem],
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


def _facts(batch: Sequence[StreamItem]) -> str:
    """Return what processes that share a batch compare of it."""
    return repr([(item.index, item.tokens, type(item.value).__name__) for item in batch])
