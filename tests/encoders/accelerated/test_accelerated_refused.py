"""What asking for an accelerated encoder refuses, and where the reference runs instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from encoders.accelerated.attention.candidates import KERNELS, is_installed
from encoders.accelerated.obstacles import obstacle
from graphwrap import GraphedEncoder
from tests.oracles import tiny
from tests.support.accelerated.cases import OURS, run
from tests.support.towers.step3_paths import shared


def test_an_unknown_kernel_is_refused_with_the_choices() -> None:
    message = "kernels='typo': must be one of auto, torch, triton, flash2, cudnn, flash4, tma"
    with pytest.raises(ValueError, match=message):
        tiny("qwen3_vl").accelerated("typo")


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision='typo': must be one of bf16"):
        tiny("qwen3_vl").accelerated(precision="typo")


def test_an_accelerated_encoder_is_not_accelerated_again() -> None:
    with pytest.raises(ValueError, match="this encoder is accelerated already"):
        tiny("qwen3_vl").accelerated().accelerated()


def test_the_encoder_itself_says_reference() -> None:
    assert tiny("qwen3_vl").kernel_choices() == {"kernels": "reference"}


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", OURS)
def test_on_the_cpu_the_reference_runs_silently(name: str, kernels: str) -> None:
    encoder = tiny(name)
    fast = encoder.accelerated(kernels)
    reason = "the encoder is on cpu, and accelerated towers need CUDA"
    for _ in range(2):
        assert fast.kernel_choices()["reference_because"] == reason
        assert torch.equal(run(fast, name).pooler_output, run(encoder, name).pooler_output)
    assert fast.accelerator.kernels_used == "reference"


@pytest.mark.parametrize("kernels", list(KERNELS))
def test_a_kernel_by_name_on_the_cpu_warns_once(kernels: str) -> None:
    with pytest.warns(UserWarning, match="the reference runs instead: the encoder is on") as caught:
        fast = tiny("qwen3_vl").accelerated(kernels)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    run(fast, "qwen3_vl")


@pytest.mark.parametrize("start", ["paths", "graphs"])
def test_a_kernel_by_name_warns_at_the_line_of_the_caller(start: str) -> None:
    starts: dict[str, Callable[[], object]] = {
        "paths": lambda: shared("step3_vl").accelerated("triton"),
        "graphs": lambda: GraphedEncoder(tiny("qwen3_vl"), kernels="triton"),
    }
    with pytest.warns(UserWarning, match="the reference runs instead") as caught:
        starts[start]()
    assert {warning.filename for warning in caught} == {__file__}


def test_obstacles_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "compute capability 7.5" in str(obstacle(cuda, torch.float16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert "float64" in str(obstacle(cuda, torch.float64))
    monkeypatch.setattr("encoders.accelerated.obstacles._has_triton", lambda: False)
    assert "Triton is not installed" in str(obstacle(cuda, torch.float16))


def test_a_missing_package_is_no_kernel() -> None:
    assert not is_installed("no_such_package")
    assert not is_installed("no_such_package.inner")
    assert is_installed("torch.nn")
