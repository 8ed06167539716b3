"""Copies of weights in a layout that matrix products run fast on, kept equal to their sources.

A weight written in place is copied again before the next run if torch counted the write
(``_version``). Torch does not count writes through ``.data``, as peft merges adapters, or under
inference mode. For those a kernel at the start of every forward, in CUDA graphs too, compares 16
entries of every eighth row of a weight with the copy, and copies the rows around a difference
again. It sees a write to a whole weight; it may miss a write to a few rows or entries.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..layers.torch_internals import versions_of

if TYPE_CHECKING:
    from .triton_kernels.quantise import Rows8

Pair = tuple[Tensor, ...]
"""A source tensor, the part of a derived tensor (of equal shape) into which it is copied, and the
scales of that part's rows if it is quantised."""
Make = Callable[[], tuple[tuple[Tensor, ...], Sequence[Pair]]]


@dataclass
class _Entry:
    make: Make
    tensors: tuple[Tensor, ...]
    pairs: Sequence[Pair]


class DerivedWeights:
    """Copies of the weights of modules in another layout, kept equal to the weights.

    CUDA graphs read the copies at fixed addresses, so a changed weight is copied in place. Several
    threads may call the same encoder, each on its own CUDA stream.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()
        self._sources: list[Tensor] | None = None
        """All weights that have copies; None after copies for a module were added or replaced."""
        self._versioned: list[Tensor] = []
        """The source tensors whose writes torch counts in their version."""
        self._versions: list[int] = []
        self._addresses: list[object] = []
        self._table: Tensor | None = None
        self._captured: list[Tensor] = []
        """The tables of addresses that captured CUDA graphs read; this list keeps them alive."""
        self._rows = self._count = 0
        self._on_cuda = False

    @property
    def nbytes(self) -> int:
        """Bytes of all derived tensors."""
        return sum(x.nbytes for entry in self._entries.values() for x in entry.tensors)

    def get(self, owner: nn.Module, sources: Sequence[Tensor], make: Make) -> tuple[Tensor, ...]:
        """Return the derived tensors of a module, which :meth:`follow` keeps up to date.

        Args:
            owner: the module.
            sources: its weights; if they are other tensors than in the last call, the derived
                tensors are made anew.
            make: allocates the derived tensors (zero where no weight is copied to) and returns them
                with the pairs of weight and copy.
        """
        with self._lock:
            entry = self._entries.get(owner)
            if entry is None or [id(pair[0]) for pair in entry.pairs] != [id(x) for x in sources]:
                entry = self._new_entry(make)
                self._entries[owner] = entry
                self._sources = None
                self._on_cuda = entry.tensors[0].is_cuda
                self._finish()
            return entry.tensors

    def refresh(self) -> bool:
        """Copy every source weight again that torch has seen written, on the current CUDA stream.

        Writes that torch does not count are found by the kernel that :meth:`follow` launches, in
        CUDA graphs too. Nothing is copied while a CUDA graph is being captured.

        Returns:
            Whether torch counted a write since the last call.
        """
        with self._lock:
            if not self._entries or self._capturing():
                return False
            was_written = self._sources is None or versions_of(self._versioned) != self._versions
            if was_written:
                self._update()
            return was_written

    def follow(self) -> None:
        """Bring all copies of weights up to date at the start of a forward or graph replay."""
        with self._lock:
            if not self._entries:
                return
            if self._capturing():
                # A warm-up runs before every capture, and has made the table of weights and copies.
                assert self._table is not None
                self._captured.append(self._table)
            else:
                # An entry vanishes after its module was replaced and freed.
                entry_vanished = len(self._entries) != self._count
                if (
                    entry_vanished
                    or self._sources is None
                    or _addresses_of(self._sources) != self._addresses
                ):
                    self._update()
                else:
                    self.refresh()
            self._compare()

    def _capturing(self) -> bool:
        return self._on_cuda and torch.cuda.is_current_stream_capturing()

    def _update(self) -> None:
        """Make every derived copy of a weight anew, and record its source's address and version."""
        for owner, entry in list(self._entries.items()):
            if all(self._is_like(*pair[:2]) for pair in entry.pairs):
                self._fill(entry.pairs)
            else:  # the weight was cast or moved, so no captured graph reads this copy any more
                self._entries[owner] = self._new_entry(entry.make)
        self._count, pairs = len(self._entries), self._pairs()
        self._sources = [pair[0] for pair in pairs]
        self._versioned = [source for source in self._sources if not source.is_inference()]
        self._versions = versions_of(self._versioned)
        self._addresses = _addresses_of(self._sources)
        self._on_cuda = pairs[0][0].is_cuda
        self._table, self._rows = _table_of(pairs)
        self._finish()

    def _finish(self) -> None:
        """Wait for copies of weights, because the next call may use another CUDA stream."""
        if self._on_cuda and not self._capturing():
            torch.cuda.current_stream(self._pairs()[0][0].device).synchronize()

    def _pairs(self) -> list[Pair]:
        return [pair for entry in self._entries.values() for pair in entry.pairs]

    def _new_entry(self, make: Make) -> _Entry:
        with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be updated
            tensors, pairs = make()
        self._fill(pairs)
        return _Entry(make, tensors, pairs)

    def _compare(self) -> None:
        """Launch the kernel that finds writes that torch does not count, and copies the weights."""
        from .triton_kernels.compare import copy_differences  # needs Triton

        assert self._table is not None
        size = next(iter(self._entries.values())).tensors[0].element_size()
        copy_differences(self._table, self._rows, size)

    def _fill(self, pairs: Sequence[Pair]) -> None:
        """Copy the weight of each pair (weight, copy) into its copy."""
        with torch.no_grad():
            for source, copy in pairs:
                copy.copy_(source)

    def _is_like(self, source: Tensor, copy: Tensor) -> bool:
        """Return whether a weight still has the shape, dtype and device of its derived copy."""
        return (source.shape, source.dtype, source.device) == (copy.shape, copy.dtype, copy.device)


class QuantisedWeights(DerivedWeights):
    """Weights in fp8 (e4m3) with a scale per row, updated whenever their sources change."""

    def of(self, owner: nn.Module, *weights: Tensor) -> tuple[Rows8, ...]:
        """Return the ``weights`` [N, K] of the module ``owner`` in e4m3, with scales [N, 1]."""

        def make() -> tuple[tuple[Tensor, ...], list[Pair]]:
            from .triton_kernels.quantise import E4M3

            values = [torch.empty(x.shape, dtype=E4M3, device=x.device) for x in weights]
            scales = [x.new_empty(len(x), 1, dtype=torch.float32) for x in weights]
            pairs: list[Pair] = list(zip(weights, values, scales, strict=True))
            return (*values, *scales), pairs

        from .triton_kernels.quantise import Rows8

        tensors = self.get(owner, weights, make)
        return tuple(map(Rows8, tensors[: len(weights)], tensors[len(weights) :]))

    def _fill(self, pairs: Sequence[Pair]) -> None:
        from .triton_kernels.quantise import quantise_weights  # needs Triton

        table, rows = _table_of(pairs)
        quantise_weights(table, rows, pairs[0][0].dtype, force=True)

    def _is_like(self, source: Tensor, copy: Tensor) -> bool:
        return (source.shape, source.device) == (copy.shape, copy.device)

    def _compare(self) -> None:
        from .triton_kernels.quantise import quantise_weights  # needs Triton

        assert self._table is not None
        assert self._sources
        quantise_weights(self._table, self._rows, self._sources[0].dtype, force=False)


def _table_of(pairs: Sequence[Pair]) -> tuple[Tensor, int]:
    """Return the table by which a kernel finds weights and copies, and the most rows of a weight.

    The table is int64 [pairs, 8], one row per pair of weight and copy, on the pairs' device.
    """
    rows, device = [_row_of(*pair) for pair in pairs], pairs[0][0].device
    host = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True), max(row[2] for row in rows)


def _row_of(source: Tensor, copy: Tensor, scales: Tensor | None = None) -> list[int]:
    """Return the eight numbers by which a kernel finds a source weight, its copy and its scales.

    The numbers are the two addresses, rows, columns, the copy's row stride, the source's two
    strides (a source may be transposed, expanded, or every second column of something larger), and
    the address of the scales or 0. A vector is described as a matrix of one row.
    """
    shape, strides = (1, *source.shape)[-2:], (0, *source.stride())[-2:]
    stride, last_stride = (0, *copy.stride())[-2:]
    assert last_stride == 1
    scales_address = 0 if scales is None else scales.data_ptr()
    return [source.data_ptr(), copy.data_ptr(), *shape, stride, *strides, scales_address]


def _addresses_of(sources: Sequence[Tensor]) -> list[object]:
    """Return addresses, strides and sizes of ``sources``, which tell whether one was replaced."""
    return [f(source) for f in (Tensor.data_ptr, Tensor.stride, Tensor.numel) for source in sources]
