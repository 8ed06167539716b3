"""A CUDA graph of one size, which reads and writes the first rows of the static buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from encoders.contract import GraphableEncoder

from .budgets import Budget
from .buffers import PADDING, Arena, Memory, MetadataFormat
from .outputs import output_fields
from .torch_internals import clear_cublas_workspaces, versions_of


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

    def capture(self, memory: Memory) -> None:
        """Run :meth:`body` once, then capture it; on a backend without graphs, only run it.

        ``torch.cuda.graph`` is not used: it collects garbage and empties the cache for every graph.
        Here torch's cache of free memory is emptied once, after the first run of the largest graph,
        because a capture cannot allocate from it.

        torch keeps a cuBLAS workspace (32 MiB on Hopper) per stream that ran a matrix product. This
        is dropped before capture, so that the graph gets a workspace of its own in its pool, and
        after capture, so that the next graph reuses that memory and ``release()`` frees it.

        Args:
            memory: the pool of the graph, and the stream it is captured on; a ``memory.stream`` of
                None means that there are no graphs.
        """
        if memory.stream is None:
            return self.body()
        memory.stream.wait_stream(torch.cuda.current_stream(memory.device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(memory.stream):
                self.body()
                clear_cublas_workspaces()
                if memory.empty:
                    torch.cuda.empty_cache()
                memory.record(graph, self.body)
        finally:
            clear_cublas_workspaces()
        self.captured = graph
        return None
