"""The colours of feature maps: what is alike has one colour, and encoders agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitgraph.analysis.colours import feature_rgb, principal_components


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_colours_lie_between_0_and_1_in_each_maps_shape() -> None:
    maps = [noise(1, 4, 6, 16), noise(2, 3, 5, 16)]
    colours = feature_rgb(maps)
    assert [tuple(c.shape) for c in colours] == [(1, 4, 6, 3), (2, 3, 5, 3)]
    assert all(c.min() >= 0 and c.max() <= 1 for c in colours)


def test_equal_features_get_equal_colours_in_different_maps() -> None:
    features = noise(1, 4, 6, 16)
    first, second = feature_rgb([features, features.flip(2)])
    assert torch.equal(first, second.flip(2))


def test_first_component_separates_two_clusters() -> None:
    rows = torch.cat((noise(50, 8) + 20, noise(50, 8) - 20))
    first = principal_components(rows, 3)[:, 0]
    assert torch.equal(first[:50] > 0, ~(first[50:] > 0))


def test_components_do_not_depend_on_the_sign_that_the_solver_picked() -> None:
    rows = noise(40, 6)
    components = principal_components(rows, 2)
    torch.testing.assert_close(principal_components(rows.flip(0), 2).flip(0), components)


def test_colours_of_two_encoders_of_the_same_features_agree() -> None:
    """Components of another basis have other signs and another order; the rotation undoes that."""
    maps = [noise(1, 12, 18, 16) * torch.linspace(2, 0.2, 16), noise(2, 9, 8, 16)]
    first = feature_rgb(maps)
    alone = feature_rgb([features.roll(3, -1) * -1 for features in maps])
    rotated = feature_rgb([features.roll(3, -1) * -1 for features in maps], like=first)
    assert max((a - b).abs().max() for a, b in zip(alone, first, strict=True)) > 0.5
    for one, other in zip(rotated, first, strict=True):
        assert (one - other).abs().mean() < 0.05


def test_colours_agree_between_grids_of_different_sizes() -> None:
    coarse = torch.nn.functional.interpolate(noise(1, 16, 1, 6, 8), scale_factor=(1, 4, 4))
    fine = coarse.movedim(1, -1)[0]
    small = fine[:, ::4, ::4].roll(5, -1) * -1
    (first,) = feature_rgb([fine])
    (second,) = feature_rgb([small], like=[first])
    assert (second - first[:, ::4, ::4]).abs().mean() < 0.05


def test_colours_to_agree_with_are_given_for_every_map() -> None:
    with pytest.raises(ValueError, match="like: 0 coloured maps for 1"):
        feature_rgb([noise(1, 4, 4, 8)], like=[])


@pytest.mark.parametrize("features", [torch.ones(1, 4, 4, 8), noise(1, 1, 1, 8)])
def test_patches_that_are_all_alike_are_grey(features: Tensor) -> None:
    first = feature_rgb([features])
    for colours in (*first, *feature_rgb([features], like=first)):
        assert torch.equal(colours, torch.full((*features.shape[:-1], 3), 0.5))


def test_a_patch_unlike_all_others_keeps_its_own_colour() -> None:
    features = torch.zeros(1, 20, 20, 8)
    features[0, 3, 4] = 1
    (colours,) = feature_rgb([features])
    assert (colours[0, 3, 4] - colours[0, 0, 0]).abs().max() >= 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_map_that_is_not_finite_is_refused(value: float) -> None:
    features = noise(1, 2, 2, 8)
    features[0, 1, 1, 3] = value
    with pytest.raises(ValueError, match=r"\(1, 2, 2, 8\) has NaN .* \(1\): .* encode in float32"):
        feature_rgb([noise(1, 2, 2, 8), features])


def test_maps_of_different_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"widths \[8, 9\]"):
        feature_rgb([noise(1, 2, 2, 8), noise(1, 2, 2, 9)])
