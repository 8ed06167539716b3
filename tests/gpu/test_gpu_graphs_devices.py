"""CUDA graphs beside other GPUs, other streams and other modes than those they were captured in."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from graphwrap import GraphedEncoder
from tests.gpu.gpu_towers import (
    GRAPHED,
    NEEDS_CUDA,
    budgets_of,
    calls_of,
    new_tower,
    on_gpu,
    replaying,
    tower,
)
from tests.support.graphs.outputs import (
    EVERY_FIELD,
    assert_same_bits,
    copy_of,
    fields,
    worst_distance,
)

pytestmark = NEEDS_CUDA
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture
def elsewhere() -> Iterator[torch.device]:
    """A device that is not the current one."""
    with torch.cuda.device(0):
        yield torch.device("cuda", 1)


# --- another GPU ----------------------------------------------------------------------------------


@two_gpus
def test_pixels_on_another_gpu_are_refused(elsewhere: torch.device) -> None:
    encoder = tower("qwen3_vl")
    graphed = replaying(encoder, [64])
    pixels = on_gpu(encoder, [[1, 8, 8]])
    with pytest.raises(ValueError, match=r"on cuda:1: the graphs take .* or cuda:0; pass"):
        graphed(pixels.to(elsewhere), [[1, 8, 8]])
    graphed.release()


@two_gpus
@pytest.mark.parametrize("name", GRAPHED)
def test_an_encoder_on_another_gpu_gives_the_same_answers(
    name: str, elsewhere: torch.device
) -> None:
    encoder = new_tower(name).to(elsewhere)
    before = torch.cuda.memory_allocated(0)
    graphed = replaying(encoder, budgets_of(name))
    for grids in calls_of(name).values():
        pixels = on_gpu(encoder, grids)
        for given in (pixels.to(elsewhere), pixels.cpu()):
            output = graphed(given, grids)
            assert {value.device for value in fields(output).values()} == {elsewhere}
            graphed._poison()
            assert_same_bits(graphed(given, grids), output)
            with torch.cuda.device(elsewhere):
                assert worst_distance(output, encoder(given.to(elsewhere), grids)) <= 2e-2
        del pixels
    assert graphed.stats().eager_items == 0
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) <= before + 2**20
    graphed.release()


# --- other streams --------------------------------------------------------------------------------


def test_a_first_call_waits_for_an_unmeasured_capture(
    tmp_path: Path,
) -> None:
    """Nothing in such a capture waits for the device: its last warm-up may still run."""
    encoder, grids = tower("qwen2_5_vl"), [[1, 16, 26]]
    pixels = on_gpu(encoder, grids)
    measured = GraphedEncoder(encoder, [256], outputs=EVERY_FIELD).capture(progress=False)
    measured.save_table(tmp_path / "table.json")
    answer = copy_of(measured(pixels, grids))
    measured.release()
    for _ in range(5):
        graphed = GraphedEncoder(encoder, [256], outputs=EVERY_FIELD)
        graphed.load_table(tmp_path / "table.json")
        torch.cuda._sleep(20_000_000)
        graphed.capture(progress=False)
        with torch.cuda.stream(torch.cuda.Stream()):
            output = graphed(pixels, grids)
        torch.cuda.synchronize()
        assert_same_bits(output, answer)
        assert all(budget.replay_ms for budget in graphed.stats().budgets)
        graphed.release()


# --- modes ----------------------------------------------------------------------------------------


def test_autocast_and_a_default_device_change_no_bit() -> None:
    encoder = new_tower("qwen2_5_vl", torch.float32)
    for grids in ([[1, 16, 16]], [[1, 16, 16], [1, 60, 60]]):
        pixels = on_gpu(encoder, grids)
        answer = copy_of(replaying(encoder, [64, 256])(pixels, grids))
        graphed = GraphedEncoder(encoder, [64, 256], outputs=EVERY_FIELD)
        torch.set_default_device("cuda")
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                graphed.capture(progress=False)
                output = graphed(pixels, grids)
        finally:
            torch.set_default_device(None)
        assert {value.dtype for value in fields(output).values()} == {torch.float32}
        assert worst_distance(output, answer) <= 1e-4
        graphed.release()


# --- weights and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("move", [nn.Module.cpu, nn.Module.double, lambda e: e.to("meta")])
def test_weights_moved_or_replaced_after_capture_are_an_error_on_every_path(move: object) -> None:
    encoder = new_tower("qwen3_vl")
    graphed = replaying(encoder, [64])
    calls = [[[1, 8, 8]], [[1, 40, 40]]]
    pixels = [on_gpu(encoder, grids) for grids in calls]
    move(encoder)  # type: ignore[operator]
    for call in zip(pixels, calls, strict=True):
        with pytest.raises(RuntimeError, match="was rebound or moved after capture"):
            graphed(*call)
    graphed.release()


def test_a_submodule_replaced_after_capture_is_an_error_not_an_old_answer() -> None:
    encoder = new_tower("qwen3_vl")
    graphed = replaying(encoder, [64])
    pixels = on_gpu(encoder, [[1, 8, 8]])
    graphed(pixels, [[1, 8, 8]])
    encoder.blocks[1] = new_tower("qwen3_vl").blocks[1]
    with pytest.raises(RuntimeError, match=r"module 'blocks.1' was rebound"):
        graphed(pixels, [[1, 8, 8]])
    graphed.release()


def test_an_interrupted_capture_keeps_no_memory_while_its_error_is_held() -> None:
    encoder = new_tower("qwen3_vl")
    replaying(encoder, [64]).release()
    before = torch.cuda.memory_reserved()
    forward = encoder.forward

    def interrupted(pixel_values: torch.Tensor, *args: object, **kwargs: object) -> object:
        if len(pixel_values) == 4 * 64:
            raise KeyboardInterrupt
        return forward(pixel_values, *args, **kwargs)  # type: ignore[arg-type]

    encoder.forward = interrupted  # type: ignore[method-assign, assignment]
    graphed = GraphedEncoder(encoder, [64, 2048], outputs=EVERY_FIELD)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt) as held:
            graphed.capture(progress=False)
        assert torch.cuda.memory_reserved() <= before + 24 * 2**20
    finally:
        gc.enable()
    assert held.value is not None
