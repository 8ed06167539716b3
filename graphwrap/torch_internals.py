"""Private functions of torch, each with the reason why no public one can be used.

A call of a graphed encoder takes tens of microseconds on the host, so a public function that takes
several microseconds is not a substitute.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

PoolHandle: TypeAlias = "_POOL_HANDLE"
StreamNumbers: TypeAlias = tuple[int, int, int]
MODULES = "_modules"
SLOTS = ("_parameters", "_buffers", MODULES)
"""Attributes of a module: the dicts of its parameters, its buffers and its submodules."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module: the dicts of its forward hooks, which no public function lists."""
_unended: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture could not be ended, kept as long as the process lives: torch's allocator of
pinned memory, one per process, may query a graph after the encoder that captured it is gone. They
hold no device memory, and there is one for each budget whose capture CUDA invalidated, as it does
when memory runs out. Only :func:`abandon_capture` adds to this list, and nothing reads it."""


def current_stream_numbers(device: torch.device) -> StreamNumbers:
    """Return three numbers that identify the current CUDA stream of ``device``.

    Making a ``torch.cuda.Stream`` object instead would take microseconds per call.
    """
    numbers: StreamNumbers = torch._C._cuda_getCurrentStream(device.index)
    return numbers


def clear_cublas_workspaces() -> None:
    """Free the cuBLAS workspaces, which torch keeps for every CUDA stream that ran a product."""
    torch._C._cuda_clearCublasWorkspaces()


def slots_of(module: nn.Module, kind: str) -> dict[str, object]:
    """Return the dict itself that a module has as ``kind``, a name of ``SLOTS`` or ``HOOKS``.

    Every call of a graphed encoder compares these dicts with their contents at capture. Public
    iterators (``named_parameters``) would walk over all modules in every call, and none has hooks.
    """
    slots: dict[str, object] = vars(module)[kind]
    return slots


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was written in place, as torch counts it for autograd.

    Inference tensors have no such count, and raise a RuntimeError. No public function shows whether
    an encoder wrote to a tensor that it was given, or whether weights were updated.
    """
    return [tensor._version for tensor in tensors]


def abandon_capture(graph: torch.cuda.CUDAGraph, device: int, handle: PoolHandle) -> None:
    """Have the allocator of a device stop recording into a pool whose capture CUDA invalidated.

    ``CUDAGraph.capture_end`` does that for a valid capture, and raises for an invalidated one.

    Args:
        graph: the graph of the capture, which is kept as long as the process lives.
        device: number of the CUDA device.
        handle: the pool.
    """
    _unended.append(graph)
    with suppress(RuntimeError):  # a stream that is not recording has nothing to end
        torch._C._cuda_endAllocateToPool(device, handle)
        torch._C._cuda_releasePool(device, handle)


def bytes_at(address: int, count: int, device: torch.device) -> Tensor:
    """Return a view of ``count`` bytes of device memory, uint8 [count], from ``address`` on.

    The memory has to be torch's own; it may belong to a tensor or lie unused in a pool.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, count)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
