"""The command line where memory does not suffice: one line that says what to make smaller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from vitgraph.cli import main

Encode = Callable[..., tuple[int, str]]


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.new("RGB", (300, 200)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture
def encode(checkpoint: Path, photo: Path, capsys: pytest.CaptureFixture[str]) -> Encode:
    def run(*arguments: object) -> tuple[int, str]:
        out = photo.with_name("f.safetensors")
        code = main([str(part) for part in ("encode", checkpoint, photo, "--out", out, *arguments)])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("graph", [["--graph", "--budgets", "64"], ["--no-graph"]], ids=" ".join)
def test_item_that_does_not_fit_into_memory_is_named(
    encode: Encode, photo: Path, graph: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def huge(*_: object) -> torch.Tensor:
        return torch.empty(10**16, dtype=torch.uint8)  # 10 PB, which the allocator refuses

    monkeypatch.setattr("encoders.inputs.resizing.resize", huge)
    code, err = encode(*graph)
    assert code == 2
    assert err.splitlines()[-1].startswith(f"vitgraph: error: {photo}: ")
    assert "ran out of memory; make the item smaller (--max-pixels" in err


def test_tower_that_does_not_fit_into_memory_is_one_line(
    encode: Encode, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr("weights.load_encoder", full)
    code, err = encode()
    assert code == 2
    assert err.startswith(f"vitgraph: error: {checkpoint}: the device ran out of memory; ")
    assert err.count("\n") == 1
    assert "--dtype bfloat16" in err


def test_other_failures_inside_are_not_taken_for_a_lack_of_memory(
    encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("weights.load_encoder", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        encode()


def test_batch_of_more_items_than_a_replay_has_tokens_is_one_line(encode: Encode) -> None:
    code, err = encode("--graph", "--max-batch-size", 1_000_000)
    assert code == 2
    assert err.startswith("vitgraph: error: --max-batch-size 1000000: ")
    assert "8192" in err
