"""The memory of captured graphs, and a graph of one size that reads and writes it.

An arena holds input, metadata and output buffers; every budget uses a prefix of each. All metadata
tensors of a replay lie in one run of bytes, whose layout is fixed by a budget's capacities, so that
the metadata of a grid seen before is written with a single copy. The first tensor says which input
rows are padding: the graph reads it on the device and clears those rows.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from encoders.contract import GraphableEncoder, Metadata
from encoders.streams import capture_stream

from .budgets import Budget
from .outputs import Unit, output_fields, unit_of
from .torch_internals import (
    PoolHandle,
    StreamNumbers,
    abandon_capture,
    bytes_at,
    clear_cublas_workspaces,
    current_stream_numbers,
    versions_of,
)

ALIGN = 16
"""Metadata tensors begin at multiples of this many bytes, the size of the largest dtype, because
``Tensor.view(dtype)`` of bytes needs an offset that the size of the dtype divides."""
PADDING = "__padding__"


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Have Python collect no garbage, which could free tensors of the device during a capture.

    Between the captures of 48 budgets it would take a tenth of a second.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class MetadataFormat:
    """The places of a budget's metadata tensors in the run of bytes that a replay reads.

    Args:
        metadata: the encoder's metadata for no items, padded to the capacities of the budget; that
            of every call has the same names, shapes and dtypes.
        rows: input rows of the budget.
    """

    def __init__(self, metadata: Metadata, rows: int) -> None:
        self._expected = {name: _describe(name, value) for name, value in metadata.items()}
        self.constants = {name: value for name, value in metadata.items() if not value.ndim}
        """The 0-dim tensors: numbers on the host, which capture writes into the graph, so that they
        may depend only on the budget's capacities."""
        self._entries: dict[str, tuple[int, Tensor]] = {}
        self.nbytes = 0
        padding = torch.empty(rows, dtype=torch.bool, device="meta")
        for name, value in {PADDING: padding, **metadata}.items():
            if value.ndim:
                self._entries[name] = self.nbytes, value.to("meta")
                self.nbytes += -(-value.nbytes // ALIGN) * ALIGN

    def views(self, metadata_bytes: Tensor) -> Metadata:
        """Return the metadata tensors by name, as views of ``metadata_bytes``, uint8 [nbytes].

        The bool tensor that says which rows are padding is among them, under ``PADDING``.
        """
        return {
            name: metadata_bytes[start : start + meta_tensor.nbytes]
            .view(meta_tensor.dtype)
            .view(meta_tensor.shape)
            for name, (start, meta_tensor) in self._entries.items()
        }

    def to_bytes(self, metadata: Metadata, rows: int, *, pinned: bool = False) -> Tensor:
        """Return the metadata of one replay as bytes on the host, uint8 [nbytes].

        Args:
            metadata: the encoder's metadata for the items of the replay, padded to the budget.
            rows: input rows of these items; all rows after them are marked as padding.
            pinned: make the tensor in pinned memory.

        Raises:
            ValueError: names, shapes, dtypes or 0-dim numbers of the metadata differ from those at
                capture, so they depend on the grid.
        """
        for name in {**self._expected, **metadata}:
            new, old = _describe(name, metadata.get(name)), self._expected.get(name, "nothing")
            if new != old:
                raise ValueError(
                    f"prepare_encoder_metadata gave {name} as {new} for this grid, the graph has "
                    f"{old}: entries, their shapes and 0-dim numbers must depend on the capacities "
                    "alone, not on the grid"
                )
        metadata_bytes = torch.empty(
            self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned
        )
        for name, view in self.views(metadata_bytes).items():
            if name == PADDING:
                view[:rows], view[rows:] = False, True
            else:
                view.copy_(metadata[name])
        return metadata_bytes


def _describe(name: str, value: object) -> str:
    """Describe what a graph fixes of the metadata entry ``name``: shape and dtype, or a number.

    The text for None, an absent entry, is "nothing". A ``value`` that is neither None nor a tensor
    raises a ValueError.
    """
    if value is None:
        return "nothing"
    if not isinstance(value, Tensor):
        raise ValueError(
            f"prepare_encoder_metadata gave {name}={value!r}: every entry must be a tensor, a "
            "number a 0-dim one"
        )
    return f"{value.dtype} {tuple(value.shape) if value.ndim else value.item()}"


class Arena:
    """Static buffers of one input path of an encoder, as large as its largest budget needs.

    Args:
        counts: the most rows, of input and of the hidden state, tokens and segments of a budget.
        row_shape: shape of one row of the pixels.
        dtype: dtype of the pixels.
        device: device of all buffers.
        metadata_size: bytes of the metadata.
    """

    def __init__(
        self,
        counts: Mapping[Unit, int],
        row_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        metadata_size: int,
    ) -> None:
        self.counts = counts
        self.pixels = torch.zeros(counts["rows"], *row_shape, dtype=dtype, device=device)
        self.metadata_bytes = torch.zeros(metadata_size, dtype=torch.uint8, device=device)
        self.outputs: dict[str, Tensor] = {}

    def output(self, name: str, value: Tensor) -> Tensor:
        """Return as many first rows of the output buffer ``name`` as the tensor ``value`` has.

        The first call allocates the buffer for all budgets.
        """
        if name not in self.outputs:
            count = max(value.shape[0], self.counts[unit_of(name)])
            self.outputs[name] = value.new_zeros(count, *value.shape[1:])
        return self.outputs[name][: value.shape[0]]

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of pixels, metadata and outputs."""
        return [self.pixels, self.metadata_bytes, *self.outputs.values()]

    @property
    def nbytes(self) -> int:
        """The bytes of all static buffers together."""
        return sum(buffer.nbytes for buffer in self.buffers)


class Memory:
    """All memory that the graphs of one encoder share, and the CUDA stream that used it last.

    Graphs compute in one memory pool and never at the same time. If a capture fails so that CUDA
    invalidates it, later graphs get another pool.
    """

    def __init__(self, device: torch.device, has_graphs: bool) -> None:
        self.device = device
        self.stream = capture_stream(device) if has_graphs else None
        """The stream of all captures, because a pool reuses memory only on the stream that freed
        it. None on a backend without graphs."""
        self.arenas: list[Arena] = []
        self.handles: list[PoolHandle] = []
        self.empty = True
        """Whether the memory pool holds no graph yet."""
        self.pool_bytes = 0
        self._reserved = 0
        self._last_use: tuple[torch.cuda.Stream, torch.cuda.Event, StreamNumbers] | None = None
        """The CUDA stream of the last call, an event recorded there after the work of that call,
        and numbers that identify that CUDA stream; None before the first call, and without CUDA."""
        if has_graphs:
            self.renew()

    def renew(self) -> None:
        """Use another memory pool for captures from here on.

        Torch accepts the handle of a pool only while a graph uses that pool.
        """
        self.handles.append(torch.cuda.graph_pool_handle())

    def record(self, graph: torch.cuda.CUDAGraph, body: Callable[[], None]) -> None:
        """Capture into ``graph`` what ``body()`` launches on the current CUDA stream."""
        try:
            mode = "thread_local"
            graph.capture_begin(pool=self.handles[-1], capture_error_mode=mode)
            body()
        except BaseException:
            # Ending a capture that failed may fail, too; the caller gets the error of the capture.
            with contextlib.suppress(RuntimeError):
                self._end(graph)
            raise
        else:
            self._end(graph)
            self.empty = False

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture of ``graph``; raise a RuntimeError if CUDA has invalidated it.

        A capture that CUDA has invalidated cannot be ended: torch's allocators still allocate from
        its pool, and its random generators still act as in a capture. Therefore the device's
        allocator is told to stop, the pool is not used again, and another capture that succeeds
        (one kernel in a pool of its own) resets torch's remaining state.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            abandon_capture(graph, torch.cuda.current_device(), self.handles[-1])
            self.renew()
            with contextlib.suppress(RuntimeError):
                graph, scratch = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    scratch.zero_()
                finally:  # without free memory, even this kernel may fail
                    graph.capture_end()
            raise

    def growth(self) -> int:
        """Return the bytes by which the memory pool has grown since this was last called."""
        reserved = torch.cuda.memory_reserved(self.device) if self.handles else 0
        if reserved == self._reserved:  # a snapshot of all memory takes 3 ms
            return 0
        bytes_before = self.pool_bytes
        self._reserved = reserved
        self.pool_bytes = sum(segment["total_size"] for segment in self._pool_memory())
        return self.pool_bytes - bytes_before

    def _pool_memory(self) -> list[dict[str, int]]:
        """Return the blocks of device memory that torch's allocator holds for the pools of graphs.

        Each is an entry of ``torch.cuda.memory_snapshot``, with ``address`` and ``total_size``.
        """
        pool_handles = set(self.handles)
        segments = torch.cuda.memory_snapshot() if pool_handles else []
        return [
            segment for segment in segments if tuple(segment["segment_pool_id"]) in pool_handles
        ]

    def wait_for_captures(self) -> None:
        """Make the current CUDA stream wait for the warm-ups on the stream of captures."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def wait_for_last_use(self, *, reads: bool) -> None:
        """Make the current CUDA stream wait for the last call, if that ran on another CUDA stream.

        Args:
            reads: wait also for work queued on that CUDA stream since then, because it may be
                reading results that are views of the static buffers.
        """
        if self._last_use is None or self._last_use[2] == current_stream_numbers(self.device):
            return
        stream, event, _ = self._last_use
        if reads:
            event.record(stream)
        torch.cuda.current_stream(self.device).wait_event(event)

    def mark_use(self) -> None:
        """Record that the work queued so far on the current CUDA stream uses the graphs' memory."""
        if self.device.type != "cuda":
            return
        numbers = current_stream_numbers(self.device)
        if self._last_use is None or self._last_use[2] != numbers:
            event = self._last_use[1] if self._last_use is not None else torch.cuda.Event()
            stream = torch.cuda.current_stream(self.device)
            for buffer in [buffer for arena in self.arenas for buffer in arena.buffers]:
                if buffer.is_cuda:
                    buffer.record_stream(stream)
            self._last_use = stream, event, numbers
        stream, event, _ = self._last_use
        event.record(stream)

    def poison(self) -> None:
        """Fill static buffers and pool with NaN, so that tests see if a result reads old values."""
        for arena in self.arenas:
            for buffer in arena.buffers:
                # The bytes 0xFF are NaN in every floating dtype.
                buffer.view(torch.uint8).fill_(0xFF)
        if self.handles:
            torch.cuda.synchronize(self.device)
        for segment in self._pool_memory():
            bytes_at(segment["address"], segment["total_size"], self.device).fill_(0xFF)


@dataclass
class BudgetGraph:
    """One budget and its CUDA graph, which reads and writes a prefix of each static buffer.

    On a backend without graphs ``captured`` is None, and the encoder itself runs on the buffers.

    An instance is in no cycle of references: a cycle would keep the buffers and the pool of the
    graphs in memory after ``GraphedEncoder.release()``, until Python collects garbage.
    """

    budget: Budget
    format: MetadataFormat
    encoder: GraphableEncoder
    arena: Arena
    returned: tuple[str, ...]
    """The output fields that are copied into static buffers."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Output buffers of this budget by field name, known after the first run of the encoder."""
    captured: torch.cuda.CUDAGraph | None = None
    writes_metadata: bool = False
    """Whether the encoder writes to its metadata, so that every replay needs them copied anew."""

    def __post_init__(self) -> None:
        self.pixels = self.arena.pixels[: self.budget.rows]
        self.metadata_bytes = self.arena.metadata_bytes[: self.format.nbytes]
        self._metadata = self.format.views(self.metadata_bytes)
        self._padding = self._metadata.pop(PADDING)[:, None]
        flat = self.pixels.view(self.budget.rows, -1)
        divides_by_8 = flat.shape[1] * flat.itemsize % torch.int64.itemsize == 0
        self._words = flat.view(torch.int64) if divides_by_8 else flat
        """The pixels, one input row per row, as int64 if the bytes of a row divide by eight, else
        as they are: clearing four bfloat16 values at a time is faster."""

    def body(self) -> None:
        """Clear the padded rows, run the encoder, and copy its outputs into the static buffers.

        The encoder may remove entries of the metadata that it is given, or write to them.
        """
        self._words.masked_fill_(self._padding, 0)  # an earlier call may have left NaN there
        numbers = {name: number.clone() for name, number in self.format.constants.items()}
        versions = versions_of([self.metadata_bytes])
        output = self.encoder(self.pixels, encoder_metadata={**self._metadata, **numbers})
        self.writes_metadata |= versions_of([self.metadata_bytes]) != versions
        for name, value in output_fields(output, self.returned).items():
            self.outputs[name] = self.arena.output(name, value)
            self.outputs[name].copy_(value)

    def replay(self) -> None:
        """Replay the graph; on a backend without graphs, run :meth:`body` itself."""
        if self.captured is not None:
            self.captured.replay()
        else:
            self.body()

    def capture(self, memory: Memory, *, warms_up: bool) -> None:
        """Run :meth:`body` once, then capture it; on a backend without graphs, only run it.

        ``torch.cuda.graph`` is not used: it collects garbage and empties the cache for every graph.
        Here torch's cache of free memory is emptied once, after the first run of the largest graph,
        because a capture cannot allocate from it.

        torch keeps a cuBLAS workspace (32 MiB on Hopper) per CUDA stream that ran a matrix product.
        This is dropped before capture, so that the graph gets a workspace of its own in its pool,
        and after capture, so that the next graph reuses that memory and ``release()`` frees it.

        Args:
            memory: the pool of the graph, and the CUDA stream it is captured on; a
                ``memory.stream`` of None means that there are no graphs.
            warms_up: whether to run :meth:`body` before the capture, in which nothing can be chosen
                or kept.
        """
        if memory.stream is None:
            return self.body()
        memory.stream.wait_stream(torch.cuda.current_stream(memory.device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(memory.stream):
                if warms_up:
                    self.body()
                clear_cublas_workspaces()
                if memory.empty:
                    torch.cuda.empty_cache()
                memory.record(graph, self.body)
        finally:
            clear_cublas_workspaces()
        self.captured = graph
        return None
