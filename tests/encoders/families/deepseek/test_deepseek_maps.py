"""DeepSeek's features in space: maps of the whole image and of its tiles."""

from __future__ import annotations

import pytest
import torch

from encoders.base.raster import take_apart
from tests.support.towers.deepseek import FAMILIES, TILES, build, draw_inputs


@pytest.mark.parametrize("field", ["last_hidden_state", "pooler_output"])
@pytest.mark.parametrize("name", FAMILIES)
def test_maps_cover_the_whole_image_and_the_stitched_tiles(name: str, field: str) -> None:
    encoder = build(name)
    inputs = draw_inputs(encoder, TILES[name])
    features = torch.cat([getattr(item, field) for item in encoder(inputs)])
    maps = encoder.feature_maps(features, inputs)
    for item, (columns, rows, tiled) in zip(maps, TILES[name], strict=True):
        one, height, width, _ = item["image"].shape
        assert one == 1
        assert ("tiles" in item) == tiled
        if tiled:
            # Tiles have half the side of the whole view in OCR, three quarters of it in OCR-2.
            scale = {"deepseek_ocr": 0.5, "deepseek_ocr2": 0.75}.get(name, 1)
            expected = (1, rows * height * scale, columns * width * scale)
            assert tuple(item["tiles"].shape[:3]) == expected


@pytest.mark.parametrize("name", ["deepseek_vl2", "deepseek_ocr"])
def test_a_bright_tile_is_bright_at_its_place(name: str) -> None:
    """All weights after the patch embedding are zero but those that carry it to the output."""
    encoder = build(name)
    tiles = [(1, 1, name == "deepseek_vl2"), (3, 2, True)]
    inputs = draw_inputs(encoder, tiles)
    path = inputs.paths["tiles" if name == "deepseek_ocr" else "image"]
    path.pixel_values.zero_()
    path.pixel_values[-2] = 1.0  # row 1, column 1 of the second image
    outputs = encoder(inputs)
    maps = encoder.feature_maps(torch.cat([item.last_hidden_state for item in outputs]), inputs)
    picture = maps[1]["tiles"][0].unflatten(0, (2, -1)).unflatten(2, (3, -1))
    first = picture[0, :, 0]
    same = [
        [torch.allclose(picture[row, :, column], first, atol=1e-4) for column in range(3)]
        for row in range(2)
    ]
    assert same == [[True, True, True], [True, False, True]]


@pytest.mark.parametrize("name", FAMILIES)
def test_features_of_other_inputs_are_refused(name: str) -> None:
    encoder = build(name)
    inputs = draw_inputs(encoder, TILES[name])
    with pytest.raises(ValueError, match=r"features have 7 .*make"):
        encoder.feature_maps(torch.zeros(7, 4), inputs)
    with pytest.raises(ValueError, match=r"has the paths image.*call encoder.feature_maps\(f"):
        encoder.feature_maps(torch.zeros(7, 4), inputs.grid_thw)


def test_newlines_and_separator_are_left_out_of_maps() -> None:
    rows = torch.arange(2 * 3 + 1 + 2 * 2)[:, None]
    grids = {"image": (2, 2), "tiles": (2, 1)}
    views = take_apart(rows, ("image", "separator", "tiles"), grids)
    assert views["image"][0, ..., 0].tolist() == [[0, 1], [3, 4]]
    assert views["tiles"][0, ..., 0].tolist() == [[7], [9]]
