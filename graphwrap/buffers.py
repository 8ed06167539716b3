"""The memory of captured graphs: static buffers, and the pool that graphs compute in.

The arena holds input, metadata and output buffers; every budget uses a prefix of each. The metadata
of a replay is one block of bytes, laid out by the shapes that a budget's capacities give, so that a
grid seen before is written with a single copy. Its first entry says which input rows are padding:
the graph reads it on the device and clears those rows.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from encoders.contract import Metadata

ALIGN = 16
PADDING = "__padding__"
Handle: TypeAlias = tuple[int, int]
BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture could not be ended, kept because torch's host allocator may ask them."""


class _Entry(NamedTuple):
    """Where one metadata entry lies in the block, in bytes."""

    start: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """Where each metadata entry of one budget lies in the block of bytes."""

    entries: dict[str, _Entry]
    constants: Metadata
    """0-dim entries: on the host, baked into the graph, decided by the capacities alone."""
    nbytes: int

    @classmethod
    def of(cls, metadata: Metadata, rows: int) -> Layout:
        """Lay out what ``prepare_encoder_metadata`` gives for a budget's capacities.

        Args:
            metadata: of an empty grid.
            rows: input rows of the budget.

        Raises:
            ValueError: an entry that is not a tensor.
        """
        _check_tensors(metadata)
        constants = {name: value for name, value in metadata.items() if not value.ndim}
        entries = {PADDING: _Entry(0, rows, (rows,), torch.bool)}
        offset = -(-rows // ALIGN) * ALIGN
        for name, value in metadata.items():
            if value.ndim:
                end = offset + value.nbytes
                entries[name] = _Entry(offset, end, tuple(value.shape), value.dtype)
                offset = -(-end // ALIGN) * ALIGN
        return cls(entries, constants, offset)

    def views(self, block: Tensor) -> Metadata:
        """Return the entries as tensors inside a block of bytes."""
        return {
            name: block[start:end].view(dtype).view(shape)
            for name, (start, end, shape, dtype) in self.entries.items()
        }

    def write(self, block: Tensor, metadata: Metadata, rows: int) -> None:
        """Write a call's metadata into a block of bytes on the host.

        Args:
            block: the bytes.
            metadata: of the call's grid, padded to the budget's capacities.
            rows: real input rows of the call; those beyond are padding.

        Raises:
            ValueError: entries, or an entry's shape, dtype or constant, are not those that the
                graph was made for.
        """
        views = self.views(block)
        padding = views.pop(PADDING)
        padding[:rows] = False
        padding[rows:] = True
        _check_tensors(metadata)
        expected = {*self.constants, *views}
        if metadata.keys() != expected:
            raise ValueError(
                f"prepare_encoder_metadata gave the entries {sorted(metadata)} for this grid and "
                f"{sorted(expected)} for an empty one: they must not depend on the grid"
            )
        for name, constant in self.constants.items():
            if metadata[name].shape != () or not torch.equal(metadata[name], constant):
                raise ValueError(
                    f"prepare_encoder_metadata gave {name}={metadata[name].tolist()}: the graph "
                    f"has {constant.item()}; it must depend on the capacities alone"
                )
        for name, view in views.items():
            value = metadata[name]
            if value.shape != view.shape or value.dtype != view.dtype:
                raise ValueError(
                    f"prepare_encoder_metadata gave {name} as {value.dtype} {tuple(value.shape)}, "
                    f"the graph has {view.dtype} {tuple(view.shape)}: shapes must depend on the "
                    "capacities alone"
                )
            view.copy_(value)


def _check_tensors(metadata: Metadata) -> None:
    for name, value in metadata.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"prepare_encoder_metadata gave {name}={value!r}: every entry must be a tensor, a "
                "number a 0-dim one"
            )


class Arena:
    """Static buffers as large as the largest budget needs.

    Args:
        rows: input rows.
        row_shape: trailing shape of the input.
        dtype: of the input.
        device: of all buffers.
        block_bytes: bytes of metadata.
    """

    def __init__(
        self,
        rows: int,
        row_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        block_bytes: int,
    ) -> None:
        self.pixels = torch.zeros(rows, *row_shape, dtype=dtype, device=device)
        self.block = torch.zeros(block_bytes, dtype=torch.uint8, device=device)
        self.outputs: dict[str, Tensor] = {}

    def output(self, name: str, like: Tensor) -> Tensor:
        """Return as long a prefix of a field's buffer as ``like``, whose first call makes it."""
        if name not in self.outputs:
            self.outputs[name] = torch.zeros_like(like, memory_format=torch.contiguous_format)
        return self.outputs[name][: like.shape[0]]

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers."""
        return [self.pixels, self.block, *self.outputs.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def mark_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from others until the work that the stream was given is done."""
        for buffer in self.buffers:
            if buffer.is_cuda:
                buffer.record_stream(stream)

    def poison(self) -> None:
        """Fill everything with NaN (for tests): no result may change."""
        for buffer in (self.pixels, *self.outputs.values()):
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
        self.block.fill_(0xFF)


def _new_handles() -> list[Handle]:
    return [torch.cuda.graph_pool_handle()]


@dataclass
class Pool:
    """The device memory that all graphs share; a capture that breaks it starts another one."""

    device: torch.device
    handles: list[Handle] = field(default_factory=_new_handles)
    empty: bool = True
    """Whether nothing has been captured into it."""

    def record(self, graph: torch.cuda.CUDAGraph, body: Callable[[], None]) -> None:
        """Capture what ``body`` launches on the current stream.

        Raises:
            RuntimeError: an error of the body or of CUDA; nothing is being captured any more.
        """
        with _no_collection():
            try:
                mode = "thread_local"
                graph.capture_begin(pool=cast(Any, self.handles[-1]), capture_error_mode=mode)
                body()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture failed: its error is raised
                    self._end(graph)
                raise
            self._end(graph)
        self.empty = False

    def renew(self) -> None:
        """Take another pool: torch uses one again only while a graph is using it."""
        self.handles.append(torch.cuda.graph_pool_handle())

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(segment["total_size"] for segment in self._segments())

    def poison(self) -> None:
        """Fill every page with NaN (for tests): nothing in it outlives a replay."""
        for segment in self._segments():
            storage = torch._C._construct_storage_from_data_pointer(
                segment["address"], self.device, segment["total_size"]
            )
            torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage).fill_(0xFF)

    def _segments(self) -> list[dict[str, int]]:
        ours = set(self.handles)
        parts = torch.cuda.memory_snapshot()
        return [part for part in parts if tuple(part["segment_pool_id"]) in ours]

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture.

        A capture that CUDA has invalidated cannot be ended: the allocators go on recording into the
        pool, and random numbers are drawn as in a capture. So what the device's allocator keeps is
        given back by hand, the pool is not used again, and a capture that succeeds resets the rest.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            index = torch.cuda.current_device()
            with contextlib.suppress(RuntimeError):  # it is not recording: nothing to end
                torch._C._cuda_endAllocateToPool(index, self.handles[-1])
                torch._C._cuda_releasePool(index, self.handles[-1])
            BROKEN.append(graph)
            self.renew()
            with contextlib.suppress(RuntimeError):
                _capture_successfully()
            raise


def _capture_successfully() -> None:
    """Capture one fill, in a pool of its own."""
    graph, scratch = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    graph.capture_begin(capture_error_mode="thread_local")
    scratch.zero_()
    graph.capture_end()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Switch garbage collection off: it could free tensors of the device during a capture."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
