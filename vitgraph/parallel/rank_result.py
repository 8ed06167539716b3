"""The result of one rank in a call: output fields, and each item's length on their axis 0."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from encoders.contract import OutputField, PartialOutput

from .shares import Shares
from .status import StatusExchange

FieldTypes: TypeAlias = list[tuple[str, torch.dtype, tuple[int, ...]]]
"""The name of each output field, its dtype, and its shape without the first axis."""


class RankResult(NamedTuple):
    """The output tensors that one rank has computed in a call, by field, for all its items."""

    shares: Shares
    fields: list[tuple[str, Tensor]]
    counts: list[list[int]]
    """The number of rows of each item in each field, [fields][items]. With several input paths they
    are those of this rank's items alone, until :func:`complete` has asked the other ranks."""
    about: str
    """A description of the call, which must be equal on all ranks before rows are exchanged."""
    device: torch.device

    @property
    def types(self) -> FieldTypes:
        """The name, dtype and shape of each output field; the shape leaves out the first axis."""
        return [(name, rows.dtype, tuple(rows.shape[1:])) for name, rows in self.fields]


def fields_of(output: PartialOutput, names: Collection[OutputField]) -> list[tuple[str, Tensor]]:
    """Return name and tensor of the fields in ``names``; those of DeepStack layers come last."""
    hidden, pooled, layers = output
    fields = [("last_hidden_state", hidden), ("pooler_output", pooled)]
    fields += [("deepstack_features", layer) for layer in layers or ()]
    return [(name, rows) for name, rows in fields if name in names and rows is not None]


def output_of(rows: Sequence[Tensor], names: Collection[OutputField]) -> PartialOutput:
    """Return the output with the fields in ``names``, of tensors in the order of :func:`fields_of`.

    All other fields are None.
    """
    left = list(rows)
    hidden = left.pop(0) if "last_hidden_state" in names else None
    pooled = left.pop(0) if "pooler_output" in names else None
    deepstack = tuple(left) if "deepstack_features" in names else None
    return PartialOutput(hidden, pooled, deepstack)


def kinds_of(
    results: Iterable[PartialOutput | Tensor],
) -> tuple[list[PartialOutput], list[Tensor]]:
    """Return the whole outputs and the vectors among results of items; one of the lists is empty.

    With a pool, the result of an item is a vector, and else a whole output.
    """
    results = list(results)
    vectors = [result for result in results if isinstance(result, Tensor)]
    return [result for result in results if not isinstance(result, Tensor)], vectors


def complete(result: RankResult, status: StatusExchange) -> RankResult:
    """Return the result of this rank with row counts of all items, asked of the other ranks.

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
