"""The arrays that a job writes of each image, made of whole batches on the device.

Rows are chosen and cast on the device; one copy per array and batch brings them to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import inf
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from encoders import VisionEncoder
from encoders.contract import EncoderOutput, PartialOutput, VisionInputs
from encoders.streams import NOT_FINITE, Arrays, Collected, EncodedItem

from ..devices import DTYPES, range_error
from .activations import (
    outputs_of,
    path_of,
    places_of_patches,
    places_of_prefix,
)
from .block_fields import POSITION, PREFIX, image_name, is_block, stack_of
from .feature_store import language_rows
from .parquet_files import VECTORS, Array
from .records import JobSettings
from .sampling import Sampling
from .storage import TENSOR

_LARGEST = " largest"
"""The end of the name of a tensor with the greatest magnitude of each row of another one."""


class _Group(NamedTuple):
    """Arrays of one item that have the same rows, and which of these are written."""

    tensors: Mapping[str, Tensor]
    """[n, .., D] on the device, by the name of the array; [segments, r, D] before the patches."""
    chosen: Array | None = None
    """The numbers of the rows that are written, int64; None for all."""
    beside: Mapping[str, Array] = MappingProxyType({})
    """Arrays on the host with one row for each that is written."""


class _Column(NamedTuple):
    """One array of several items of a batch."""

    name: str
    items: list[int]
    """The numbers of the items."""
    rows: list[Tensor]
    """The tensor of each item: [n, .., D], or [segments, r, D] before the patches."""
    chosen: list[Array | None]
    """The numbers of the rows of each item that are written, int64; None for all."""


class _Span(NamedTuple):
    """Where the rows of a column lie among those of all columns that are joined with it."""

    column: _Column
    key: str
    """The name of the joined tensor."""
    all: list[int]
    """Where the rows of each item begin, and the end of the last."""
    written: list[int]
    """Where the rows of each item that are written begin among all that are, and their end."""


class Collector:
    """Makes the arrays of images from batches of outputs or vectors; it never waits for the device.

    Args:
        settings: the settings of the job.
        paths: the input paths of its encoder.
    """

    def __init__(self, settings: JobSettings, paths: Mapping[str, VisionEncoder]) -> None:
        self._settings = settings
        self._dtype: torch.dtype = DTYPES[settings["out_dtype"]]
        self._fields = settings["fields"]
        self._sampling = Sampling(settings["sample"], settings["seed"] or 0)
        self._of_blocks = any(map(is_block, self._fields))
        self._path = path_of(paths, stack_of(self._fields)) if self._of_blocks else "image"
        self._prefixes = outputs_of(paths, self._fields)[len(self._fields) :]
        """The names of the arrays with the rows before patches."""
        self._places = lru_cache(maxsize=256)(partial(places_of_patches, paths[self._path]))
        """The places of patches; the images of a job have few grids."""

    def __call__(self, items: Sequence[EncodedItem] | Tensor) -> Collected:
        """Queue the work on a batch; its results are arrays by name, empty without any view."""
        if isinstance(items, Tensor):
            return self._collect_vectors(items)
        parts = self._groups(items)
        joined: dict[tuple[torch.Size, torch.dtype], list[_Column]] = {}
        for column in _columns(parts):
            rows = column.rows[0]
            joined.setdefault((rows.shape[1:], rows.dtype), []).append(column)
        tensors: dict[str, Tensor] = {}
        spans: list[_Span] = []
        for columns in joined.values():
            key, of_columns = columns[0].name, _spans(columns)
            tensors |= self._join(key, of_columns)
            spans += of_columns
        beside = [{n: a for group in part for n, a in group.beside.items()} for part in parts]
        return Collected(tensors, lambda host: self._results(spans, beside, host))

    def _collect_vectors(self, vectors: Tensor) -> Collected:
        """Copy vectors [items, D], which are small enough to be computed with on the host."""
        numbers = list(range(len(vectors) + 1))
        column = _Column(VECTORS, numbers[:-1], [vectors], [None] * len(vectors))
        spans = [_Span(column, VECTORS, numbers, numbers)]

        def results(host: Mapping[str, Tensor]) -> list[Arrays | Exception]:
            rows = host[VECTORS]
            largest = torch.linalg.vector_norm(rows, inf, dim=1)  # keeps NaN
            made = {VECTORS: rows.to(self._dtype), f"{VECTORS}{_LARGEST}": largest}
            return self._results(spans, [{} for _ in column.items], made)

        return Collected({VECTORS: vectors}, results)

    def empty(self, item: EncodedItem) -> Arrays:
        """Return the arrays that a job writes without their rows, from any item; it may wait."""
        none: Arrays = {}
        for group in self._groups([item])[0]:
            for name, rows in group.tensors.items():
                none[name] = _rows_of(name, self._array(rows[:0].to("cpu", self._dtype)))
            for name, array in group.beside.items():
                none[name] = array[:0]
                none[image_name(name)] = np.empty(0, np.int32)
        return none

    def _join(self, key: str, spans: Sequence[_Span]) -> dict[str, Tensor]:
        """Return the rows of columns that are written, and the greatest magnitude of each row.

        All columns take one call of torch per step: while other threads compute, each call waits.
        """
        parts = [rows for span in spans for rows in span.column.rows]
        joined = torch.cat(parts)  # a copy: the next batch may overwrite the rows
        largest = joined.flatten(1).abs().amax(1)  # keeps NaN
        if any(span.column.chosen[0] is not None for span in spans):
            index = torch.from_numpy(_index(spans))
            index = index.pin_memory() if joined.is_cuda else index
            joined = joined.index_select(0, index.to(joined.device, non_blocking=True))
        return {key: joined.to(self._dtype), f"{key}{_LARGEST}": largest}

    def _results(
        self, spans: Sequence[_Span], beside: Sequence[Arrays], host: Mapping[str, Tensor]
    ) -> list[Arrays | Exception]:
        """Return the arrays of each item from the tensors of the batch on the host, or its error.

        ``beside`` are the arrays that each item has on the host already.
        """
        arrays = {key: self._array(tensor) for key, tensor in host.items()}
        results: list[Arrays | Exception] = [*beside]
        for column, key, starts, written in spans:
            name, array, largest = column.name, arrays[key], arrays[key + _LARGEST]
            fits = self._fits(largest[starts[0] : starts[-1]])
            for place, number in enumerate(column.items):
                found = results[number]
                if isinstance(found, Exception):
                    continue
                if not fits:
                    rows = largest[starts[place] : starts[place + 1]]
                    if not np.isfinite(rows).all():
                        results[number] = ValueError(NOT_FINITE)
                        continue
                    chosen = column.chosen[place]
                    self._check_range(name, rows if chosen is None else rows[chosen])
                found[name] = _rows_of(name, array[written[place] : written[place + 1]])
        return results

    def _fits(self, largest: Array) -> bool:
        """Return whether the dtype that the job writes holds the greatest magnitudes of rows."""
        if largest.max(initial=0) <= torch.finfo(self._dtype).max:
            return True  # not so of NaN, nor of a number above that is rounded to it
        return bool(torch.tensor(largest.max(initial=0)).to(self._dtype).isfinite())

    def _check_range(self, name: str, largest: Array) -> None:
        """Raise a ValueError if a finite value is too large for the dtype that the job writes."""
        if not self._fits(largest):
            raise range_error(name, float(largest.max()), self._dtype)

    def _array(self, tensor: Tensor) -> Array:
        # Numpy has no bfloat16; float32 represents all of its values exactly.
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def _groups(self, items: Sequence[EncodedItem]) -> list[list[_Group]]:
        """Return the groups of arrays of each item; all items have the same ones, or none."""
        if self._of_blocks:
            return self._activations(items)
        values = [item.value for item in items]
        return [
            [_Group({VECTORS: value[None]})]
            if isinstance(value, Tensor)
            else [_Group({name: rows}) for name, rows in self._tokens(value).items()]
            for value in values
        ]

    def _tokens(self, output: EncoderOutput | PartialOutput) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        if self._settings["format"] == "vllm":
            return {TENSOR: language_rows(output)}
        for name in self._fields:
            field = output._asdict()[name]
            if isinstance(field, tuple):
                tensors |= {f"deepstack.{number}": layer for number, layer in enumerate(field)}
            else:
                tensors[name] = field
        return tensors

    def _activations(self, items: Sequence[EncodedItem]) -> list[list[_Group]]:
        """Return outputs of blocks at chosen patches of each item, and all rows before patches.

        An item has none if it has no view in the input path of the blocks.
        """
        first = self._fields[0]
        extras = [value.extras for _, value, _ in items if not isinstance(value, Tensor)]
        places = [
            self._patches(found[first], item.layout) if first in found else None
            for found, item in zip(extras, items, strict=True)
        ]
        chosen = self._sampling.choose(
            [str(item.key) for item in items], [len(place[0]) if place else 0 for place in places]
        )
        parts: list[list[_Group]] = []
        for found, place, numbers in zip(extras, places, chosen, strict=True):
            parts.append([])
            if place is None:
                continue
            rows = {name: _flat(found[name]) for name in self._fields}
            parts[-1].append(_Group(rows, place[0][numbers], {POSITION: place[1][numbers]}))
            if self._prefixes:
                before = {name: found[name] for name in self._prefixes}
                beside = places_of_prefix(found[self._prefixes[0]].shape[:2])
                parts[-1].append(_Group(before, None, {f"{POSITION}{PREFIX}": beside}))
        return parts

    def _patches(self, rows: Tensor, layout: VisionInputs) -> tuple[Array, Array]:
        """Return where the patches of an item lie among rows of a block, and their positions."""
        inputs = layout if self._path == "image" else layout.paths[self._path]
        grid = inputs.grid_thw.flatten().tolist()
        return self._places(tuple(rows.shape[:-1]), tuple(grid))


def _flat(rows: Tensor) -> Tensor:
    """Return the rows of a block as [n, D]."""
    return rows if rows.dim() == 2 else rows.flatten(0, -2)


def _columns(parts: Sequence[Sequence[_Group]]) -> list[_Column]:
    """Return the arrays of a batch of items as columns."""
    columns: dict[str, _Column] = {}
    for number, part in enumerate(parts):
        for tensors, chosen, _ in part:
            for name, rows in tensors.items():
                if name not in columns:
                    columns[name] = _Column(name, [], [], [])
                _, items, tensors_of, chosen_of = columns[name]
                items.append(number)
                tensors_of.append(rows)
                chosen_of.append(chosen)
    return list(columns.values())


def _spans(columns: Sequence[_Column]) -> list[_Span]:
    """Return where the rows of columns lie that are joined one after the other."""
    spans: list[_Span] = []
    start = first = 0
    for column in columns:
        counts = [rows.shape[0] for rows in column.rows]  # `len` of a tensor takes longer
        pairs = zip(counts, column.chosen, strict=True)
        written = [count if chosen is None else len(chosen) for count, chosen in pairs]
        all_starts = list(accumulate(counts, initial=start))
        written_starts = list(accumulate(written, initial=first))
        spans.append(_Span(column, columns[0].name, all_starts, written_starts))
        start, first = all_starts[-1], written_starts[-1]
    return spans


def _index(spans: Sequence[_Span]) -> Array:
    """Return the numbers of the rows that are written among the rows of all columns."""
    parts: list[Array] = []
    for column, _, starts, _ in spans:
        for chosen, (start, end) in zip(column.chosen, pairwise(starts), strict=True):
            parts.append(np.arange(start, end) if chosen is None else chosen + start)
    return np.concatenate(parts)


def _rows_of(name: str, array: Array) -> Array:
    """Return the rows of one item as they are written, from an array that has its rows alone."""
    if name == VECTORS:
        return array.reshape(array.shape[-1]) if len(array) else array
    return array.reshape(-1, array.shape[-1]) if name.endswith(PREFIX) else array
