"""The members of an encoder that its graphed form passes on, though graphs do not need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, overload

from torch import Tensor, nn

from encoders.contract import EncoderConfig, FeatureRows, GridLike, VisionInputs
from encoders.streams import ImagesLike, VideosLike


class FeatureMaps(Protocol):
    """The signature of the method ``feature_maps`` of an encoder."""

    @overload
    def __call__(self, features: FeatureRows, inputs: VisionInputs) -> list[dict[str, Tensor]]: ...

    @overload
    def __call__(
        self,
        features: Tensor,
        inputs: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]: ...


class Preprocess(Protocol):
    """The signature of the method ``preprocess`` of an encoder."""

    def __call__(
        self,
        images: ImagesLike = (),
        videos: VideosLike = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VisionInputs: ...


class DescribedEncoder(Protocol):
    """The members beyond ``GraphableEncoder`` that :class:`GraphedEncoder` passes on.

    An encoder without one of them can be graphed all the same.
    """

    @property
    def config(self) -> EncoderConfig: ...

    @property
    def num_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def preprocess(self) -> Preprocess: ...

    @property
    def feature_maps(self) -> FeatureMaps: ...


class DescribesItself:
    """Passes on the members of :class:`DescribedEncoder` of the encoder that it wraps."""

    encoder: nn.Module

    @property
    def config(self) -> EncoderConfig:
        """The config of the encoder."""
        return self._inner.config

    @property
    def num_features(self) -> int:
        """The number of columns of ``last_hidden_state``."""
        return self._inner.num_features

    @property
    def out_features(self) -> int:
        """The number of columns of ``pooler_output``."""
        return self._inner.out_features

    @property
    def preprocess(self) -> Preprocess:
        """The method ``preprocess`` of the wrapped encoder."""
        return self._inner.preprocess

    @property
    def feature_maps(self) -> FeatureMaps:
        """The method ``feature_maps`` of the encoder; ``outputs`` must name the field it reads."""
        return self._inner.feature_maps

    @property
    def _inner(self) -> DescribedEncoder:
        """The wrapped encoder, whose members beyond the contract are passed on if it has them."""
        return cast(DescribedEncoder, self.encoder)
