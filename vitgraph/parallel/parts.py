"""What one rank has computed in a call, and what it has to hear before rows are exchanged."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .shares import Shares
from .status import StatusExchange

Layout: TypeAlias = list[tuple[str, torch.dtype, tuple[int, ...]]]
"""Name, dtype and trailing shape of each field."""


class Part(NamedTuple):
    """Rows of the items of one rank, by field."""

    shares: Shares
    fields: list[tuple[str, Tensor]]
    counts: list[list[int]]
    """Rows of each item in each field. With several paths those of this rank's items alone, until
    :func:`complete` has heard the others."""
    about: str
    """What has to be equal on all ranks before rows are exchanged."""
    device: torch.device

    @property
    def layout(self) -> Layout:
        """The fields without their rows."""
        return [(name, rows.dtype, tuple(rows.shape[1:])) for name, rows in self.fields]


def complete(part: Part, status: StatusExchange) -> Part:
    """Return a part with what only the ranks that encoded the other items know.

    How many rows an item of several paths has is known when its paths are joined, and a rank
    without items has not learned which fields there are.

    Args:
        part: of an encoder of several paths.
        status: between the ranks.

    Raises:
        ValueError: the fields of the ranks differ in number, dtype or width.
        RuntimeError: nothing is heard from another rank any more.
    """
    shares = part.shares
    heard = status.gather((part.layout, part.counts))
    said = [(*one, share) for one, share in zip(heard, shares.of_ranks, strict=True) if share]
    layouts = [layout for layout, _, _ in said]
    if any(layout != layouts[0] for layout in layouts):
        raise ValueError(
            f"the ranks encode to different fields, {layouts}: give all of them the same encoder"
        )
    layout: Layout = layouts[0] if layouts else []
    counts = [[0] * len(shares.grids) for _ in layout]
    for _, theirs, share in said:
        for whole, own in zip(counts, theirs, strict=True):
            for item, count in zip(share, own, strict=True):
                whole[item] = count
    nothing = [
        (name, torch.empty((0, *shape), dtype=dtype, device=part.device))
        for name, dtype, shape in layout
    ]
    return part._replace(fields=part.fields or nothing, counts=counts)
