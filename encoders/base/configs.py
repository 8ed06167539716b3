"""The sizes that the base classes of encoders read from the config of a family."""

from __future__ import annotations

from typing import Protocol

from ..contract import EncoderConfig


class VisionConfig(EncoderConfig, Protocol):
    """The sizes in the config of every tower: its number of blocks and the side of a patch."""

    @property
    def depth(self) -> int:
        """The number of transformer blocks."""
        ...

    @property
    def patch_size(self) -> int:
        """The side of a patch in pixels."""
        ...


class PatchConfig(VisionConfig, Protocol):
    """The sizes in the config of a ViT over packed patches of images of any size."""

    @property
    def patch_dim(self) -> int:
        """The number of values in a patch, which is a row of ``pixel_values``."""
        ...

    @property
    def spatial_merge_size(self) -> int:
        """The side in patches of the square that becomes one token."""
        ...


class TileConfig(VisionConfig, Protocol):
    """The sizes in the config of a ViT over square tiles of one size."""

    @property
    def in_channels(self) -> int:
        """The number of channels of a tile, 3 for RGB."""
        ...

    @property
    def tile_size(self) -> int:
        """The side of a tile in pixels."""
        ...
