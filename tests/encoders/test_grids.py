"""A grid is checked when it is first read."""

from __future__ import annotations

import pytest
import torch

from encoders.grids import read_grid


@pytest.mark.parametrize("grid", [[[1, 4, 6]], torch.tensor([[1, 4, 6], [2, 8, 2]]), []], ids=repr)
def test_a_grid_that_was_read_comes_back_as_it_is(grid: list[list[int]] | torch.Tensor) -> None:
    read = read_grid(grid)
    assert read == [tuple(map(int, row)) for row in grid]
    assert read_grid(read) is read
    assert read_grid(read, 2) is read


def test_a_grid_that_was_read_is_refused_by_larger_merges() -> None:
    read = read_grid([[1, 4, 6]], 2)
    with pytest.raises(ValueError, match="width 6 must be a multiple of side=4"):
        read_grid(read, 4, "side")
