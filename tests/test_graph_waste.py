"""The default ladder's padding, over a fixed list of sizes and over one it does not know."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import ladder_waste
import sizes

FAMILIES = list(ladder_waste.towers())


@cache
def report() -> dict[str, Any]:
    return ladder_waste.report()


def test_the_fixed_list_has_a_thousand_sizes_of_six_classes_both_ways_round() -> None:
    fixed = sizes.fixed_sizes()
    assert len(fixed) == 1000
    assert {kind for kind, _ in fixed} == set(sizes.OTHER_MIXTURE)
    assert sum(width > height for _, (width, height) in fixed) >= 300
    assert sum(width < height for _, (width, height) in fixed) >= 300


def test_the_other_list_is_drawn_differently_and_always_the_same() -> None:
    other = sizes.other_sizes()
    assert len(other) == 1000
    assert other == sizes.other_sizes()
    known = {size for _, size in sizes.fixed_sizes()}
    assert sum(size in known for _, size in other) <= 20


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_ladder_pads_eight_percent_at_most(family: str) -> None:
    default = report()[family]["default"]
    assert default["fixed"]["graphs"] <= 48
    assert default["fixed"]["padding"] <= 0.08
    assert default["other"]["padding"] <= default["fixed"]["padding"] + 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_powers_of_two_pad_several_times_more(family: str) -> None:
    ladders = report()[family]
    for name in ("fixed", "other"):
        assert ladders["powers of two"][name]["padding"] >= 0.25
        assert ladders["powers of two"][name]["padding"] >= 3 * ladders["default"][name]["padding"]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_image_within_range_runs_eagerly_for_its_shape(family: str) -> None:
    """Screenshots of phones and document pages have room for their windows and segments."""
    encoder = ladder_waste.towers()[family]
    low, high = encoder.budget_range
    budgets = ladder_waste.plan_ladder(encoder).budgets
    for name, listed in (("fixed", sizes.fixed_sizes()), ("other", sizes.other_sizes())):
        for _, spec in ladder_waste.specs_of(encoder, listed):
            if low <= spec.output_tokens <= high:
                assert ladder_waste.padded(budgets, spec) is not None, f"{name}: {spec}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ladder_fitted_to_the_list_pads_least_of_all(family: str) -> None:
    ladders = report()[family]
    fitted = ladders["fit_budgets"]["fixed"]["padding"]
    assert all(fitted <= ladder["fixed"]["padding"] for ladder in ladders.values())
