"""Candidates of the attention kernels: exact in the interpreter, and measured by one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.attention_heads import __main__ as command
from benchmarks.attention_heads import measure
from tests.support.accelerated.cases import needs_interpreter, needs_triton

pytestmark = [needs_triton, needs_interpreter]


@pytest.mark.slow
def test_one_command_measures_the_candidates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the CPU flash-2 is a row with its error, and the others are right."""
    cells = [
        measure.Cell("ragged", 72, [33, 1, 70], 1),
        measure.Cell("equal", 80, [40, 40], 1, True),
    ]
    monkeypatch.setattr(command, "cells", lambda: iter(cells))
    path = tmp_path / "rows.json"
    command.main(["--device", "cpu", "--json", str(path)])
    body = json.loads(path.read_text())
    assert body["ended"] == []
    assert {(row["cell"], row["family"]) for row in body["rows"]} == {
        (cell.name, family) for cell in cells for family in measure.FAMILIES
    }
    for row in body["rows"]:
        if row["candidate"] in ("library, flash2", "library, cudnn"):
            assert "error" in row
        else:
            assert row["relative_l2"] <= 1e-3
            assert row["us"] > 0
    assert any(row["candidate"].startswith("tma 64x64") for row in body["rows"])
    assert command.table(body["rows"]).startswith("| cell | size |")


def test_a_candidate_that_is_wrong_or_fails_is_a_row_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("too little shared memory")

    def forget(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *_: object):
        return out

    chosen = [
        measure.Candidate("fails", fail, 72),
        measure.Candidate("writes nothing", forget, 72),
        measure.Candidate("forgets keys", lambda q, k, v, *_: v, 72),
    ]
    monkeypatch.setattr(measure, "candidates", lambda *_: iter(chosen))
    rows = measure.measure(measure.Cell("small", 72, [5, 3], 1), "tma", torch.device("cpu"), 1)
    lines = command.table(rows)
    assert "fails: RuntimeError: too little shared memory" in lines
    assert "writes nothing: ValueError: the result is not finite" in lines
    assert "forgets keys: its error is" in lines
