"""The benchmark of near-duplicates runs on the CPU, with few vectors."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import pairs


def test_the_benchmark_of_pairs_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pairs", "--vectors", "400", "--width", "16"])
    pairs.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["vectors"], found["width"]) == (400, 16)
    assert 1 <= found["pairs"] <= 4
    assert found["seconds"] > 0
