"""A first call captures what it needs, and the others are captured at their first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders.accelerated.accelerator import FusedBlocks
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from graphwrap import GraphedEncoder
from graphwrap.buffers import BudgetGraph, Memory
from tests.oracles import Grids
from tests.support.graphs.cases import executor_of, new_tower, pixels_for, tower
from tests.support.graphs.fake_gpu import FakeGpu
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits
from tests.support.graphs.path_cases import CALLS, SMALL, assert_agrees, graphed_of
from tests.support.towers.toy_encoder import ToyEncoder
from tests.support.towers.toy_paths import inputs_of

TOKENS = (16, 32, 48, 64, 96)
CHECKED = [96, 96, 48]
"""What is captured to check a kept table: the largest budget in both shapes is one of the two."""
GRIDS: dict[str, Grids] = {
    "16": [[1, 4, 4]],
    "32": [[1, 8, 14]],
    "32 and 96": [[1, 8, 14], [1, 18, 20]],
    "over all": [[1, 40, 40]],
}
"""Calls by the budgets that they take, in merged tokens of four patches."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    """A made-up GPU; the times of the tower of ``graphed`` are kept already."""
    fake = FakeGpu()
    fake.install(monkeypatch)
    monkeypatch.setenv("VITGRAPH_TABLES", str(tmp_path / "tables"))
    # Every eager run is dearer than every replay.
    monkeypatch.setattr(
        "graphwrap.measuring._in_turn", lambda calls, device: [9.0, 1.0][: len(calls)]
    )
    graphed(tower("qwen3_vl")).capture(progress=False)
    fake.captured.clear()
    return fake


def graphed(encoder: Any, **settings: Any) -> GraphedEncoder:
    return GraphedEncoder(encoder, TOKENS, outputs=EVERY_FIELD, max_graphs=5, **settings)


def call(graphed: GraphedEncoder, grids: Grids) -> tuple[Tensor, Any]:
    pixels = pixels_for(graphed.encoder, grids)
    return pixels, graphed(pixels, grids)


def answer(encoder: VisionEncoder, grids: Grids) -> Any:
    """What all budgets captured at once return."""
    whole = graphed(encoder).capture(progress=False)
    return whole(pixels_for(encoder, grids), grids)


def test_a_first_call_captures_the_largest_and_what_it_needs(gpu: FakeGpu) -> None:
    encoder = tower("qwen3_vl")
    lazy = graphed(encoder)
    found: list[list[int]] = []
    for grids in GRIDS.values():
        call(lazy, grids)
        found.append(gpu.captured.copy())
        gpu.captured.clear()
    assert found == [[96, 48, 16], [32], [], []]
    assert [stats.tokens for stats in lazy.stats().budgets] == [16, 32, 48, 96]
    assert lazy.stats().eager_items == 1
    for grids in GRIDS.values():
        assert_same_bits(call(lazy, grids)[1], answer(encoder, grids))


def test_earlier_results_and_calls_stay_right(gpu: FakeGpu) -> None:
    encoder = tower("qwen3_vl")
    lazy = graphed(encoder)
    for grids in (GRIDS["32"], GRIDS["16"], GRIDS["32"]):
        assert_same_bits(call(lazy, grids)[1], answer(encoder, grids))
    kept = call(lazy, GRIDS["16"])[1]
    before = kept.last_hidden_state.clone()
    lazy.capture(progress=False)
    assert torch.equal(kept.last_hidden_state, before)
    assert_same_bits(call(lazy, GRIDS["16"])[1], answer(encoder, GRIDS["16"]))


def test_capture_captures_the_rest_largest_first(gpu: FakeGpu) -> None:
    lazy = graphed(tower("qwen3_vl"))
    call(lazy, GRIDS["16"])
    gpu.captured.clear()
    seconds = lazy.stats().capture_seconds
    lazy.capture(progress=False)
    assert gpu.captured == [64, 32]
    assert lazy.stats().capture_seconds > seconds
    assert all(stats.replay_ms == 1.0 for stats in lazy.stats().budgets)
    gpu.captured.clear()
    lazy.capture(progress=False)
    assert gpu.captured == []


def test_capture_before_any_call_captures_all(gpu: FakeGpu) -> None:
    graphed(tower("qwen3_vl")).capture(progress=False)
    assert gpu.captured == [96, 64, 48, 32, 16]


def test_nothing_waits_where_times_are_not_known(gpu: FakeGpu) -> None:
    for settings in ({"table": None}, {"outputs": ("pooler_output",)}):
        gpu.captured.clear()
        lazy = GraphedEncoder(tower("qwen3_vl"), TOKENS, max_graphs=5, **settings)
        lazy(pixels_for(lazy.encoder, GRIDS["16"]), GRIDS["16"])
        assert gpu.captured == [96, 64, 48, 32, 16]


def test_a_table_that_is_off_captures_and_measures_all(gpu: FakeGpu) -> None:
    gpu.ms = 2.0
    lazy = graphed(tower("qwen3_vl"))
    call(lazy, GRIDS["16"])
    assert sorted(gpu.captured) == sorted(TOKENS)
    assert {stats.replay_ms for stats in lazy.stats().budgets} == {2.0}


def test_an_encoder_of_another_package_is_captured_at_once(gpu: FakeGpu) -> None:
    for _ in range(2):
        gpu.captured.clear()
        own = GraphedEncoder(ToyEncoder(), [4, 8, 16, 32], max_graphs=4)
        own(pixels_for(own.encoder, [[1, 1, 6]]), [[1, 1, 6]])
        assert gpu.captured == [32, 16, 8, 4]


def test_each_path_captures_its_own_budgets_at_first_use(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphwrap.capture.is_library", lambda encoder: True)
    graphed_of("cudagraph").capture(progress=False)
    lazy = graphed_of("cudagraph")
    assert_agrees(lazy, inputs_of(SMALL))
    few = [stats.path for stats in lazy.stats().budgets]
    for items in CALLS.values():
        assert_agrees(lazy, inputs_of(items))
    assert set(few) == {"image", "tiles"}
    assert len(few) < len(lazy.stats().budgets)


def test_a_named_table_needs_no_budget_for_checks(gpu: FakeGpu, tmp_path: Path) -> None:
    whole = graphed(tower("qwen3_vl")).capture(progress=False)
    whole.save_table(tmp_path / "table.json")
    gpu.captured.clear()
    lazy = graphed(tower("qwen3_vl"))
    lazy.load_table(tmp_path / "table.json")
    call(lazy, GRIDS["16"])
    assert gpu.captured == [96, 16]


# --- what can go wrong ----------------------------------------------------------------------------


def test_a_budget_that_fails_at_first_use_is_replaced(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = new_tower("qwen3_vl")
    lazy, forward = graphed(encoder), type(encoder).forward

    def full(self: Any, pixels: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        if len(pixels) == 32 * 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, pixels, *args, **kwargs)

    call(lazy, GRIDS["16"])
    gpu.captured.clear()
    with monkeypatch.context() as patch:
        patch.setattr(type(encoder), "forward", full)
        with pytest.warns(UserWarning, match=r"budget 32 .* is dropped \(CUDA out of memory\)"):
            found = call(lazy, GRIDS["32"])[1]
    assert gpu.captured == [32]
    assert found.pooler_output.shape[0] == 28
    stats = lazy.stats()
    assert [name.split()[0] for name in stats.dropped] == ["32"]
    assert {row.tokens: row.hits for row in stats.budgets}[48] == 1
    assert 32 not in {budget.tokens for budget in executor_of(lazy).graphs.packer.budgets}


def test_weights_rebound_before_a_first_use_are_noticed(gpu: FakeGpu) -> None:
    encoder = new_tower("qwen3_vl")
    lazy = graphed(encoder)
    call(lazy, GRIDS["16"])
    encoder.load_state_dict(encoder.state_dict(), assign=True)
    name, weight = next(iter(encoder.named_parameters()))
    encoder.load_state_dict({name: weight.detach().clone()}, assign=True, strict=False)
    gpu.captured.clear()
    with pytest.raises(RuntimeError, match="rebound or moved"):
        call(lazy, GRIDS["32"])
    assert gpu.captured == []


def test_an_interrupted_first_use_is_tried_again(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = tower("qwen3_vl")
    lazy = graphed(encoder)
    call(lazy, GRIDS["16"])

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("graphwrap.buffers.BudgetGraph.body", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(lazy, GRIDS["32"])
    assert_same_bits(call(lazy, GRIDS["32"])[1], answer(encoder, GRIDS["32"]))


def test_a_kernel_that_cannot_start_in_a_capture_is_run_before(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN allocates memory in its first run, which a capture does not allow."""
    warmed = list[int]()
    capture = BudgetGraph.capture

    def picky(graph: BudgetGraph, memory: Memory, *, warms_up: bool) -> None:
        if not warms_up and graph.budget.tokens == 64:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")
        warmed.extend([graph.budget.tokens] * warms_up)
        capture(graph, memory, warms_up=warms_up)

    monkeypatch.setattr(BudgetGraph, "capture", picky)
    encoder = tower("qwen3_vl")
    lazy = graphed(encoder).capture(progress=False)
    assert warmed == [96, 64]
    assert_same_bits(call(lazy, GRIDS["32"])[1], answer(encoder, GRIDS["32"]))


@pytest.mark.parametrize("right", [True, False], ids=["guessed right", "guessed wrong"])
def test_budgets_are_captured_without_a_run_where_kernels_were_right(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    runs = list[tuple[int, bool]]()
    capture = BudgetGraph.capture

    def recorded(graph: BudgetGraph, memory: Memory, *, warms_up: bool) -> None:
        runs.append((graph.budget.tokens, warms_up))
        capture(graph, memory, warms_up=warms_up)

    monkeypatch.setattr(BudgetGraph, "capture", recorded)
    monkeypatch.setattr(FusedBlocks, "settle", lambda _: right)
    settings: Any = {"table": None, "max_graphs": 4, "max_frames_per_batch": 8}
    encoder = tower("qwen3_vl")
    lazy = GraphedEncoder(encoder, [40, 60, 64, 96], outputs=EVERY_FIELD, **settings)
    lazy.capture(progress=False)
    later = [(64, False), (60, False), (40, False)]
    again = [run for tokens, _ in later for run in ((tokens, False), (tokens, True))]
    assert runs == [(96, True), *(later if right else again)]
    assert_same_bits(call(lazy, GRIDS["32"])[1], answer(encoder, GRIDS["32"]))
