"""The result of one rank in a call: output fields, and each item's number of rows in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from encoders.contract import PartialOutput

from .shares import Shares
from .status import StatusExchange

FieldTypes: TypeAlias = list[tuple[str, torch.dtype, tuple[int, ...]]]
"""The name of each output field, its dtype, and its shape without the first axis."""


class RankResult(NamedTuple):
    """The output tensors that one rank has computed in a call, by field, for all its items."""

    shares: Shares
    fields: list[tuple[str, Tensor]]
    counts: list[list[int]]
    """The number of rows of each item in each field, [fields][items]. With several input paths only
    this rank's items are counted until :func:`complete` has asked the other ranks."""
    description: str
    """A text with the arguments of the call, which must be equal on all ranks."""
    device: torch.device

    @property
    def types(self) -> FieldTypes:
        """The name, dtype and shape of each output field; the shape leaves out the first axis."""
        return [(name, rows.dtype, tuple(rows.shape[1:])) for name, rows in self.fields]


def fields_of(output: PartialOutput, names: Collection[str]) -> list[tuple[str, Tensor]]:
    """Return name and tensor of the fields in ``names``, DeepStack layers, and then the extras."""
    hidden, pooled, layers, extras = output
    fields = [("last_hidden_state", hidden), ("pooler_output", pooled)]
    fields += [("deepstack_features", layer) for layer in layers or ()]
    named = [(name, rows) for name, rows in fields if name in names and rows is not None]
    return [*named, *extras.items()]


def output_of(fields: Iterable[tuple[str, Tensor]], names: Collection[str]) -> PartialOutput:
    """Return the output with these ``fields``, in the order of :func:`fields_of`.

    ``names`` are the fields that outputs have; all others are None.
    """
    named = [*fields]
    layers = tuple(rows for name, rows in named if name == "deepstack_features")
    rest = {name: rows for name, rows in named if name != "deepstack_features"}
    hidden, pooled = rest.pop("last_hidden_state", None), rest.pop("pooler_output", None)
    return PartialOutput(hidden, pooled, layers if "deepstack_features" in names else None, rest)


def complete(result: RankResult, status: StatusExchange) -> RankResult:
    """Return the result of this rank with the row counts of all items, fetched from all ranks.

    If an encoder has several input paths, only the rank that has joined their outputs knows how
    many rows an item has, and a rank without items does not know the output fields.

    Args:
        result: this rank's result of an encoder with several input paths.
        status: the channel through which ranks exchange their fields and counts.

    Raises:
        ValueError: the fields of the ranks differ in number, dtype or width.
        RuntimeError: another rank no longer answers.
    """
    shares = result.shares
    rank_fields = status.gather((result.types, result.counts))
    answers = [
        (types, counts, share)
        for (types, counts), share in zip(rank_fields, shares.by_rank, strict=True)
        if share
    ]
    types_of_ranks = [types for types, _, _ in answers]
    if any(types != types_of_ranks[0] for types in types_of_ranks):
        raise ValueError(
            f"the ranks encode to different fields, {types_of_ranks}: give all of them the "
            "same encoder"
        )
    types: FieldTypes = types_of_ranks[0] if types_of_ranks else []
    counts = [[0] * len(shares.grids) for _ in types]
    for _, field_counts, share in answers:
        for all_counts, rank_counts in zip(counts, field_counts, strict=True):
            for item, count in zip(share, rank_counts, strict=True):
                all_counts[item] = count
    nothing = [
        (name, torch.empty((0, *shape), dtype=dtype, device=result.device))
        for name, dtype, shape in types
    ]
    return result._replace(fields=result.fields or nothing, counts=counts)


def result_of_fields(
    shares: Shares, fields: list[tuple[str, Tensor]], device: torch.device
) -> RankResult:
    """Return a rank's result from the output ``fields`` of an encoder with one input path."""
    counts = [shares.counts(name) for name, _ in fields]
    result = RankResult(shares, fields, counts, "", device)
    return result._replace(description=repr((shares.grids, result.types)))


def split_rows(
    gathered: list[Tensor], result: RankResult, outputs: Sequence[str]
) -> list[PartialOutput]:
    """Return the output of each item: views of ``gathered``, the rows of all items by field.

    ``result`` has the number of rows of each item in each field, ``outputs`` the fields' names.
    """
    pairs = zip(gathered, result.counts, strict=True)
    names = [name for name, _ in result.fields]
    named = [*zip(names, [rows.split(counts) for rows, counts in pairs], strict=True)]
    return [
        output_of([(name, rows[item]) for name, rows in named], outputs)
        for item in range(len(result.shares.grids))
    ]
