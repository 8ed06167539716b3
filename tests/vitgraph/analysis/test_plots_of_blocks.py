"""Figures of attention and of the likeness of blocks."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch

import vitgraph
from tests.support.towers.step3_paths import image
from tests.support.towers.streams import tower


def test_attention_is_drawn_over_the_photograph() -> None:
    photograph = image(120, 90)
    (maps,) = vitgraph.attention_maps(tower("qwen2_5_vl"), [photograph], blocks=None)
    figure = vitgraph.plot_attention(
        photograph, maps, titles=[f"block {n}" for n in range(len(maps))]
    )
    first, second, *_ = figure.axes
    assert len(first.images) == 1
    assert [len(drawn.get_array().shape) for drawn in second.images] == [2, 2]
    assert all(drawn.get_extent() == [0, 120, 90, 0] for drawn in second.images)
    assert second.images[1].get_array().shape == tuple(maps[0].shape[1:])
    assert second.get_title() == "block 0"
    assert f"{float(maps[0].max()):.2g}" in second.get_xlabel()
    figure.savefig(io.BytesIO(), format="png")


def test_asked_patch_is_marked_on_every_picture() -> None:
    maps = [torch.rand(1, 4, 5), torch.rand(1, 4, 5)]
    figure = vitgraph.plot_attention(image(40, 30), maps, queries=[(0, 1, 2)])
    for axes in figure.axes[:3]:
        (mark,) = axes.lines
        assert mark.get_xydata().tolist() == [[40 * 2.5 / 5, 30 * 1.5 / 4]]
    clip = vitgraph.plot_attention(image(40, 30), torch.rand(3, 4, 5), queries=[(0, 1, 2)])
    assert [list(axes.lines) for axes in clip.axes] == [[], []]


@pytest.mark.parametrize("query", [(0, 4, 0), (1, 0, 0), (0, -1, 0), (0, 0)])
def test_a_patch_outside_of_the_map_cannot_be_marked(query: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"the map has 1 x 4 x 5 patches; pass"):
        vitgraph.plot_attention(image(40, 30), torch.rand(1, 4, 5), queries=[query])


def test_every_head_of_a_block_has_a_panel_and_panels_wrap() -> None:
    figure = vitgraph.plot_attention(image(40, 30), torch.rand(7, 3, 4, 5))
    assert sum(bool(axes.images) for axes in figure.axes) == 8
    assert len(figure.axes) == 10
    assert figure.get_size_inches()[0] < 12


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ([], "at least one map"),
        (torch.rand(4, 5), r"a map is \(4, 5\): pass the maps"),
        ([[torch.rand(1, 4, 5)]], "a map is list: pass the maps"),
    ],
)
def test_what_is_no_attention_map_is_refused(maps: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vitgraph.plot_attention(image(40, 30), maps)


def test_titles_are_one_per_panel() -> None:
    with pytest.raises(ValueError, match="1 titles for 2 panels"):
        vitgraph.plot_attention(image(40, 30), [torch.rand(1, 4, 5)] * 2, titles=["one"])


def test_similarity_is_drawn_with_its_numbers_from_0_to_1() -> None:
    figure = vitgraph.plot_similarity(torch.rand(3, 5), names=("small", "large"), title="CKA")
    axes, bar = figure.axes
    assert axes.images[0].get_array().shape == (3, 5)
    assert axes.images[0].get_clim() == (0, 1)
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("small", "large")
    assert "CKA" in bar.get_ylabel()
    figure.savefig(io.BytesIO(), format="png")


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a matrix \[L, L'\]"):
        vitgraph.plot_similarity(torch.rand(3))


def test_missing_matplotlib_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (
        lambda: vitgraph.plot_attention(image(40, 30), torch.rand(1, 4, 5)),
        lambda: vitgraph.plot_similarity(torch.rand(3, 3)),
        lambda: vitgraph.plot_feature_maps([image(40, 30)], [torch.rand(1, 3, 4, 8)]),
    ):
        with pytest.raises(ValueError, match=r"pip install 'matplotlib>=3\.8'"):
            call()
