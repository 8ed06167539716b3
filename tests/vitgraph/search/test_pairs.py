"""Near-duplicates in the vectors of a job: every pair or every group, whatever the blocks are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vitgraph.search import pairs as module
from vitgraph.search.pairs import Duplicates, find_duplicates

CPU = torch.device("cpu")


class Rows:
    """Vectors in memory, in parts of three rows, with the methods that pairs are found by."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = np.asarray(matrix, np.float32)
        self.left_out = int((~np.isfinite(self.matrix).all(1)).sum())
        self.count = len(self.matrix) - self.left_out

    def scan(self) -> Any:
        return self.matrix[0]

    def rows(self, width: int, label: str, first: int = 0) -> Any:
        for start in range(first, len(self.matrix), 3):
            yield start, self.matrix[start : start + 3]


def matrix_of(count: int, seed: int = 0) -> Any:
    """Vectors near some of a few directions, one of them twice, one of zeros, two not finite."""
    draw = np.random.default_rng(seed)
    near = draw.normal(size=(9, 8))[draw.integers(0, 9, count)]
    rows = near * draw.uniform(0.5, 2, (count, 1)) + 0.15 * draw.normal(size=(count, 8))
    rows[4], rows[7] = rows[2], 0
    rows[1, 3], rows[5] = np.nan, np.inf
    return rows.astype(np.float32)


def by_definition(matrix: Any, threshold: float) -> tuple[set[tuple[int, int]], set[Any]]:
    """All pairs, and the connected components of more than one row, by whole matrices."""
    rows = np.where(np.isfinite(matrix).all(1, keepdims=True), matrix, 0).astype(np.float64)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    near = rows @ rows.T >= threshold
    pairs = {(i, j) for i, j in np.argwhere(near).tolist() if i < j}
    groups = [{row} for row in range(len(rows))]
    for i, j in pairs:
        if groups[i] is not groups[j]:
            groups[i] |= groups[j]
            for row in groups[j]:
                groups[row] = groups[i]
    return pairs, {frozenset(group) for group in groups if len(group) > 1}


def find(matrix: Any, threshold: float, most: int) -> Duplicates:
    return find_duplicates(Rows(matrix), threshold, most, CPU)


@pytest.mark.parametrize(
    ("block", "held"), [(2048, 1 << 30), (7, 1 << 30), (4, 4 * 8 * 12), (1, 1)]
)
@pytest.mark.parametrize("threshold", [0.5, 0.97])
def test_pairs_and_groups_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, block: int, held: int, threshold: float
) -> None:
    monkeypatch.setitem(module.BLOCK, "cpu", block)
    monkeypatch.setattr(module, "HELD_BYTES", held)
    monkeypatch.setattr(module, "_JOINED", 2 * block)
    matrix = matrix_of(61)
    pairs, groups = by_definition(matrix, threshold)
    listed = find(matrix, threshold, len(pairs))
    assert listed.pairs is not None
    assert listed.found == len(listed.pairs) == len(pairs)
    assert set(map(tuple, listed.pairs.tolist())) == pairs
    assert (2, 4) in pairs
    assert listed.cosines.tolist() == sorted(listed.cosines.tolist(), reverse=True)
    assert listed.cosines[-1] >= threshold - 1e-6
    assert float(listed.cosines[0]) == pytest.approx(1, abs=1e-6)
    assert listed.groups == []
    for most in (0, len(pairs) - 1):
        joined = find(matrix, threshold, most)
        assert (joined.found, joined.pairs) == (len(pairs), None)
        assert {frozenset(group.tolist()) for group in joined.groups} == groups
        sizes = [len(group) for group in joined.groups]
        assert sizes == sorted(sizes, reverse=True)


def test_a_chain_of_pairs_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.BLOCK, "cpu", 16)
    angles = np.random.default_rng(0).permutation(100) * 0.01
    found = find(np.stack((np.cos(angles), np.sin(angles)), 1), np.cos(0.0101), 10)
    assert [group.tolist() for group in found.groups] == [list(range(100))]
    assert found.found == 99


def test_vectors_of_any_length_are_compared() -> None:
    found = find([[3e38, 0], [1e-40, 0], [0, 1e-30], [0, 2e30]], 0.99, 10)
    assert found.pairs is not None
    assert sorted(found.pairs.tolist()) == [[0, 1], [2, 3]]
