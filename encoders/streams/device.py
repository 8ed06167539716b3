"""How batches reach a device and run there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


class DeviceQueue:
    """Runs batches on one device: on the CPU each at once, on a GPU one ahead of the results.

    On CUDA pixels are copied from pinned memory on a stream of their own, while the batch before
    them runs on another; both leave the caller's stream alone.

    Attributes:
        ahead: batches that run beyond the one whose results are handed over.
        pins: whether what is sent is to lie in page-locked memory.
        stages: whether pixels are sent as uint8, and normalised and cut on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cuda = self.pins = self.stages = device.type == "cuda"
        self.ahead = int(self._on_cuda)
        if self._on_cuda:
            self._copies, self._runs = _streams(device)

    def begin(self) -> None:
        """Make batches wait for the work that the caller's stream has been given so far."""
        if self._on_cuda:
            self._runs.wait_stream(torch.cuda.current_stream(self.device))

    def hold(self, rows: Tensor) -> Tensor:
        """Return ``rows``, in page-locked memory if the device is a GPU that copies them later."""
        return rows.pin_memory() if self.pins else rows

    def send(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors copied to a CUDA device; for other devices the encoder copies them."""
        if not self._on_cuda:
            return list(parts)
        with torch.cuda.stream(self._copies):
            sent = [part.to(self.device, non_blocking=True) for part in parts]
        self._runs.wait_stream(self._copies)
        for part in sent:
            part.record_stream(self._runs)
        return sent

    def running(self) -> AbstractContextManager[object]:
        """Return the context in which a batch is to be encoded: a stream of its own on CUDA."""
        return torch.cuda.stream(self._runs) if self._on_cuda else nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """Return a CUDA event that comes after everything queued so far; None without CUDA."""
        if not self._on_cuda:
            return None
        # A thread that waits for a blocking event leaves its core to decoders.
        event = torch.cuda.Event(blocking=True)
        event.record(self._runs)
        return event

    def wait(self, mark: torch.cuda.Event | None, results: Sequence[Tensor]) -> None:
        """Wait until the device has passed ``mark``; ``results`` then belong to the caller."""
        if mark is not None:
            mark.synchronize()
            for tensor in results:  # the caller's stream may read it: torch then keeps its memory
                tensor.record_stream(torch.cuda.current_stream(self.device))


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams for copies and for batches, the same ones for all runs on a device.

    torch keeps freed memory, and 32 MiB for cuBLAS, for each stream that was ever used.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
