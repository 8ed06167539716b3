"""Accelerated encoders inside graphs: which form runs, what is counted, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from encoders.contract import Accelerable, EncoderOutput
from graphwrap import GraphedEncoder
from graphwrap.buffers import BudgetGraph
from tests.oracles import add_noise
from tests.support.graphs.cases import executor_of, pixels_for, static, tower
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits
from tests.support.graphs.packing import measured
from tests.support.towers.toy_accelerated import FakeAccelerator, FastToy
from tests.support.towers.toy_encoder import ToyEncoder

FITS = [[1, 1, 6], [2, 1, 4]]
MIXED = [*FITS, [1, 4, 30]]
"""The last is over the budgets of 8 and 16 tokens."""


def graphed_of(encoder: nn.Module, backend: str = "static", **settings: Any) -> GraphedEncoder:
    return GraphedEncoder(encoder, [8, 16], backend=backend, outputs=EVERY_FIELD, **settings)


def accelerator_of(graphed: GraphedEncoder) -> FakeAccelerator:
    accelerator = graphed._forms["image"].accelerator
    assert isinstance(accelerator, FakeAccelerator)
    return accelerator


def assert_runs(graphed: GraphedEncoder, encoder: ToyEncoder, grids: Any = MIXED) -> None:
    """The results are those of an encoder, padded, packed and eager."""
    pixels = pixels_for(encoder, grids)
    assert_same_bits(graphed(pixels, grids), encoder(pixels, grids))


# --- which form runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["static", "eager"])
def test_replays_and_eager_runs_take_the_accelerated_form(backend: str) -> None:
    encoder = FastToy()
    graphed = graphed_of(encoder, backend)
    assert_runs(graphed, encoder.accelerated())
    assert graphed.encoder is encoder
    assert encoder.accelerator is None
    assert graphed.stats().eager_items == (1 if backend == "static" else 3)


@pytest.mark.parametrize("backend", ["static", "eager"])
def test_the_reference_is_the_encoder_bit_for_bit(backend: str) -> None:
    encoder = FastToy()
    graphed = graphed_of(encoder, backend, kernels="reference")
    assert_runs(graphed, encoder)
    assert {budget.kernel for budget in graphed.stats().budgets} <= {"reference"}


def test_kernels_and_precision_reach_the_accelerated_form() -> None:
    graphed = graphed_of(FastToy(), kernels="flash4", precision="fp8")
    assert accelerator_of(graphed).asked == ("flash4", "fp8")
    assert accelerator_of(graphed_of(FastToy())).asked == ("auto", "bf16")


def test_an_accelerated_encoder_is_captured_as_it_is() -> None:
    encoder = FastToy().accelerated("triton")
    graphed = graphed_of(encoder)
    assert graphed._forms["image"].encoder is encoder
    assert_runs(graphed, encoder)
    graphed.release()
    assert_runs(graphed, encoder)
    assert accelerator_of(graphed) is encoder.accelerator


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_an_encoder_without_an_accelerated_form_runs_as_it_is(kernels: str) -> None:
    encoder = ToyEncoder()
    assert not isinstance(encoder, Accelerable)
    graphed = graphed_of(encoder, kernels=kernels)
    assert_runs(graphed, encoder)
    assert graphed.stats().to_dict()["derived_bytes"] == 0


class Wrapper(ToyEncoder):
    """Passes on what its module has, as wrappers of others do, and negates its results."""

    def __init__(self, inner: FastToy) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> EncoderOutput:
        hidden, pooled, deepstack, *_ = self.inner(*args, **kwargs)
        return EncoderOutput(-hidden, -pooled, tuple(-layer for layer in deepstack))


def test_a_wrapper_is_not_bypassed_by_its_modules_accelerated_form() -> None:
    wrapper = Wrapper(FastToy())
    assert wrapper.accelerated
    assert_runs(graphed_of(wrapper), wrapper)


def test_a_wrapper_of_an_accelerated_encoder_is_refreshed() -> None:
    wrapper = Wrapper(FastToy().accelerated())
    graphed = graphed_of(wrapper)
    assert_runs(graphed, wrapper)
    add_noise(wrapper.inner.weight)
    pixels = pixels_for(wrapper, FITS)
    after = graphed(pixels, FITS)
    assert_same_bits(after, wrapper(pixels, FITS))
    assert accelerator_of(graphed) is wrapper.inner.accelerator


def test_an_encoder_moved_before_capture_is_accelerated_anew() -> None:
    encoder = FastToy()
    graphed = graphed_of(encoder)
    first = accelerator_of(graphed)
    encoder.double()
    assert_runs(graphed, encoder.accelerated())
    second = accelerator_of(graphed)
    assert (first.derived.dtype, second.derived.dtype) == (torch.float32, torch.float64)


def test_release_gives_back_the_accelerated_form() -> None:
    encoder = FastToy()
    graphed = graphed_of(encoder).capture(progress=False)
    held = accelerator_of(graphed)
    graphed.release()
    assert not graphed._forms
    assert_runs(graphed, encoder.accelerated())
    assert accelerator_of(graphed) is not held


# --- settings that cannot work --------------------------------------------------------------------

ACCELERATED = FastToy().accelerated()
REFUSED: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "unknown": (FastToy(), {"kernels": "fast"}, "kernels='fast': must be .*auto, .*, reference"),
    "no kernels": (ToyEncoder(), {"kernels": "triton"}, "ToyEncoder has no accelerated form"),
    "no precision": (ToyEncoder(), {"precision": "fp8"}, "precision='fp8': ToyEncoder has no acc"),
    "the reference's precision": (
        FastToy(),
        {"kernels": "reference", "precision": "fp8"},
        "leave precision='bf16'",
    ),
    "kernels again": (ACCELERATED, {"kernels": "triton"}, "kernels='triton': this encoder is acc"),
    "reference again": (ACCELERATED, {"kernels": "reference"}, r"\(pass the one accelerated\(\)"),
    "precision again": (ACCELERATED, {"precision": "fp8"}, "leave precision='bf16'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_kernels_that_cannot_be_are_refused_at_once(case: str) -> None:
    encoder, settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        graphed_of(encoder, **settings)


# --- refreshing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["static", "eager"])
def test_a_weight_written_in_place_is_seen_next_call(backend: str) -> None:
    encoder = FastToy()
    graphed = graphed_of(encoder, backend).capture(progress=False)
    for share in (0.0, 1.0, 0.1):
        add_noise(encoder.weight, share=share)
        assert_runs(graphed, encoder.accelerated())


def test_a_weight_written_before_a_replay_is_replayed_once_more() -> None:
    """A graph reads derived weights as they are; whether one is stale is asked meanwhile."""
    graphed = graphed_of(FastToy()).capture(progress=False)
    accelerator, replays = accelerator_of(graphed), list[int]()
    accelerator.follows = False
    for runner in executor_of(graphed).graphs.by_budget.values():

        def replay(runner: BudgetGraph = runner) -> None:
            replays.append(runner.budget.tokens)
            runner.body()

        runner.captured = SimpleNamespace(replay=replay)  # type: ignore[assignment]
    for share, expected in ((0.0, 1), (1.0, 2), (0.0, 1), (0.1, 2)):
        add_noise(graphed.encoder.weight, share=share)
        replays.clear()
        assert_runs(graphed, graphed.encoder.accelerated(), FITS)
        assert len(replays) == expected


def test_derived_weights_are_refreshed_after_streams_are_ordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last call may still be reading them on another stream."""
    graphed = graphed_of(FastToy()).capture(progress=False)
    order: list[str] = []
    executor, captured = executor_of(graphed), graphed._captured
    assert captured is not None
    for owner, name in (
        (captured.memory, "wait_for_last_use"),
        (accelerator_of(graphed), "refresh"),
        (executor, "_replay"),
        (captured.memory, "mark_use"),
    ):
        call = getattr(owner, name)

        def noted(*args: Any, name: str = name, call: Any = call, **settings: Any) -> Any:
            order.append(name)
            return call(*args, **settings)

        monkeypatch.setattr(owner, name, noted)
    assert_runs(graphed, graphed.encoder.accelerated(), FITS)
    assert order == ["wait_for_last_use", "_replay", "refresh", "mark_use"]


# --- stats ----------------------------------------------------------------------------------------


def test_stats_name_the_kernels_of_every_budget() -> None:
    graphed = graphed_of(FastToy()).capture(progress=False)
    kernels = {budget.tokens: budget.kernel for budget in graphed.stats().budgets}
    assert kernels == {8: "triton", 16: "flash4"}
    graphed(pixels_for(graphed.encoder, MIXED), MIXED)
    graphed.reset_stats()
    stats = graphed.stats()
    assert {budget.tokens: budget.kernel for budget in stats.budgets} == kernels
    data = json.loads(json.dumps(stats.to_dict()))
    assert (data["derived_bytes"], data["note"]) == (3 * 2**20, "")
    assert {row["tokens"]: row["kernel"] for row in data["budgets"]} == kernels


def test_stats_print_kernels_and_derived_weights_in_short_lines() -> None:
    graphed = graphed_of(FastToy()).capture(progress=False)
    lines = str(graphed.stats()).splitlines()
    assert lines[0].endswith(" kernel")
    assert {line.split()[-1] for line in lines[1:-2]} == {"triton", "flash4"}
    assert "derived 3.0 MiB" in lines[-1]
    stats = graphed.stats()
    stats.arena_bytes = stats.pool_bytes = stats.derived_bytes = 9999 * 2**20
    stats.budgets[0].kernel = "triton, flash4"
    stats.backend = "cudagraph"
    assert max(map(len, str(stats).splitlines())) <= 110


def test_stats_say_why_the_reference_runs() -> None:
    graphed = graphed_of(FastToy()).capture(progress=False)
    accelerator_of(graphed).because = "the encoder is on the CPU"
    stats = graphed.stats()
    assert stats.to_dict()["note"] == "the encoder is on the CPU"
    assert str(stats).endswith("accelerated encoder runs the reference: the encoder is on the CPU")


def test_a_tower_on_the_cpu_says_why_the_reference_runs() -> None:
    graphed = static(tower("qwen3_vl"), [16]).capture(progress=False)
    stats = graphed.stats()
    assert stats.note
    assert (stats.derived_bytes, {budget.kernel for budget in stats.budgets}) == (0, {"reference"})


# --- saved tables ---------------------------------------------------------------------------------


def saved(path: Path, encoder: nn.Module, **settings: Any) -> Path:
    """A table as a capture on CUDA would write it."""
    graphed = graphed_of(encoder, **settings)
    executor_of(graphed).graphs.packer.costs = measured(graphed.budgets)
    graphed.save_table(path)
    return path


def test_choices_saved_are_loaded_before_capture(tmp_path: Path) -> None:
    path = saved(tmp_path / "table.json", FastToy())
    graphed = graphed_of(FastToy())
    graphed.load_table(path)
    assert accelerator_of(graphed).loaded is None
    graphed.capture(progress=False)
    expected = {"kernels": "auto", "rows": [16], "reference_because": None}
    assert accelerator_of(graphed).loaded == expected
    graphed.release()
    graphed.capture(progress=False)
    assert accelerator_of(graphed).loaded == expected


def test_a_table_without_an_accelerator_holds_no_choices(tmp_path: Path) -> None:
    path = saved(tmp_path / "table.json", ToyEncoder())
    assert json.loads(path.read_text())["image"]["kernels"] is None
    graphed_of(ToyEncoder()).load_table(path)


@pytest.mark.parametrize(
    ("settings", "difference"),
    [({"kernels": "flash4"}, "kernels='auto'"), ({"precision": "fp8"}, "precision='bf16'")],
)
def test_a_table_made_with_other_kernels_is_refused(
    tmp_path: Path, settings: dict[str, Any], difference: str
) -> None:
    graphed = graphed_of(FastToy(), **settings)
    graphed.load_table(saved(tmp_path / "table.json", FastToy()))
    with pytest.raises(ValueError, match=f"was measured with {difference}"):
        graphed.capture(progress=False)
    assert graphed._captured is None


def test_choices_that_cannot_run_here_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "table.json", FastToy())
    body = json.loads(path.read_text())
    body["image"]["kernels"] = {"kernels": "x"}
    path.write_text(json.dumps(body))
    graphed = graphed_of(FastToy())
    graphed.load_table(path)
    with pytest.raises(ValueError, match=r"kernels of .*table.json: kernel 'x' is not installed"):
        graphed.capture(progress=False)
