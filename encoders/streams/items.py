"""The methods ``encode`` and ``encode_many``, which all encoders inherit.

Shapes: D width of a pooled vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, overload

from torch import Tensor

from ..data import Limits, Output
from .finite import require_finite

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..inputs.intake import ImagesLike, ItemLike, VideosLike
    from . import keywords as kw
    from .calls import ItemEncoder
    from .item_errors import ItemError
    from .pooling import Pool
    from .stream import OnError


class EncodesItems(ABC, Generic[Output]):
    """Base class with ``encode`` and ``encode_many``, which run what ``item_encoder`` returns."""

    @abstractmethod
    def item_encoder(self) -> ItemEncoder[Output]:
        """Return the object by which ``encode`` calls the encoder: a function per input path."""

    @overload
    def encode(
        self, images: ImagesLike = (), videos: VideosLike = (), **how: Unpack[kw.Whole]
    ) -> list[Output]: ...
    @overload
    def encode(
        self, images: ImagesLike = (), videos: VideosLike = (), **how: Unpack[kw.Pooled]
    ) -> list[Tensor]: ...
    def encode(
        self,
        images: ImagesLike = (),
        videos: VideosLike = (),
        *,
        pool: Pool = "none",
        normalize: bool = False,
        max_tokens_per_call: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> list[Output] | list[Tensor]:
        """Encode images and videos: one result per item, images first, then videos.

        All items run in one call unless ``max_tokens_per_call`` bounds it, so memory grows with
        their number; ``encode_many`` takes a stream of any length.

        Args:
            images, videos: as ``preprocess`` takes them.
            pool: "none" returns whole outputs. "mean" and "max" return one vector per item, over
                all rows of its ``pooler_output``; "head" returns what SigLIP's head makes of them,
                "cls" the class token of ``last_hidden_state``, averaged over the tiles.
            normalize: divide each vector by its L2 norm; needs a pool.
            max_tokens_per_call: most output tokens per call of the encoder. A larger item is split
                between its segments (frames, tiles), which is exact; one segment alone may exceed
                the limit. None runs all items in one call.
            min_pixels, max_pixels, ..., num_frames: as ``preprocess`` takes them.

        Returns:
            One :class:`EncoderOutput` per item or, with a pool, one tensor [D] per item in float32
            (float64 where the encoder is float64). Every result has memory of its own, except from
            a graph wrapper that was told to return views of its buffers.

        Raises:
            ValueError: what ``preprocess`` or the encoder refuses, a pool that this encoder cannot
                make, or a vector with a NaN or an infinity. Without a pool this is not checked,
                because the check waits for the device.
            torch.OutOfMemoryError, MemoryError: memory ran out; the message names
                ``max_tokens_per_call``.
        """
        from .calls import ResultSettings

        settings = ResultSettings(pool, normalize, max_tokens_per_call)
        item_encoder = self.item_encoder()
        item_encoder.check(settings)
        limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        inputs = item_encoder.encoder.preprocess(images, videos, **limits._asdict())
        results = item_encoder.encode(inputs, settings)
        if pool != "none":
            require_finite(results)
        return results

    @overload
    def encode_many(  # type: ignore[overload-overlap]  # a tuple of two is (key, item)
        self, items: kw.Pairs[kw.Key], *, on_error: kw.Raise = ..., **how: Unpack[kw.WholeStream]
    ) -> Iterator[tuple[kw.Key, Output]]: ...
    @overload
    def encode_many(  # type: ignore[overload-overlap]  # a tuple of two is (key, item)
        self, items: kw.Pairs[kw.Key], *, on_error: kw.Raise = ..., **how: Unpack[kw.PooledStream]
    ) -> Iterator[tuple[kw.Key, Tensor]]: ...
    @overload
    def encode_many(
        self, items: Iterable[ItemLike], *, on_error: kw.Raise = ..., **how: Unpack[kw.WholeStream]
    ) -> Iterator[Output]: ...
    @overload
    def encode_many(
        self, items: Iterable[ItemLike], *, on_error: kw.Raise = ..., **how: Unpack[kw.PooledStream]
    ) -> Iterator[Tensor]: ...
    @overload
    def encode_many(  # type: ignore[overload-overlap]  # a tuple of two is (key, item)
        self, items: kw.Pairs[kw.Key], *, on_error: kw.Keep, **how: Unpack[kw.WholeStream]
    ) -> Iterator[tuple[kw.Key, Output] | ItemError]: ...
    @overload
    def encode_many(  # type: ignore[overload-overlap]  # a tuple of two is (key, item)
        self, items: kw.Pairs[kw.Key], *, on_error: kw.Keep, **how: Unpack[kw.PooledStream]
    ) -> Iterator[tuple[kw.Key, Tensor] | ItemError]: ...
    @overload
    def encode_many(
        self, items: Iterable[ItemLike], *, on_error: kw.Keep, **how: Unpack[kw.WholeStream]
    ) -> Iterator[Output | ItemError]: ...
    @overload
    def encode_many(
        self, items: Iterable[ItemLike], *, on_error: kw.Keep, **how: Unpack[kw.PooledStream]
    ) -> Iterator[Tensor | ItemError]: ...
    def encode_many(
        self,
        items: Iterable[ItemLike | tuple[object, ItemLike]],
        *,
        batch_tokens: int | None = None,
        workers: int | None = None,
        pool: Pool = "none",
        normalize: bool = False,
        progress: bool = True,
        on_error: OnError = "raise",
        max_tokens_per_call: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> Iterator[object]:
        """Encode a stream of items of any length; results come in the order of the items.

        Threads decode and preprocess items while earlier ones are encoded, without gradients, in
        batches of tokens. At most four batches are read ahead of the results that were yielded, so
        memory is bounded; an item that is being decoded counts as the mean of earlier ones.

        Args:
            items: any iterable; worker threads iterate it, one at a time. An item is an image as
                ``preprocess`` takes it, a clip (a :class:`Video`, a list of frames, an array
                [F, H, W, C] or a tensor [F, C, H, W]), a row of a ``datasets`` column, or a tuple
                of two (key, item).
            batch_tokens: output tokens per batch; None takes 8192, on the CPU 1024.
            workers: threads that decode; None takes one per core, at most 16.
            pool, normalize, max_tokens_per_call: as :meth:`encode` takes them.
            progress: show items and tokens per second, and what the stream waits for: a bar on a
                terminal or in a notebook, a line per so many items in a log.
            on_error: "raise" stops at a bad item; "keep" yields an :class:`ItemError` in its place,
                whatever was raised while the item was read. An item whose features have a NaN or
                an infinity is a bad item.
            min_pixels, max_pixels, ..., num_frames: as ``preprocess`` takes them.

        Returns:
            A generator of one result per item, on the encoder's device: what :meth:`encode`
            returns for it, for a pair (key, result), or an :class:`ItemError`. Closing it ends the
            threads.

        Raises:
            ValueError: wrong arguments; while iterating, a bad item, with its number. Errors of
                other types that reading an item raises are raised unchanged.
            torch.OutOfMemoryError, MemoryError: as :meth:`encode` raises it, while iterating.
        """
        from .calls import ResultSettings
        from .stream import StreamOptions, as_given, stream_items

        limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        settings = ResultSettings(pool, normalize, max_tokens_per_call)
        options = StreamOptions(batch_tokens, workers, progress, on_error)
        results = stream_items(self.item_encoder(), items, limits, settings, options)
        return as_given(results)
