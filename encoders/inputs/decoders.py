"""The video decoders of torchcodec and decord, taken as clips without importing either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .image_files import lock_of

if TYPE_CHECKING:
    from ..data import Array


class _Frame(Protocol):
    """A decoded frame of torchcodec."""

    @property
    def data(self) -> Tensor:
        """Return the pixels, uint8 [C, H, W], or [H, W, C] of a decoder of that order."""
        ...


class _Metadata(Protocol):
    """What torchcodec knows of a video stream."""

    @property
    def average_fps(self) -> float | None: ...


@runtime_checkable
class TorchcodecDecoder(Protocol):
    """A ``torchcodec.decoders.VideoDecoder``, as the ``datasets`` package returns for videos."""

    @property
    def metadata(self) -> _Metadata: ...

    def __len__(self) -> int: ...

    def get_frame_at(self, index: int) -> _Frame: ...


class _DecordFrame(Protocol):
    """A frame of decord's own array type, [H, W, C]."""

    def asnumpy(self) -> Array: ...


@runtime_checkable
class DecordReader(Protocol):
    """A ``decord.VideoReader``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> _DecordFrame | Tensor | Array: ...

    def get_avg_fps(self) -> float: ...


VideoDecoder: TypeAlias = TorchcodecDecoder | DecordReader
"""A decoder of torchcodec or decord, whose frames are read at its average rate."""


class DecoderFrames(Sequence[Tensor]):
    """The frames of a decoder, uint8 [3, H, W] each, decoded when they are indexed."""

    def __init__(self, decoder: VideoDecoder) -> None:
        self.decoder = decoder
        self.fps = (
            decoder.metadata.average_fps
            if isinstance(decoder, TorchcodecDecoder)
            else decoder.get_avg_fps()
        )

    def __len__(self) -> int:
        return len(self.decoder)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice[int | None]) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice[int | None]) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        with lock_of(self.decoder):  # neither decoder may be called by several threads at once
            if isinstance(self.decoder, TorchcodecDecoder):
                frame = self.decoder.get_frame_at(index).data
                return frame if frame.shape[0] == 3 else frame.permute(2, 0, 1)
            pixels = self.decoder[index]
            if isinstance(pixels, Tensor):
                return pixels.permute(2, 0, 1)
            array = pixels if isinstance(pixels, np.ndarray) else pixels.asnumpy()
            return torch.from_numpy(array).permute(2, 0, 1)
