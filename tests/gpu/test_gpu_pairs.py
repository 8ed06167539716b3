"""Near-duplicates found on a GPU are those that the CPU finds."""

from __future__ import annotations

import torch

from benchmarks.pairs import Drawn
from tests.gpu.gpu_towers import NEEDS_CUDA
from vitgraph.search.pairs import find_duplicates

pytestmark = NEEDS_CUDA


def test_pairs_and_groups_are_those_of_the_cpu() -> None:
    vectors = Drawn(20_000, 64)
    for most in (1_000_000, 0):
        ours = find_duplicates(vectors, 0.9, most, torch.device("cuda"))
        wanted = find_duplicates(vectors, 0.9, most, torch.device("cpu"))
        assert ours.found == wanted.found > 100
        if most:
            assert ours.pairs is not None
            assert wanted.pairs is not None
            assert set(map(tuple, ours.pairs.tolist())) == set(map(tuple, wanted.pairs.tolist()))
            torch.testing.assert_close(ours.cosines, wanted.cosines)
        else:
            assert [one.tolist() for one in ours.groups] == [two.tolist() for two in wanted.groups]
