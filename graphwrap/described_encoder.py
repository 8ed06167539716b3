"""Members of an encoder, such as its config, that its ``GraphedEncoder`` has as well."""

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

    An encoder that lacks some of them can still be wrapped.
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
    """Has the members of :class:`DescribedEncoder`, read from the wrapped ``self.encoder``."""

    encoder: nn.Module

    @property
    def config(self) -> EncoderConfig:
        """The config of the wrapped encoder."""
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
        """The encoder's ``feature_maps``; the output field it reads must be among ``outputs``."""
        return self._inner.feature_maps

    @property
    def _inner(self) -> DescribedEncoder:
        """The wrapped encoder; reading a member that it lacks raises an AttributeError."""
        return cast(DescribedEncoder, self.encoder)
