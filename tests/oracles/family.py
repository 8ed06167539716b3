"""One row of the table of towers: our encoder, its reference, and the sizes of the comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from encoders.base.encoder import Encoder
from encoders.base.paths_encoder import PathsEncoder
from encoders.base.tile_encoder import TileEncoder
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from weights import FAMILIES as RECORDS
from weights.families.family import FamilyConfig
from weights.published import PUBLISHED

from .configs import Config
from .keys import State

Grids = list[list[int]]
"""The grids [t, h, w] of the items of one call."""


@dataclass(frozen=True)
class Family:
    """One tower: how to build ours and the reference, and at which sizes."""

    name: str
    config: Config
    config_class: type[FamilyConfig]
    encoder_class: type[Encoder]
    tower_class: type[VisionEncoder]
    """The single-path encoder that the tests run: the encoder itself, or its path "image"."""
    reference: Callable[[Config], nn.Module]
    keys: Callable[[State], State]
    output: Callable[[nn.Module, Tensor, Tensor], EncoderOutput]
    shallow: Config
    """Changes that leave the published widths and cut the depth."""
    narrow: Config
    """Changes that leave the published depth and cut the widths."""
    tiny: Config
    """Changes for the many tests that need a tower and not its size."""
    side: int | None
    """Side of a tile in pixels, for a tower whose published tiles are too large for most tests."""
    variant: bool
    """Whether most tests leave the tower out, because an earlier one in the table is like it."""

    @property
    def tiled(self) -> bool:
        """Whether ``pixel_values`` are tiles (InternViT) rather than patches."""
        return issubclass(self.tower_class, TileEncoder)

    def build(self, config: Any) -> VisionEncoder:
        """Make the tower, with an instance of ``config_class``."""
        encoder = self.encoder_class(config)
        tower = encoder.paths["image"] if isinstance(encoder, PathsEncoder) else encoder
        assert isinstance(tower, self.tower_class)
        if self.side is None:
            return tower
        assert isinstance(tower, TileEncoder)
        return tower.at(self.side)


def make_row(
    name: str,
    repo_id: str,
    reference: Callable[[Config], nn.Module],
    keys: Callable[[State], State],
    output: Callable[[nn.Module, Tensor, Tensor], EncoderOutput],
    *,
    shallow: Config,
    narrow: Config,
    tiny: Config,
    variant: bool = False,
    tower: type[VisionEncoder] | None = None,
    side: int | None = None,
) -> Family:
    """Make a row of the table from the record of the published model ``repo_id``."""
    model = next(model for model in PUBLISHED if model.repo_id == repo_id)
    record = RECORDS[model.family]
    single = tower or record.encoder
    assert issubclass(single, VisionEncoder)
    return Family(
        name,
        dict(model.config),
        record.config,
        record.encoder,
        single,
        reference,
        keys,
        output,
        shallow,
        narrow,
        tiny,
        side,
        variant,
    )
