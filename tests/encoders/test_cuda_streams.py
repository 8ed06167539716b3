"""Graphs are captured on CUDA streams on which no thread copies or resizes images."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from encoders import cuda_streams
from encoders.accelerated.attention import choices
from encoders.cuda_streams import capture_stream, item_streams
from graphwrap.buffers import Memory

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """CUDA whose 32 streams are given out in turn, as torch does."""
    cuda, numbers = MagicMock(), count()
    pool = [MagicMock(name=f"stream {number}") for number in range(32)]
    cuda.Stream.side_effect = lambda *_: pool[next(numbers) % 32]
    cuda.current_device.return_value = 0
    cuda.Event.return_value.elapsed_time.return_value = 0.1
    monkeypatch.setattr(torch, "cuda", cuda)
    cuda_streams._made.cache_clear()
    yield cuda
    cuda_streams._made.cache_clear()


def test_captures_have_no_cuda_stream_of_a_stream_of_items() -> None:
    captures = [capture_stream(DEVICE) for _ in range(100)]
    assert len(set(map(id, captures))) == 29
    assert not {*map(id, captures)} & {*map(id, item_streams(DEVICE))}


def test_graphs_and_timings_are_captured_on_such_streams(cuda: MagicMock) -> None:
    taken, used = item_streams(DEVICE), list[Any]()
    cuda.stream.side_effect = lambda stream: used.append(stream) or MagicMock()
    for _ in range(40):
        used.append(Memory(DEVICE, has_graphs=True).stream)
        choices.graph_milliseconds(lambda: None)
    assert len(used) == 80
    assert not [stream for stream in used if stream in taken]


def test_threads_that_begin_at_once_share_the_streams_of_items() -> None:
    found, barrier = list[Any](), threading.Barrier(4)

    def work() -> None:
        barrier.wait(10)
        found.append(item_streams(DEVICE))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
