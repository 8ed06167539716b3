"""Features of each path: states of inner blocks, and maps of the image and of its tiles."""

from __future__ import annotations

import pytest
import torch

from tests.support.towers.step3_paths import COUNTS, IMAGES, NAMES, shared


@pytest.mark.parametrize("name", NAMES)
def test_intermediates_are_those_of_each_path(name: str) -> None:
    encoder = shared(name)
    inputs = encoder.preprocess(IMAGES)
    found = encoder.forward_intermediates(inputs, indices=[-1])
    for path, (last,) in found.items():
        output = encoder.paths[path](*inputs.paths[path][:2])
        assert torch.equal(last, output.last_hidden_state)


@pytest.mark.parametrize("name", NAMES)
def test_intermediates_of_each_path_come_as_maps_too(name: str) -> None:
    encoder = shared(name)
    inputs = encoder.preprocess(IMAGES)
    rows = encoder.forward_intermediates(inputs, indices=[0, -1])
    maps = encoder.forward_intermediates(inputs, indices=[0, -1], output_fmt="NCHW")
    assert maps.keys() == rows.keys() == inputs.paths.keys()
    for path, states in rows.items():
        grids = inputs.paths[path].grid_thw
        for state, items in zip(states, maps[path], strict=True):
            expected = encoder.paths[path].feature_maps(state, grids)
            for item, raster in zip(items, expected, strict=True):
                assert torch.equal(item.permute(0, 2, 3, 1), raster)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["last_hidden_state", "pooler_output"])
def test_maps_are_one_of_the_image_and_one_of_its_tiles(name: str, kind: str) -> None:
    """Every row carries its item, path, row and column in the image."""
    encoder, side, whole = shared(name), *((6, 8) if kind == "last_hidden_state" else (2, 2))
    inputs = encoder.preprocess(IMAGES)
    codes: list[tuple[int, int, int, int]] = []
    for item, (columns, rows, tiled) in enumerate(inputs.tiles or []):
        for tile in range(columns * rows if tiled else 0):
            top, left = side * (tile // columns), side * (tile % columns)
            codes += [(item, 1, top + y, left + x) for y in range(side) for x in range(side)]
        codes += [(item, 0, y, x) for y in range(whole) for x in range(whole)]
    for item, maps in enumerate(encoder.feature_maps(torch.tensor(codes), inputs)):
        assert set(maps) == ({"image", "tiles"} if COUNTS[item] else {"image"})
        for path, found in maps.items():
            rows, columns = found.shape[1:3]
            for y in range(rows):
                for x in range(columns):
                    assert found[0, y, x].tolist() == [item, path == "tiles", y, x]


def test_features_of_other_inputs_are_refused() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES)
    with pytest.raises(
        ValueError, match="features have 7 rows: these inputs make 832 patches or 80"
    ):
        encoder.feature_maps(torch.zeros(7, 48), inputs)
    with pytest.raises(ValueError, match="features is of type list"):
        encoder.feature_maps([1], inputs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has the paths image, tiles.*call encoder.feature_maps"):
        encoder.feature_maps(torch.zeros(7, 48), inputs.grid_thw)
