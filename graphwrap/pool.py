"""The memory that graphs compute in: one pool for all, held by the allocator, not by tensors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch

Handle: TypeAlias = tuple[int, int]
BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture could not be ended: torch's host allocator may go on asking them."""


def _new_handles() -> list[Handle]:
    return [torch.cuda.graph_pool_handle()]


@dataclass
class Pool:
    """What all graphs of a session share: one handle, and another after a capture that broke it."""

    device: torch.device
    handles: list[Handle] = field(default_factory=_new_handles)
    empty: bool = True
    """Whether nothing has been captured into it."""

    def record(self, graph: torch.cuda.CUDAGraph, body: Callable[[], None]) -> None:
        """Capture what ``body`` launches on the current stream.

        Raises:
            RuntimeError: what the body raised, or CUDA, and nothing is being captured any more.
        """
        with _no_collection():
            try:
                mode = "thread_local"
                graph.capture_begin(pool=cast(Any, self.handles[-1]), capture_error_mode=mode)
                body()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a capture that failed: said already
                    self._end(graph)
                raise
            self._end(graph)
        self.empty = False

    def renew(self) -> None:
        """Take another pool: torch takes one up again only while a graph is using it."""
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

        One that CUDA has invalidated cannot be: it leaves the allocators recording into the pool,
        and the random numbers' offset as in a capture. What the device's allocator keeps is given
        back by hand, the pool is not used again, and a capture that succeeds sets the rest right.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            index = torch.cuda.current_device()
            with contextlib.suppress(RuntimeError):  # not recording: nothing to end
                torch._C._cuda_endAllocateToPool(index, self.handles[-1])
                torch._C._cuda_releasePool(index, self.handles[-1])
            BROKEN.append(graph)
            self.renew()
            with contextlib.suppress(RuntimeError):
                _succeed()
            raise


def _succeed() -> None:
    """A capture of one fill, in a pool of its own."""
    graph, scratch = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    graph.capture_begin(capture_error_mode="thread_local")
    scratch.zero_()
    graph.capture_end()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage may hold graphs and tensors of the device, which must not be freed in a capture."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
