"""What tests share: which tier runs by default, how hypothesis behaves, a hub and a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from fetching import point_client_at
from hub_server import HubServer
from vitgraph.seeded import write_seeded_checkpoint

settings.register_profile("vitgraph", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("vitgraph")


def pytest_configure(config: pytest.Config) -> None:
    """A plain ``pytest`` is the fast tier; ``-m slow`` and ``-m gpu`` ask for the others.

    Without a GPU, Triton kernels run in Triton's interpreter, on CPU tensors. Triton reads the
    variable when it is first imported, which no import above does.
    """
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    if not config.option.markexpr:
        config.option.markexpr = "not slow and not gpu"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub on loopback that the Hub client talks to."""
    with HubServer() as server:
        point_client_at(server, monkeypatch, tmp_path)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A ``cache_dir`` with nothing in it."""
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint: shards that hold the tower, and one that does not."""
    return write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64, decoy_shards=1)


@pytest.fixture
def fused_in_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerated encoders run their fused blocks on the CPU, too, the kernels interpreted."""
    for module in ("encoders.accelerated", "encoders.accelerated.fused_blocks"):
        monkeypatch.setattr(f"{module}.obstacle", lambda device, dtype: None)
    monkeypatch.setattr("encoders.accelerated.choices.TRIALS", ((3, 40),))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, fused_in_interpreter: None) -> None:
    """The same, with torch's own steps in the places of the element-wise kernels."""
    from accelerated_cases import run_steps_in_torch  # it brings transformers

    run_steps_in_torch(monkeypatch)
