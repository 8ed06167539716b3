"""Figures of feature maps and of nearest patches."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from encoders.inputs.intake import to_rgb
from vitgraph.plots import plot_feature_maps, plot_nearest_patches


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def photographs() -> list[object]:
    pixels = np.arange(30 * 40 * 3, dtype=np.uint8).reshape(30, 40, 3)
    return [Image.fromarray(pixels), pixels, torch.from_numpy(pixels).permute(2, 0, 1)]


def test_figure_shows_each_photograph_beside_its_maps() -> None:
    maps = [noise(1, 3, 4, 8)] * 3
    figure = plot_feature_maps(photographs(), {"one": maps, "two": maps}, title="all")
    assert len(figure.axes) == 9
    assert [axes.get_title() for axes in figure.axes[:3]] == ["photograph", "one", "two"]
    for axes in figure.axes:
        assert axes.images[0].get_extent() == [0, 40, 30, 0]  # in the photograph's pixels
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert to_rgb(Image.open(buffer)).shape[2] > 300


def test_encoders_beyond_five_are_wrapped_into_further_blocks() -> None:
    maps = [noise(1, 3, 4, 8)] * 3
    figure = plot_feature_maps(photographs(), {f"tower {n}": maps for n in range(7)})
    used = [axes for axes in figure.axes if axes.axison]
    titles = [axes.get_title() for axes in used if axes.get_title()]
    first, second = [f"tower {n}" for n in range(4)], [f"tower {n}" for n in range(4, 7)]
    assert titles == ["photograph", *first, "photograph", *second]
    assert len(used) == 3 * 7 + 3 * 2
    assert figure.get_size_inches()[0] < 13  # inches; ten columns in a row cannot be read


def test_caption_says_what_the_colours_mean() -> None:
    maps = [noise(1, 3, 4, 8)] * 3
    alone = plot_feature_maps(photographs(), maps).get_supxlabel()
    assert "principal components" in alone
    assert "first encoder" not in alone
    both = plot_feature_maps(photographs(), {"one": maps, "two": maps}).get_supxlabel()
    assert "rotated to agree with the colours of the first encoder" in both


@pytest.mark.parametrize("encoders", [1, 5])
def test_caption_lies_inside_of_the_figure(encoders: int) -> None:
    maps = [noise(1, 3, 4, 8)] * 3
    figure = plot_feature_maps(photographs(), {f"tower {n}": maps for n in range(encoders)})
    figure.savefig(io.BytesIO(), format="png")
    (caption,) = [text for text in figure.texts if text.get_text() == figure.get_supxlabel()]
    box = caption.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


def test_maps_not_laid_out_in_space_are_refused() -> None:
    for wrong in (noise(4, 6, 16), noise(24, 16), noise(1, 4, 6, 2)):
        with pytest.raises(ValueError, match=r"\[t, h, w, D\]") as caught:
            plot_feature_maps(photographs()[:1], [wrong])
        assert str(tuple(wrong.shape)) in str(caught.value)


def test_a_figure_of_no_image_or_no_map_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        plot_feature_maps([], {"one": []})
    with pytest.raises(ValueError, match="at least one image and its map"):
        plot_feature_maps(photographs(), {})


def test_a_map_for_every_image_is_demanded() -> None:
    with pytest.raises(ValueError, match="1 map for 3 images"):
        plot_feature_maps(photographs(), [noise(1, 3, 4, 8)])


def test_swapped_images_and_maps_are_refused_with_the_right_order() -> None:
    features = noise(1, 3, 4, 8)
    for image in photographs()[:2]:
        for images, maps in (
            ([features], [image]),
            (features, image),
            ([features], {"a": [image]}),
        ):
            with pytest.raises(ValueError, match="pass the images first, then their maps"):
                plot_feature_maps(images, maps)


def test_one_map_that_is_in_no_list_is_refused() -> None:
    features = noise(1, 3, 4, 8)
    for image in photographs():
        with pytest.raises(ValueError, match="is one Tensor, not a list of maps"):
            plot_feature_maps([image], features)


def test_nearest_patches_are_drawn_at_the_middle_of_their_patch() -> None:
    features = noise(1, 3, 4, 8)
    first, second = photographs()[:2]
    figure = plot_nearest_patches((first, second), (features, features), [(0, 0), (2, 3)])
    marks = [line.get_xydata().tolist()[0] for line in figure.axes[1].lines]
    assert marks == [[5.0, 5.0], [35.0, 25.0]]


def test_point_outside_of_the_map_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 0\) lies outside of the 3x4 map"):
        plot_nearest_patches(tuple(photographs()[:2]), (noise(3, 4, 8),) * 2, [(3, 0)])


def test_maps_by_path_are_drawn_as_the_map_of_the_image() -> None:
    maps = [torch.rand(1, 4, 4, 8), torch.rand(1, 3, 5, 8)]
    photographs = [torch.zeros(3, 8, 8, dtype=torch.uint8)] * 2
    by_path = [{"image": maps[0], "tiles": torch.rand(1, 8, 8, 8)}, {"image": maps[1]}]
    drawn, wanted = (plot_feature_maps(photographs, given) for given in (by_path, maps))
    for axes, other in zip(drawn.axes, wanted.axes, strict=True):
        assert [image.get_array().tolist() for image in axes.images] == [
            image.get_array().tolist() for image in other.images
        ]
