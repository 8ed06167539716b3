"""One row of the table of towers: our encoder, its reference, and the sizes of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from encoders.base.encoder import Encoder
from encoders.base.paths_encoder import PathsEncoder
from encoders.base.tile_encoder import TileEncoder
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from weights import FAMILIES as RECORDS
from weights.families.family import Family as Record
from weights.families.family import FamilyConfig
from weights.published import NO_VIDEO, PUBLISHED

from .configs import Config, edited
from .keys import State

Grids = list[list[int]]
"""The grids [t, h, w] of the items of one call."""


def by_frame(encoder: VisionEncoder, grids: Grids, seen: list[Any]) -> list[Tensor]:
    """Join what a reference of three blocks returned frame by frame, without its prefix rows."""
    patches = [x[0][encoder.prefix_rows :] for x in seen]
    return [torch.cat(patches[block::3]) for block in range(3)]


@dataclass(frozen=True)
class Family:
    """One tower: how to build ours and the reference, and at which sizes."""

    name: str
    record: Record
    """Its record in ``weights``."""
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
    six: Config | None = None
    """Changes to six blocks of published widths; None if the names of the config say them."""
    side: int | None = None
    """Side of a tile in pixels, for a tower whose published tiles are too large for most tests."""
    variant: bool = False
    """Whether most tests leave the tower out, because another row is like it."""
    slow: bool = False
    """Whether a plain `pytest` leaves out the tests that have the name of the tower in their id."""
    eager: bool = False
    """Whether the reference has an eager attention, whose weights tests compare."""
    ragged: bool = False
    """Whether a side of a grid may have any number of patches, not those of whole tokens alone."""
    joins: bool = False
    """Whether several rows of the grid, four frames or a pair, make one set of tokens."""
    segment_rows: int = 1
    """The most rows of the grid whose patches attend to each other."""
    blocks: Callable[[Any], Iterable[nn.Module]] = lambda reference: reference.blocks
    """A function that returns the blocks of the reference."""
    block_rows: Callable[[VisionEncoder, Grids, list[Any]], list[Tensor]] = (
        lambda encoder, grids, seen: seen
    )
    """A function that takes our tower, the grids, and what the reference's blocks returned in one
    call, and returns the rows of each block in the order and shape of ours."""
    casts: tuple[tuple[str, ...], ...] | None = None
    """Of each group of casts in the reference, the float64 test must see one; None for the usual
    ones, of rotary angles and inverse frequencies, for a tower over patches."""
    alone: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    """A function that runs the class of transformers that is the tower alone, on pixels and grids,
    and returns what is our ``pooler_output``."""
    required: tuple[str, ...] = ()
    """The keys of a tower without which a config is refused though transformers has a default:
    sizes of no published tower, and heads, which no tensor shows."""
    not_in_tensors: tuple[str, ...] = ()
    """The fields of the config that no tensor shows, beside those of many families."""
    unread: tuple[str, ...] = ()
    """How the names of parameters begin that a checkpoint has, but no forward reads."""
    renamed: bool = False
    """Whether transformers renames or permutes the tower's tensors while it reads them."""
    learned: Callable[[int, int], int] = lambda rows, columns: 0
    """A function that returns the number of learned tokens among those of a frame, of which rows
    and columns without them are given."""
    filled: tuple[str, ...] = ()
    """The buffers that the class of transformers fills from the config, and that the folder of a
    tower lacks. The class saves them, and scales of 1, in a folder that it writes."""

    @property
    def tiled(self) -> bool:
        """Whether ``pixel_values`` are tiles (InternViT) rather than patches."""
        return issubclass(self.tower_class, TileEncoder)

    @property
    def takes_videos(self) -> bool:
        """Whether the family encodes videos."""
        return self.record.facts.video != NO_VIDEO

    def small_config(self) -> Any:
        """Return the config of the tower in its tiny sizes."""
        return self.config_class.from_hf(edited(self.config, **self.tiny))

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
    tower: type[VisionEncoder] | None = None,
    **fields: Any,
) -> Family:
    """Make a row of the table from the record of the published model ``repo_id``.

    ``tower`` is the class of the path "image" of an encoder with several; ``fields`` are the other
    fields of :class:`Family`.
    """
    model = next(model for model in PUBLISHED if model.repo_id == repo_id)
    record = RECORDS[model.family]
    single = tower or record.encoder
    assert issubclass(single, VisionEncoder)
    return Family(
        name,
        record,
        dict(model.config),
        record.config,
        record.encoder,
        single,
        reference,
        keys,
        output,
        **fields,
    )
