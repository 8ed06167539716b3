"""The arrays that a job writes of each image, made of whole batches on the device.

Rows are chosen and cast on the device; one copy per array and batch brings them to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from encoders import VisionEncoder
from encoders.contract import EncoderOutput, PartialOutput
from encoders.streams import NOT_FINITE, Arrays, Collected, EncodedItem

from ..devices import DTYPES, range_error
from .activations import (
    POSITION,
    Sampling,
    images_of,
    outputs_of,
    path_of,
    places_of_patches,
    places_of_prefix,
)
from .block_fields import PREFIX, is_block, stack_of
from .feature_store import language_rows
from .parquet_files import VECTORS, Array
from .records import JobSettings
from .storage import TENSOR

_LARGEST = " largest"
"""The end of the names of tensors that have the greatest magnitude of each row."""


class _Rows(NamedTuple):
    """The rows of one array of an item on the device, and which of them are written."""

    rows: Tensor
    """[n, .., D]"""
    chosen: Array | None
    """The numbers of the rows that are written, int64; None for all."""


class _Span(NamedTuple):
    """Where the rows of one array of an item lie among those of its batch."""

    all: slice[int, int, None]
    """Its rows on the device."""
    written: slice[int, int, None]
    """Its rows that are written."""
    chosen: Array | None
    """As in :class:`_Rows`."""


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

    def __call__(self, items: Sequence[EncodedItem]) -> Collected:
        """Queue the work on a batch; its results are arrays by name, empty without any view."""
        parts, beside = list[dict[str, _Rows]](), list[Arrays]()
        for item in items:
            rows, positions = self._of_item(item)
            parts.append(rows)
            beside.append(positions)
        tensors: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            tensors |= self._join(name, [part[name] for part in parts if name in part])
        spans = _spans(parts)
        return Collected(tensors, lambda host: list(self._results(spans, beside, host)))

    def empty(self, item: EncodedItem) -> Arrays:
        """Return the arrays that a job writes without their rows, from any item; it may wait."""
        rows, beside = self._of_item(item)
        arrays = {name: part.rows[:0].to("cpu", self._dtype) for name, part in rows.items()}
        none = {name: self._array(tensor) for name, tensor in arrays.items()}
        none |= {name: array[:0] for name, array in beside.items()}
        return none | images_of(none, 0)

    def _join(self, name: str, parts: Sequence[_Rows]) -> dict[str, Tensor]:
        """Return the rows of all items that are written, and the greatest magnitude of each row."""
        joined = torch.cat([part.rows for part in parts])  # a copy: the next batch may overwrite
        wide = torch.promote_types(joined.dtype, torch.float32)
        largest = joined.flatten(1).abs().amax(1).to(wide)  # amax keeps NaN
        if any(part.chosen is not None for part in parts):
            index = torch.from_numpy(_chosen(parts))
            index = index.pin_memory() if joined.is_cuda else index
            joined = joined.index_select(0, index.to(joined.device, non_blocking=True))
        return {name: joined.to(self._dtype), f"{name}{_LARGEST}": largest}

    def _results(
        self,
        spans: Sequence[Mapping[str, _Span]],
        beside: Sequence[Arrays],
        host: Mapping[str, Tensor],
    ) -> Iterator[Arrays | Exception]:
        """Yield the arrays of each item from the tensors of the batch on the host, or its error."""
        arrays = {name: self._array(tensor) for name, tensor in host.items()}
        names = [name for name in arrays if not name.endswith(_LARGEST)]
        doubtful = [name for name in names if not self._fits(arrays[name + _LARGEST])]
        for of_item, positions in zip(spans, beside, strict=True):
            found = {name: arrays[name][span.written] for name, span in of_item.items()}
            largest = {
                name: arrays[name + _LARGEST][of_item[name].all]
                for name in doubtful
                if name in of_item
            }
            if not all(np.isfinite(rows).all() for rows in largest.values()):
                yield ValueError(NOT_FINITE)
                continue
            for name, rows in largest.items():
                chosen = of_item[name].chosen
                self._check_range(name, rows if chosen is None else rows[chosen])
            yield {VECTORS: found[VECTORS][0]} if VECTORS in found else {**found, **positions}

    def _fits(self, largest: Array) -> bool:
        """Return whether the dtype that the job writes holds the greatest magnitudes of rows."""
        return bool(torch.tensor(largest.max(initial=0)).to(self._dtype).isfinite())

    def _check_range(self, name: str, largest: Array) -> None:
        """Raise a ValueError if a finite value is too large for the dtype that the job writes."""
        if not self._fits(largest):
            raise range_error(name, float(largest.max()), self._dtype)

    def _array(self, tensor: Tensor) -> Array:
        # Numpy has no bfloat16; float32 represents all of its values exactly.
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def _of_item(self, item: EncodedItem) -> tuple[dict[str, _Rows], Arrays]:
        """Return the rows of one item by the name of their array, and the arrays beside them."""
        value = item.value
        if isinstance(value, Tensor):
            return {VECTORS: _Rows(value[None], None)}, {}
        if self._of_blocks:
            return self._activations(item, value)
        return {name: _Rows(rows, None) for name, rows in self._tokens(value).items()}, {}

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

    def _activations(
        self, item: EncodedItem, output: EncoderOutput | PartialOutput
    ) -> tuple[dict[str, _Rows], Arrays]:
        """Return outputs of blocks at chosen patches, all rows before patches, and their positions.

        There are none if the image has no view in the input path of the blocks.
        """
        extras, first = output.extras, self._fields[0]
        if first not in extras:
            return {}, {}
        inputs = item.layout if self._path == "image" else item.layout.paths[self._path]
        grid = inputs.grid_thw.flatten().tolist()
        places, positions = self._places(tuple(extras[first].shape[:-1]), tuple(grid))
        chosen = self._sampling.choose(str(item.key), len(places))
        numbers = places[chosen]
        rows = {name: _Rows(extras[name].flatten(0, -2), numbers) for name in self._fields}
        beside = {POSITION: positions[chosen]}
        for name in self._prefixes:
            rows[name] = _Rows(extras[name].flatten(0, 1), None)
            beside[f"{POSITION}{PREFIX}"] = places_of_prefix(extras[name].shape[:2])
        return rows, beside


def _spans(parts: Sequence[Mapping[str, _Rows]]) -> list[dict[str, _Span]]:
    """Return where the rows of each item lie in the joined tensors of a batch, by array."""
    spans: list[dict[str, _Span]] = []
    ends: dict[str, tuple[int, int]] = {}
    for part in parts:
        spans.append({})
        for name, (rows, chosen) in part.items():
            start, first = ends.get(name, (0, 0))
            count = rows.shape[0]  # `len` of a tensor takes ten times as long
            stop, last = start + count, first + (count if chosen is None else len(chosen))
            spans[-1][name] = _Span(slice(start, stop), slice(first, last), chosen)
            ends[name] = stop, last
    return spans


def _chosen(parts: Sequence[_Rows]) -> Array:
    """Return the numbers of chosen rows among the rows of all items, one after the other."""
    ends = np.cumsum([0, *(part.rows.shape[0] for part in parts)])
    return np.concatenate(
        [
            np.arange(start, end) if part.chosen is None else start + part.chosen
            for part, (start, end) in zip(parts, pairwise(ends.tolist()), strict=True)
        ]
    )
