"""Candidates of the attention kernels: exact in the interpreter, and measured by one command."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from accelerated_cases import DEVICE, attended, drawn, needs_interpreter, needs_triton, relative
from benchmarks import attention_heads
from benchmarks.attention_heads import Cell, measure, table

pytestmark = [needs_triton, needs_interpreter]


@pytest.mark.parametrize("specialised", [False, True])
@pytest.mark.parametrize(("size", "apart"), [(72, 72), (72, 80), (80, 80)])
def test_attention_through_descriptors_matches_torch(
    size: int, apart: int, specialised: bool
) -> None:
    """Columns between heads hold NaN, rows beyond the last offset zeros; neither is written."""
    from benchmarks.tma_attention import Tile, attend

    heads, shared, lengths = 2, 1, (33, 1, 0, 70)
    ends, dtype = [0, *accumulate(lengths)], torch.float32
    buffer = torch.full((ends[-1] + 64, heads + 2 * shared, apart), float("nan"), dtype=dtype)
    buffer[..., :size] = drawn(*buffer.shape[:2], size, dtype=dtype)
    buffer[ends[-1] :, :, :size] = 0.0
    q, k, v = buffer[..., :size].split((heads, shared, shared), 1)
    shape = Cell("ragged", size, list(lengths), heads).shape
    offsets = torch.tensor([*ends, ends[-1]], dtype=torch.int32, device=DEVICE)
    out = torch.full((len(buffer), heads, size), 7.0, dtype=dtype)
    attend(q, k, v, out, offsets, shape, Tile(64, 64, 4, 2, specialised))
    wide = (part[: ends[-1]].repeat_interleave(heads // shared, 1) for part in (k, v))
    assert relative(out[: ends[-1]], attended(q[: ends[-1]], *wide, ends)) <= 1e-6
    assert (out[ends[-1] :] == 7.0).all()


def test_a_plan_has_every_tile_once_and_long_segments_first() -> None:
    from benchmarks.tma_attention import make_plan

    ends = [0, *accumulate((64, 1, 0, 130, 200, 130))]
    offsets = torch.tensor([*ends, ends[-1]], dtype=torch.int32, device=DEVICE)
    plan = make_plan(offsets, ends[-1] + 40, 64)[:, :3].tolist()
    longest_first = sorted(pairwise(ends), key=lambda pair: pair[0] - pair[1])
    tiles = [[at, a, b] for a, b in longest_first for at in range(a, b, 64)]
    assert plan[: len(tiles)] == tiles
    assert plan[len(tiles) :] == [[0, 0, 0]] * (len(plan) - len(tiles))


@pytest.mark.slow
def test_one_command_measures_the_candidates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the CPU flash-2 is a row with its error, and the others are right."""
    cells = [Cell("ragged", 72, [33, 1, 70], 1), Cell("equal", 80, [40, 40], 1, True)]
    monkeypatch.setattr(attention_heads, "cells", lambda: iter(cells))
    path = tmp_path / "rows.json"
    attention_heads.main(["--device", "cpu", "--json", str(path)])
    body = json.loads(path.read_text())
    assert body["ended"] == []
    assert {(row["cell"], row["family"]) for row in body["rows"]} == {
        (cell.name, family) for cell in cells for family in attention_heads.FAMILIES
    }
    for row in body["rows"]:
        if row["candidate"] in ("library, flash2", "library, cudnn"):
            assert "error" in row
        else:
            assert row["relative_l2"] <= 1e-3
            assert row["us"] > 0
    assert "tma 64x64" in table(body["rows"]) or "tma 128x64" in table(body["rows"])


def test_a_candidate_that_is_wrong_or_fails_is_a_row_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("too little shared memory")

    def forget(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *_: object):
        return out

    chosen = [
        attention_heads.Candidate("fails", fail, 72, 72),
        attention_heads.Candidate("writes nothing", forget, 72, 72),
        attention_heads.Candidate("forgets keys", lambda q, k, v, *_: v, 72, 72),
    ]
    monkeypatch.setattr(attention_heads, "candidates", lambda *_: iter(chosen))
    rows = measure(Cell("small", 72, [5, 3], 1), "tma", torch.device("cpu"), 1)
    lines = table(rows)
    assert "fails: RuntimeError: too little shared memory" in lines
    assert "writes nothing: ValueError: the result is not finite" in lines
    assert "forgets keys: its error is" in lines
