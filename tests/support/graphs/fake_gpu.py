"""A GPU for the bookkeeping of captures: graphs are runs on static buffers, times are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphwrap.buffers import BudgetGraph, Memory
from graphwrap.encoder_forms import capacity_metadata


class FakeGpu:
    """Counts what is captured and timed; every call takes ``ms``, whatever it does."""

    def __init__(self) -> None:
        self.ms = 1.0
        self.timed = 0
        self.captured: list[int] = []
        """The tokens of the budgets captured, in order."""

    def milliseconds(self, call: Callable[[], object], device: torch.device) -> float:
        call()
        self.timed += 1
        return self.ms

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of CUDA for encoders on the CPU."""

        def capture(graph: BudgetGraph, memory: Memory, *, warms_up: bool) -> None:
            self.captured.append(graph.budget.tokens)
            empty = capacity_metadata(graph.encoder, graph.budget, [])
            graph.metadata_bytes.copy_(graph.format.to_bytes(empty, rows=0))
            graph.body()

        def with_stream(memory: Memory, device: torch.device, has_graphs: bool) -> None:
            make(memory, device, False)
            memory.stream = object() if has_graphs else None  # type: ignore[assignment]

        make: Any = Memory.__init__
        patch.setattr("graphwrap.settings.resolve_backend", lambda backend, device: "cudagraph")
        patch.setattr(Memory, "__init__", with_stream)
        patch.setattr(Memory, "wait_for_captures", lambda memory: None)
        patch.setattr(BudgetGraph, "capture", capture)
        patch.setattr("graphwrap.measuring._milliseconds", self.milliseconds)
