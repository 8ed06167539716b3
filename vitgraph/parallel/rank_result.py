"""The result of one rank in a call: its fields, completed by the fields and counts of others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from encoders.contract import OutputField, PartialOutput

from .shares import Shares
from .status import StatusExchange

FieldTypes: TypeAlias = list[tuple[str, torch.dtype, tuple[int, ...]]]
"""Name, dtype and trailing shape of each field."""


class RankResult(NamedTuple):
    """The rows that one rank has computed in a call, by field."""

    shares: Shares
    fields: list[tuple[str, Tensor]]
    counts: list[list[int]]
    """Rows of each item in each field. With several paths those of this rank's items alone, until
    :func:`complete` has heard the others."""
    about: str
    """A description of the call, which must be equal on all ranks before rows are exchanged."""
    device: torch.device

    @property
    def types(self) -> FieldTypes:
        """The name, dtype and trailing shape of each field, without its rows."""
        return [(name, rows.dtype, tuple(rows.shape[1:])) for name, rows in self.fields]


def fields_of(output: PartialOutput, wanted: Collection[OutputField]) -> list[tuple[str, Tensor]]:
    """Return the fields of an output that are wanted, DeepStack features last."""
    hidden, pooled, layers = output
    fields = [("last_hidden_state", hidden), ("pooler_output", pooled)]
    fields += [("deepstack_features", layer) for layer in layers or ()]
    return [(name, rows) for name, rows in fields if name in wanted and rows is not None]


def output_of(rows: Sequence[Tensor], wanted: Collection[OutputField]) -> PartialOutput:
    """Return the output with the fields that are wanted, from rows as :func:`fields_of` orders."""
    left = list(rows)
    hidden = left.pop(0) if "last_hidden_state" in wanted else None
    pooled = left.pop(0) if "pooler_output" in wanted else None
    deepstack = tuple(left) if "deepstack_features" in wanted else None
    return PartialOutput(hidden, pooled, deepstack)


def complete(result: RankResult, status: StatusExchange) -> RankResult:
    """Return a result with the fields and counts that the other ranks know.

    How many rows an item of several paths has is known when its paths are joined, and a rank
    without items has not learned which fields there are.

    Args:
        result: this rank's result of an encoder of several paths.
        status: the channel through which ranks exchange their fields and counts.

    Raises:
        ValueError: the fields of the ranks differ in number, dtype or width.
        RuntimeError: nothing is heard from another rank any more.
    """
    shares = result.shares
    heard = status.gather((result.types, result.counts))
    answers = [(*one, share) for one, share in zip(heard, shares.of_ranks, strict=True) if share]
    of_ranks = [types for types, _, _ in answers]
    if any(types != of_ranks[0] for types in of_ranks):
        raise ValueError(
            f"the ranks encode to different fields, {of_ranks}: give all of them the same encoder"
        )
    types: FieldTypes = of_ranks[0] if of_ranks else []
    counts = [[0] * len(shares.grids) for _ in types]
    for _, theirs, share in answers:
        for whole, own in zip(counts, theirs, strict=True):
            for item, count in zip(share, own, strict=True):
                whole[item] = count
    nothing = [
        (name, torch.empty((0, *shape), dtype=dtype, device=result.device))
        for name, dtype, shape in types
    ]
    return result._replace(fields=result.fields or nothing, counts=counts)
