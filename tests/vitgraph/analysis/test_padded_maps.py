"""Pictures of the maps of towers that pad show the photograph without its border."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from encoders import DeepseekOCREncoder
from vitgraph.commands.encode_items import Media, encode_items
from vitgraph.plots import crop_padding
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

PADDED = ("deepseek_vl", "deepseek_vl_hybrid", "deepseek_vl2", "deepseek_ocr", "llama4")
WIDE = torch.arange(60 * 120 * 3, dtype=torch.int32).view(3, 60, 120).to(torch.uint8)


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [
        ((640, 640), slice(0, 8), slice(0, 8)),
        ((640, 320), slice(2, 6), slice(0, 8)),
        ((320, 640), slice(0, 8), slice(2, 6)),
        ((640, 400), slice(1, 6), slice(0, 8)),
        ((4000, 2), slice(3, 4), slice(0, 8)),
    ],
)
def test_the_border_of_a_padded_view_is_cut_off(
    size: tuple[int, int], rows: slice, columns: slice
) -> None:
    view = torch.arange(64.0).view(1, 8, 8, 1)
    assert torch.equal(crop_padding(view, size), view[:, rows, columns])


@pytest.mark.parametrize("family", PADDED)
def test_a_map_to_draw_has_the_shape_of_its_photograph(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(write_seeded_checkpoint(tmp_path / family, family), progress=False)
    (drawn,) = encode_items(encoder, [Media("wide", WIDE)])
    _, height, width, _ = drawn.feature_map.shape
    assert abs(width - 2 * height) <= 2


def test_a_view_that_is_stretched_is_drawn_whole(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "ocr", "deepseek_ocr")
    encoder = load_encoder(folder, progress=False)
    assert isinstance(encoder, DeepseekOCREncoder)
    (drawn,) = encode_items(encoder.at_mode("tiny"), [Media("wide", WIDE)])
    _, height, width, _ = drawn.feature_map.shape
    assert height == width
