"""Names of torch that are not public, each with the reason why a public one does not serve.

A call of a graphed encoder takes tens of microseconds on the host, so a public function that takes
several of them is no substitute.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

StreamNumbers: TypeAlias = tuple[int, int, int]
PoolHandle: TypeAlias = tuple[int, int]
MODULES = "_modules"
SLOTS = ("_parameters", "_buffers", MODULES)
"""The dicts of a module that hold what it computes with."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""The dicts of a module that hold its hooks; no public function lists them."""
_unended: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture could not be ended. Torch has one allocator of pinned memory per process,
which may query them after their owner is gone, so they live as long as the process:
:func:`abandon_capture` adds to this list, and nothing else reads or writes it."""


def autocast_is_on() -> bool:
    """Return whether autocast is on for any kind of device; public functions ask for each kind."""
    return torch._C._is_any_autocast_enabled()


def makes_tensors_on_cpu() -> bool:
    """Return whether tensors are made on the CPU by default.

    On the CPU of a laptop this takes 0.4 us, and ``torch.get_default_device()`` 5.9 us.
    """
    overridden = torch._C._len_torch_function_stack() > 0
    return not overridden and torch._C._get_default_device() == "cpu"


def current_stream_numbers(device: torch.device) -> StreamNumbers:
    """Return the identity of the current stream as numbers: a Stream object takes microseconds."""
    return cast(StreamNumbers, torch._C._cuda_getCurrentStream(device.index))


def clear_cublas_workspaces() -> None:
    """Drop the workspaces that torch keeps for every stream that ever multiplied."""
    torch._C._cuda_clearCublasWorkspaces()


def slots_of(module: nn.Module, kind: str) -> dict[str, Any]:
    """Return the dict itself that a module keeps under a name of ``SLOTS`` or ``HOOKS``.

    Every call compares these dicts with earlier ones. The public iterators walk over all modules
    anew, and none yields hooks.
    """
    return cast("dict[str, Any]", vars(module)[kind])


def compiled(module: nn.Module, times: int) -> Callable[..., object]:
    """Return a module that torch compiles up to so many times, once for each shape of its inputs.

    By default torch compiles a function at most eight times, and the setting has no public name.
    """
    limits = torch._dynamo.config.patch(recompile_limit=times, accumulated_recompile_limit=times)
    return cast("Callable[..., object]", limits(torch.compile(module, dynamic=False)))


def abandon_capture(graph: torch.cuda.CUDAGraph, device: int, handle: PoolHandle) -> None:
    """Have the allocator of a device stop recording into a pool whose capture CUDA invalidated.

    ``CUDAGraph.capture_end`` does that for a capture that is valid, and raises for this one. The
    graph is kept as long as the process lives.
    """
    _unended.append(graph)
    with suppress(RuntimeError):  # a stream that is not recording has nothing to end
        torch._C._cuda_endAllocateToPool(device, handle)
        torch._C._cuda_releasePool(device, handle)


def bytes_at(address: int, count: int, device: torch.device) -> Tensor:
    """Return memory of torch's allocator, uint8 [count], although no tensor refers to it."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, count)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
