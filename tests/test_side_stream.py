"""Modules beside the blocks: where they run, who waits for whom, and what an error leaves."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch import nn

from encoders import side_stream as module
from encoders.side_stream import MOST_ROWS, side_stream


class Streams:
    """Two streams of a capture: what ran on which, and which waited for which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.broken = False
        self.main, self.side = Stream("main", self), Stream("side", self)
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(module, "_stream", lambda device: self.side)

    @contextlib.contextmanager
    def on(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    """One stream, which notes for whom it waits."""

    device = torch.device("cpu")

    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self.streams = name, streams

    def wait_stream(self, other: Stream) -> None:
        if self.streams.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.streams.log.append(f"{self.name} waits for {other.name}")


class Noted(nn.Module):
    """Doubles its input and notes the stream that it ran on."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.streams.log.append(f"runs on {self.streams.current.name}")
        return 2 * x


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_without_a_capture_a_module_is_called_in_place():
    x = torch.randn(3, 4)
    layer = nn.Linear(4, 2)
    with side_stream() as run:
        assert torch.equal(run(layer, x), layer(x))


def test_in_a_capture_modules_run_on_a_second_stream(streams: Streams):
    x = torch.ones(3, 4)
    with side_stream() as run:
        assert torch.equal(run(Noted(streams), x), 2 * x)
    assert streams.log == ["side waits for main", "runs on side", "main waits for side"]


def test_a_second_module_waits_for_the_first_one(streams: Streams):
    with side_stream() as run:
        for _ in range(2):
            run(Noted(streams), torch.ones(3, 4))
    once = ["side waits for main", "runs on side", "main waits for side"]
    assert streams.log == 2 * once


def test_many_rows_stay_on_the_stream_of_the_blocks(streams: Streams):
    with side_stream() as run:
        run(Noted(streams), torch.ones(MOST_ROWS + 1, 1))
    assert streams.log == ["runs on main"]


def fail_after_a_module(streams: Streams, error: Exception, breaks: bool = False) -> None:
    with side_stream() as run:
        run(Noted(streams), torch.ones(3, 4))
        streams.broken = breaks
        raise error


def test_an_error_is_raised_after_the_streams_have_joined(streams: Streams):
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        fail_after_a_module(streams, torch.OutOfMemoryError("no memory"))
    assert streams.log[-1] == "main waits for side"


def test_a_broken_capture_raises_its_own_error(streams: Streams):
    with pytest.raises(ValueError, match="its own"):
        fail_after_a_module(streams, ValueError("its own"), breaks=True)


def test_a_state_is_held_until_the_streams_have_joined(streams: Streams):
    x = torch.ones(3, 4)
    held = weakref.ref(x)
    with side_stream() as run:
        run(Noted(streams), x)
        del x
        assert held() is not None
    assert held() is None
