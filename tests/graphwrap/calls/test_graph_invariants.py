"""What graphs are sure of inside: capacities, metadata of one shape, calls ordered over streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from encoders.contract import Metadata
from tests.support.graphs.cases import executor_of, pixels_for, static, toy
from tests.support.towers.toy_encoder import ToyEncoder

# --- our own invariants ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "name"),
    [
        ("tokens", "tokens"),
        ("segments", "segments"),
        ("longest_segment", "longest segment"),
        ("windows", "windows"),
    ],
)
def test_what_does_not_fit_a_budget_is_never_written_there(
    monkeypatch: pytest.MonkeyPatch, capacity: str, name: str
) -> None:
    """As if packing were wrong: a graph would cut it off without a word."""
    graphed = toy([8], max_frames_per_batch=4).capture(progress=False)
    grids = [[2, 1, 6]]
    pixels = pixels_for(graphed.encoder, grids)
    specs = graphed.encoder.item_specs
    executor_of(graphed).schedule(grids)  # packed before anything is wrong
    field = {"tokens": "output_tokens"}.get(capacity, capacity)
    monkeypatch.setattr(
        graphed.encoder,
        "item_specs",
        lambda grid: [spec._replace(**{field: 1000}) for spec in specs(grid)],
    )
    with pytest.raises(AssertionError, match=rf"packing put Batch\(.*\) into .*: over its {name}"):
        graphed(pixels, grids)


class Fickle(ToyEncoder):
    """Metadata of a call that differ from the empty grid's in one way."""

    def __init__(self, change: Callable[[Metadata], object]) -> None:
        super().__init__()
        self.change = change

    def prepare_encoder_metadata(self, grid_thw: Any, **capacities: Any) -> Metadata:
        metadata = super().prepare_encoder_metadata(grid_thw, **capacities)
        if len(grid_thw):
            self.change(metadata)
        return metadata


FICKLE: dict[str, tuple[Callable[[Any], object], str]] = {
    "an entry less": (lambda m: m.pop("first"), r"gave first as nothing for this grid, the graph"),
    "an entry more": (
        lambda m: m.update(extra=torch.zeros(2)),
        r"gave extra as torch.float32 \(2,\) for this grid, the graph has nothing: .*alone",
    ),
    "a number": (lambda m: m.update(first=3), "gave first=3: every entry must be"),
    "a shape": (lambda m: m.update(first=m["first"][:2]), r"gave first as torch.int64 \(2,\)"),
    "a constant": (
        lambda m: m["max_seqlen"].add_(1),
        "gave max_seqlen as torch.int32 17 .*, the graph has torch.int32 16",
    ),
    "a constant's shape": (
        lambda m: m.update(max_seqlen=torch.tensor([16])),
        r"gave max_seqlen as",
    ),
}


@pytest.mark.parametrize("how", FICKLE)
def test_metadata_that_depend_on_more_than_capacities_are_refused(how: str) -> None:
    change, message = FICKLE[how]
    graphed = static(Fickle(change), [8], max_frames_per_batch=1)
    with pytest.raises(ValueError, match=rf"prepare_encoder_metadata .*{message}"):
        graphed(torch.zeros(6, 3), [[1, 1, 6]])


def test_metadata_that_are_no_tensors_are_refused_at_capture() -> None:
    class Plain(ToyEncoder):
        def prepare_encoder_metadata(self, grid_thw: Any, **capacities: Any) -> Any:
            return {**super().prepare_encoder_metadata(grid_thw, **capacities), "n": 3}

    with pytest.raises(ValueError, match="prepare_encoder_metadata gave n=3: every entry must be"):
        static(Plain(), [8]).capture(progress=False)


# --- streams --------------------------------------------------------------------------------------


class Stream:
    """Stands in for a CUDA stream: notes which events it waits for."""

    device_index, device_type = 0, 1

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.waits: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waits.append(event)


class Event:
    def __init__(self) -> None:
        self.recorded: list[object] = []

    def record(self, stream: object) -> None:
        self.recorded.append(stream)


def test_another_stream_waits_for_capture_and_for_failed_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = [Stream(number) for number in range(3)]
    current = [streams[0]]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    numbers = "_cuda_getCurrentStream"  # torch without CUDA has no such function
    monkeypatch.setattr(
        torch._C, numbers, lambda index: (current[0].stream_id, index, 1), raising=False
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    graphed = toy().capture(progress=False)
    captured = graphed._captured
    captured.memory.device = torch.device("cuda", 0)
    captured.memory.mark_use()  # as capture ends
    event = captured.memory._last_use[1]
    assert event.recorded == streams[:1]
    monkeypatch.setattr(captured.paths["image"], "execute", lambda *args: 1 / 0)
    for stream in streams[1:]:
        current[0] = stream
        with pytest.raises(ZeroDivisionError):
            graphed(torch.zeros(6, 3), [[1, 1, 6]])
        assert stream.waits == [event]
    assert event.recorded == streams
