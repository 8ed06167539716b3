"""Figures and the features file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from encoders.contract import EncoderOutput
from encoders.inputs.intake import to_rgb
from vitgraph.analysis.colours import feature_rgb, principal_components
from vitgraph.features import Features, Item, load_features, save_features
from vitgraph.plots import plot_feature_maps, plot_nearest_patches
from vitgraph.terminal import format_table


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


def test_constant_features_are_drawn_not_divided_by_zero() -> None:
    (colours,) = feature_rgb([torch.ones(1, 4, 4, 8)])
    assert torch.isfinite(colours).all()


def test_maps_of_different_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"widths \[8, 9\]"):
        feature_rgb([noise(1, 2, 2, 8), noise(1, 2, 2, 9)])


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


def some_features() -> Features:
    items = [
        Item("a.jpg", "image", (40, 30), 1, (1, 4, 6), None),
        Item("b.mp4", "video", (96, 64), 7, (4, 4, 6), (2, 1, True)),
    ]
    outputs = [
        EncoderOutput(noise(24, 8), noise(6, 16), (noise(6, 16), noise(6, 16) + 1)),
        EncoderOutput(noise(96, 8).bfloat16(), noise(24, 16), ()),
    ]
    return Features("owner/name", None, "Qwen3VLEncoder", items, outputs)


def test_features_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = some_features()
    save_features(tmp_path / "f.safetensors", written)
    read = load_features(tmp_path / "f.safetensors")
    assert read[:4] == written[:4]
    for one, other in zip(read.outputs, written.outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("field", EncoderOutput._fields)
def test_a_field_left_out_is_read_back_as_left_out(field: str, tmp_path: Path) -> None:
    whole = some_features()
    written = whole._replace(outputs=[one._replace(**{field: None}) for one in whole.outputs])
    save_features(tmp_path / "f.safetensors", written)
    read = load_features(tmp_path / "f.safetensors")
    absent = () if field == "deepstack_features" else None  # the file cannot tell () from None
    for one, other in zip(read.outputs, whole.outputs, strict=True):
        torch.testing.assert_close(one, other._replace(**{field: absent}), rtol=0, atol=0)


@pytest.mark.parametrize("about", ["no JSON", "[]", "{}", '{"items": [{"name": "a"}]}'])
def test_features_file_with_a_damaged_header_is_refused_by_name(tmp_path: Path, about: str) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"x": torch.zeros(1)}, path, {"vitgraph": about})
    with pytest.raises(ValueError, match=f"{path}: .*damaged"):
        load_features(path)


def test_failed_write_leaves_the_old_features_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "f.safetensors"
    path.write_bytes(b"old")
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="the disk is full"):
        save_features(path, some_features())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"f.safetensors": b"old"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_features_of_mixed_dtypes_and_odd_sizes_are_aligned(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    outputs = [
        EncoderOutput(noise(rows, 3).to(dtype), noise(rows, 5).bfloat16(), (noise(rows, 1),))
        for rows in (1, 3, 0, 7)
    ]
    items = [Item("a.jpg", "image", (40, 30), 1, (1, 4, 6), None)] * len(outputs)
    written = Features("owner/name", "c0ffee", "Qwen3VLEncoder", items, outputs)
    save_features(tmp_path / "f.safetensors", written)
    read = load_features(tmp_path / "f.safetensors")
    assert read[:4] == written[:4]
    for one, other in zip(read.outputs, outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_file_of_another_kind_is_not_read_as_features(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="not a features file"):
        load_features(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_text("hello, this is no header")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_features(tmp_path / "y.safetensors")


def test_numbers_stand_to_the_right_in_a_table() -> None:
    lines = format_table(["name", "tokens"], [["a", "7"], ["bcdef", "1,234"]]).splitlines()
    assert lines == ["name   tokens", "-----  ------", "a           7", "bcdef   1,234"]


def test_maps_by_path_are_drawn_as_the_map_of_the_image() -> None:
    maps = [torch.rand(1, 4, 4, 8), torch.rand(1, 3, 5, 8)]
    photographs = [torch.zeros(3, 8, 8, dtype=torch.uint8)] * 2
    by_path = [{"image": maps[0], "tiles": torch.rand(1, 8, 8, 8)}, {"image": maps[1]}]
    drawn, wanted = (plot_feature_maps(photographs, given) for given in (by_path, maps))
    for axes, other in zip(drawn.axes, wanted.axes, strict=True):
        assert [image.get_array().tolist() for image in axes.images] == [
            image.get_array().tolist() for image in other.images
        ]
