"""The methods ``encode``, ``embed``, ``encode_many`` and ``embed_many`` of all encoders.

Shapes: D width of a vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, overload

from torch import Tensor

from ..data import Limits, Output
from .finite import require_finite

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..inputs.gpu_decoding import Decode
    from ..inputs.intake import ImagesLike, ItemLike, VideosLike
    from .calls import ItemEncoder
    from .item_errors import ItemError
    from .pooling import VectorPool
    from .stream import OnError, StreamKeywords, VectorKeywords

Key = TypeVar("Key")


class EncodesItems(ABC, Generic[Output]):
    """Base class with the methods that run what ``item_encoder`` returns.

    ``encode`` and ``embed`` take a few items, ``encode_many`` and ``embed_many`` a stream.
    """

    @abstractmethod
    def item_encoder(self) -> ItemEncoder[Output]:
        """Return the object by which ``encode`` calls the encoder: a function per input path."""

    def _stream_encoder(self) -> ItemEncoder[Output]:
        """Return the object by which ``encode_many`` and ``embed_many`` encode their batches."""
        return self.item_encoder()

    def encode(
        self,
        images: ImagesLike = (),
        videos: VideosLike = (),
        *,
        max_tokens_per_call: int | None = None,
        decode: Decode = "cpu",
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> list[Output]:
        """Encode images and videos: one output per item, images first, then videos.

        All items run in one call unless ``max_tokens_per_call`` bounds it, so memory grows with
        their number; ``encode_many`` takes a stream of any length.

        Args:
            images, videos: as ``preprocess`` takes them.
            max_tokens_per_call: most output tokens per call of the encoder. A larger item is split
                between its segments (frames, tiles), which is exact; one segment alone may exceed
                the limit. None runs all items in one call.
            decode: "gpu" decodes JPEG files by nvImageCodec on the encoder's CUDA device, which
                needs the extra ``gpu-decode``; their pixels differ from PIL's by a level or so. The
                CPU decodes everything else.
            min_pixels, max_pixels, ..., num_frames: as ``preprocess`` takes them.

        Returns:
            One :class:`EncoderOutput` per item. Every output has its own memory, unless a graph
            wrapper was told to return views of its buffers. Whether its numbers are finite is not
            checked, because the check waits for the device.

        Raises:
            ValueError: ``preprocess`` or the encoder rejects an item.
            torch.OutOfMemoryError, MemoryError: memory ran out; the message names
                ``max_tokens_per_call``.
        """
        from ..inputs.gpu_decoding import decoding

        limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        item_encoder = self.item_encoder()
        make_inputs = partial(item_encoder.preprocess, images, videos, limits)
        with decoding(decode, item_encoder.device):
            return item_encoder.encode(make_inputs, max_tokens_per_call)

    def embed(
        self,
        images: ImagesLike = (),
        videos: VideosLike = (),
        *,
        pool: VectorPool = "mean",
        normalize: bool = False,
        max_tokens_per_call: int | None = None,
        decode: Decode = "cpu",
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> Tensor:
        """Encode images and videos to one vector each: images first, then videos.

        Args:
            images, videos: as ``preprocess`` takes them.
            pool: how an item becomes one vector. "mean" and "max" are taken over all rows of its
                ``pooler_output``. "cls" is its class token, averaged over the segments (tiles,
                frames). "head" is the vector that the checkpoint was trained to compare, such as
                SigLIP's. Few encoders have a class token or a head.
            normalize: divide each vector by its L2 norm.
            max_tokens_per_call, decode: as :meth:`encode` takes them.
            min_pixels, max_pixels, ..., num_frames: as ``preprocess`` takes them.

        Returns:
            [items, D] in float32, or in float64 where the encoder is float64; [0, D] for no items.

        Raises:
            ValueError: ``preprocess`` or the encoder rejects an item, the encoder cannot make this
                pool, or a vector has a NaN or an infinity; the message has the number of its item.
            torch.OutOfMemoryError, MemoryError: as :meth:`encode` raises it.
        """
        from ..inputs.gpu_decoding import decoding
        from .calls import ResultSettings

        settings = ResultSettings(pool, normalize, max_tokens_per_call)
        limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        item_encoder = self.item_encoder()
        make_inputs = partial(item_encoder.preprocess, images, videos, limits)
        with decoding(decode, item_encoder.device):
            vectors = item_encoder.embed(make_inputs, settings)
        require_finite(vectors)
        return vectors

    @overload
    def encode_many(  # type: ignore[overload-overlap]  # a tuple of two is (key, item)
        self,
        items: Iterable[tuple[Key, ItemLike]],
        *,
        on_error: Literal["raise"] = ...,
        **how: Unpack[StreamKeywords],
    ) -> Iterator[tuple[Key, Output]]: ...
    @overload
    def encode_many(
        self,
        items: Iterable[ItemLike],
        *,
        on_error: Literal["raise"] = ...,
        **how: Unpack[StreamKeywords],
    ) -> Iterator[Output]: ...
    @overload
    def encode_many(  # type: ignore[overload-overlap]  # a tuple of two is (key, item)
        self,
        items: Iterable[tuple[Key, ItemLike]],
        *,
        on_error: Literal["keep"],
        **how: Unpack[StreamKeywords],
    ) -> Iterator[tuple[Key, Output] | ItemError]: ...
    @overload
    def encode_many(
        self,
        items: Iterable[ItemLike],
        *,
        on_error: Literal["keep"],
        **how: Unpack[StreamKeywords],
    ) -> Iterator[Output | ItemError]: ...
    def encode_many(
        self,
        items: Iterable[ItemLike | tuple[object, ItemLike]],
        *,
        batch_tokens: int | None = None,
        workers: int | None = None,
        progress: bool = True,
        on_error: OnError = "raise",
        max_tokens_per_call: int | None = None,
        decode: Decode = "cpu",
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> Iterator[object]:
        """Encode a stream of items of any length; outputs come in the order of the items.

        Threads decode and preprocess items while earlier ones are encoded, without gradients, in
        batches of tokens. At most four batches, on a GPU eight, are read ahead of the results that
        were yielded, so memory is bounded; an item that is being decoded counts as the mean of
        earlier ones.

        Args:
            items: any iterable; worker threads iterate it, one at a time. An item is an image as
                ``preprocess`` takes it, a clip (a :class:`Video`, a list of frames, an array
                [F, H, W, C] or a tensor [F, C, H, W]), a row of a ``datasets`` column, or a tuple
                of two (key, item). Its pixels must not change before its result is there, because
                items are read ahead: do not yield one array again with another image.
            batch_tokens: output tokens per batch; None takes 8192, on the CPU 1024.
            workers: threads that decode; None takes one per core, at most 16.
            progress: show items and tokens per second, and what the stream waits for: a bar on a
                terminal or in a notebook, a line per so many items in a log.
            on_error: "raise" stops at a bad item; "keep" yields an :class:`ItemError` in its place,
                whatever was raised while the item was read. An item whose features have a NaN or
                an infinity is a bad item.
            max_tokens_per_call, decode: as :meth:`encode` takes them.
            min_pixels, max_pixels, ..., num_frames: as ``preprocess`` takes them.

        Returns:
            A generator of one result per item, on the encoder's device: its
            :class:`EncoderOutput`, for a pair (key, output), or an :class:`ItemError`. Closing the
            generator ends the threads.

        Raises:
            ValueError: wrong arguments; while iterating, a bad item, with its number. Errors of
                other types that reading an item raises are raised unchanged.
            torch.OutOfMemoryError, MemoryError: as :meth:`encode` raises it, while iterating.
        """
        from .calls import ResultSettings
        from .stream import StreamOptions, as_given, stream_items

        limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        settings = ResultSettings(max_tokens_per_call=max_tokens_per_call)
        options = StreamOptions(batch_tokens, workers, progress, on_error, decode=decode)
        return as_given(stream_items(self._stream_encoder(), items, limits, settings, options))

    @overload
    def embed_many(  # type: ignore[overload-overlap]  # a tuple of two is (key, item)
        self,
        items: Iterable[tuple[Key, ItemLike]],
        *,
        on_error: Literal["raise"] = ...,
        **how: Unpack[VectorKeywords],
    ) -> Iterator[tuple[Key, Tensor]]: ...
    @overload
    def embed_many(
        self,
        items: Iterable[ItemLike],
        *,
        on_error: Literal["raise"] = ...,
        **how: Unpack[VectorKeywords],
    ) -> Iterator[Tensor]: ...
    @overload
    def embed_many(  # type: ignore[overload-overlap]  # a tuple of two is (key, item)
        self,
        items: Iterable[tuple[Key, ItemLike]],
        *,
        on_error: Literal["keep"],
        **how: Unpack[VectorKeywords],
    ) -> Iterator[tuple[Key, Tensor] | ItemError]: ...
    @overload
    def embed_many(
        self,
        items: Iterable[ItemLike],
        *,
        on_error: Literal["keep"],
        **how: Unpack[VectorKeywords],
    ) -> Iterator[Tensor | ItemError]: ...
    def embed_many(
        self,
        items: Iterable[ItemLike | tuple[object, ItemLike]],
        *,
        pool: VectorPool = "mean",
        normalize: bool = False,
        batch_tokens: int | None = None,
        workers: int | None = None,
        progress: bool = True,
        on_error: OnError = "raise",
        max_tokens_per_call: int | None = None,
        decode: Decode = "cpu",
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> Iterator[object]:
        """Encode a stream of items of any length to one vector [D] each, in order.

        Args:
            items, batch_tokens, workers, progress, on_error: as :meth:`encode_many` takes them.
            pool, normalize: as :meth:`embed` takes them.
            max_tokens_per_call, decode: as :meth:`encode` takes them.
            min_pixels, max_pixels, ..., num_frames: as ``preprocess`` takes them.

        Returns:
            A generator like that of :meth:`encode_many`, with a vector in place of each output, in
            the dtype of :meth:`embed`.

        Raises:
            ValueError, torch.OutOfMemoryError, MemoryError: as :meth:`encode_many` raises them, and
                for a pool that the encoder cannot make.
        """
        from .calls import ResultSettings
        from .pooling import check_pool
        from .stream import StreamOptions, as_given, stream_items

        check_pool(pool, normalize)
        limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        settings = ResultSettings(pool, normalize, max_tokens_per_call)
        options = StreamOptions(batch_tokens, workers, progress, on_error, decode=decode)
        return as_given(stream_items(self._stream_encoder(), items, limits, settings, options))
