"""The queue of a stream's batches on one device, which copies and runs them in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..cuda_streams import item_streams


class DeviceQueue:
    """Runs batches on one device; on a GPU, the next batch is queued before results are read.

    On CUDA, pixels are copied from page-locked memory, and resized, on one CUDA stream while the
    batch before them runs on another, and results of the batch before that are copied to the host
    on a third one. None is the caller's current stream.

    Attributes:
        ahead: number of batches that are queued after the one whose results are read: 0 or 1.
        pins: whether tensors for ``send`` should lie in page-locked memory.
        stages: whether images are sent as uint8, and made the input of the encoder on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cuda = self.pins = self.stages = device.type == "cuda"
        self.ahead = int(self._on_cuda)
        if self._on_cuda:
            self._copies, self._runs, self._returns = item_streams(device)

    def begin(self) -> None:
        """Make all later batches wait for the work queued so far on the caller's CUDA stream.

        The default CUDA stream waits, too: threads read the caller's items after its work.
        """
        if self._on_cuda:
            caller = torch.cuda.current_stream(self.device)
            self._runs.wait_stream(caller)
            torch.cuda.default_stream(self.device).wait_stream(caller)

    def hold(self, rows: Tensor) -> Tensor:
        """Return pixels ``rows``, in page-locked memory if ``send`` will copy them to a GPU."""
        return rows.pin_memory() if self.pins else rows

    def staging(self) -> AbstractContextManager[object]:
        """Return the context manager to stage an item in: on a GPU, a CUDA stream for copies."""
        return torch.cuda.stream(self._copies) if self._on_cuda else nullcontext()

    def mark_staged(self) -> torch.cuda.Event | None:
        """Return a CUDA event that comes after what was staged so far; None without CUDA."""
        return self._copies.record_event() if self._on_cuda else None

    def take(self, marks: Iterable[torch.cuda.Event | None]) -> None:
        """Let later batches read the tensors of items that were staged before the events.

        The caller keeps these tensors until it has waited for :meth:`mark`, so that torch does not
        reuse their memory earlier.
        """
        for mark in marks:
            if mark is not None:
                self._runs.wait_event(mark)

    def send(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of tensors on a CUDA device; for other devices, the tensors themselves."""
        if not self._on_cuda:
            return list(parts)
        with torch.cuda.stream(self._copies):
            copies = [part.to(self.device, non_blocking=True) for part in parts]
        self._runs.wait_stream(self._copies)
        for part in copies:
            part.record_stream(self._runs)
        return copies

    def running(self) -> AbstractContextManager[object]:
        """Return the context manager to encode a batch in: on a GPU, a CUDA stream for batches."""
        return torch.cuda.stream(self._runs) if self._on_cuda else nullcontext()

    def fetch(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors on the host, whose values are there after the next :meth:`mark`.

        Call it after batches whose results they are, inside :meth:`running`. Tensors on the CPU are
        returned themselves.
        """
        if not self._on_cuda:
            return {name: tensor.cpu() for name, tensor in tensors.items()}
        self._returns.wait_stream(self._runs)
        fetched: dict[str, Tensor] = {}
        with torch.cuda.stream(self._returns):
            for name, tensor in tensors.items():
                host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                fetched[name] = host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._returns)  # later batches must not reuse its memory yet
        return fetched

    def mark(self, *, fetched: bool = False) -> torch.cuda.Event | None:
        """Return a CUDA event that comes after all batches queued so far; None without CUDA.

        If ``fetched``, it also comes after the copies that :meth:`fetch` queued.
        """
        if not self._on_cuda:
            return None
        # Waiting for a blocking event leaves the core to threads that decode images.
        event = torch.cuda.Event(blocking=True)
        event.record(self._returns if fetched else self._runs)
        return event

    def wait(self, mark: torch.cuda.Event | None, results: Sequence[Tensor]) -> None:
        """Wait until the device has reached an event, after which its results may be read.

        Args:
            mark: what ``mark`` returned after the batch; None waits for nothing.
            results: the output tensors of the batch, which the caller's CUDA stream may then read.
        """
        if mark is not None:
            mark.synchronize()
            for tensor in results:  # torch must not reuse the memory before the caller reads it
                tensor.record_stream(torch.cuda.current_stream(self.device))
