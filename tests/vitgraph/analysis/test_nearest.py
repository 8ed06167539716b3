"""Nearest patches across photographs, asked of one tower or of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vitgraph


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def photographs() -> list[Tensor]:
    """Three maps, of which the last holds the first one moved by a row and two columns."""
    first = noise(1, 6, 8, 32)
    return [first, noise(1, 4, 5, 32, seed=1), first.roll((1, 2), dims=(1, 2))]


def test_a_patch_is_found_again_in_the_photograph_that_has_it() -> None:
    (matches,) = vitgraph.nearest_patches(photographs(), [(0.55, 0.55)], top=3)
    assert matches[0][:3] == (2, 4, 6)
    assert matches[0].cosine == pytest.approx(1, abs=1e-5)
    assert [match.cosine for match in matches] == sorted(
        (match.cosine for match in matches), reverse=True
    )


def test_places_of_another_photograph_are_searched_in_all_others() -> None:
    (matches,) = vitgraph.nearest_patches(photographs(), [(0.75, 0.8)], source=2)
    assert matches[0][:3] == (0, 3, 4)


def test_towers_answer_each_for_itself_about_the_same_place() -> None:
    first = photographs()
    second = [{"image": one.repeat_interleave(2, 1).repeat_interleave(2, 2)} for one in first]
    found = vitgraph.nearest_patches({"coarse": first, "fine": second}, [(0.55, 0.55)])
    assert list(found) == ["coarse", "fine"]
    assert found["coarse"][0][0][:3] == (2, 4, 6)
    photograph, row, column, _ = found["fine"][0][0]
    assert (photograph, row // 2, column // 2) == (2, 4, 6)


def test_no_points_have_no_matches() -> None:
    assert vitgraph.nearest_patches(photographs(), []) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"points": [(0.5, 1.5)]}, r"point \(0.5, 1.5\): must be fractions"),
        ({"source": 3}, "3 maps, source=3, top=1: pass at least two maps"),
        ({"top": 0}, "top=0"),
        ({"maps": [noise(1, 4, 4, 8)]}, "1 maps, source=0"),
        ({"maps": [noise(4, 4, 8)] * 2}, r"\[t, h, w, D\]"),
        ({"maps": [noise(1, 4, 4, 8), noise(1, 4, 4, 9)]}, r"widths \[8, 9\]"),
        ({"maps": [noise(1, 4, 4, 8) / 0] * 2}, r"NaN or infinite values \(128\)"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: dict[str, Any], message: str) -> None:
    arguments = {"maps": photographs(), "points": [(0.5, 0.5)], **given}
    with pytest.raises(ValueError, match=message):
        vitgraph.nearest_patches(**arguments)
