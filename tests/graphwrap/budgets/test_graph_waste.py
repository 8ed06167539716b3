"""Padding of the default budgets over a fixed list of sizes, and over nine drawn differently."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import budget_waste
from benchmarks.measuring.results import as_written
from benchmarks.traffic import sizes

FAMILIES = list(budget_waste.towers())


@cache
def report() -> dict[str, Any]:
    return budget_waste.report()


def test_the_fixed_list_has_a_thousand_sizes_of_six_classes() -> None:
    fixed = sizes.fixed_sizes()
    assert len(fixed) == 1000
    assert len({kind for kind, _ in fixed}) == 6
    assert sum(width > height for _, (width, height) in fixed) >= 300
    assert sum(width < height for _, (width, height) in fixed) >= 300


def test_the_other_lists_of_sizes_are_independent_and_fixed() -> None:
    others = sizes.other_lists()
    assert others == sizes.other_lists()
    assert {len(listed) for listed in others.values()} == {1000}
    known = {size for _, size in sizes.fixed_sizes()}
    for name in ("log-uniform", "thumbnails", "photographs", "crops"):
        assert sum(size in known for _, size in others[name]) <= 20, name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_budgets_pad_eight_percent_at_most(family: str) -> None:
    default = report()[family]["default"]
    assert default["fixed"]["graphs"] == 48
    assert default["fixed"]["padding"] <= 0.08


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.other_lists())
@pytest.mark.parametrize("family", FAMILIES)
def test_the_figure_holds_within_two_points_on_a_list_drawn_differently(
    family: str, name: str
) -> None:
    default = report()[family]["default"]
    assert default[name]["padding"] <= min(default["fixed"]["padding"] + 0.02, 0.08)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "log-uniform", "photographs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_powers_of_two_pad_several_times_more(family: str, name: str) -> None:
    sets = report()[family]
    assert sets["powers of two"][name]["padding"] >= 0.25
    assert sets["powers of two"][name]["padding"] >= 4 * sets["default"][name]["padding"]


SCREENS_16_9 = [(1280, 720), (1366, 768), (1536, 864), (1920, 1080), (2560, 1440)]


def test_tilings_of_ordinary_images_replay_without_padding() -> None:
    """Up to twelve tiles and a thumbnail; a 16:9 screen makes nine."""
    tiled = budget_waste.towers()["InternViT 448 tiles"]
    whole = {budget.tokens for budget in budget_waste.choose_budgets(tiled).budgets}
    assert whole >= {256 * tiles for tiles in range(1, 14)}
    specs = budget_waste.specs_of(tiled, [("screen", size) for size in SCREENS_16_9])
    assert {spec.output_tokens for _, spec in specs} <= whole


@pytest.mark.parametrize("family", FAMILIES)
def test_no_image_within_range_runs_eagerly_for_its_shape(family: str) -> None:
    """Screenshots of phones and document pages have room for their windows and segments."""
    encoder = budget_waste.towers()[family]
    low, high = encoder.budget_range
    budgets = budget_waste.choose_budgets(encoder).budgets
    for name, listed in {"fixed": sizes.fixed_sizes(), **sizes.other_lists()}.items():
        for _, spec in budget_waste.specs_of(encoder, listed):
            if low <= spec.output_tokens <= high:
                assert budget_waste.padded(budgets, spec) is not None, f"{name}: {spec}"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_budgets_fitted_to_the_list_pad_least_of_all(family: str) -> None:
    sets = report()[family]
    fitted = sets["fit_budgets"]["fixed"]["padding"]
    assert all(fitted <= one["fixed"]["padding"] for one in sets.values())


@pytest.mark.slow
def test_the_committed_results_are_what_the_script_computes() -> None:
    root = Path(__file__).parents[3]
    path = root / "benchmarks" / "results" / "budget_waste.json"
    assert path.read_text() == as_written(report())
