"""Llama 4: tiles and pixels of transformers' processor, the published tile, loading."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

from encoders import Llama4Config
from encoders.contract import VisionInputs
from encoders.llama.llama4_pixels import CanvasPreprocessor, best_canvas
from tests.oracles import BY_NAME, build_pair, distance, draw_pixels
from tests.oracles.references.llama4 import llama4_output
from tests.support.photographs import china, photographs

GOLDEN = {
    (336, 336): (1, 1),
    (10, 10): (1, 1),
    (337, 336): (2, 1),
    (480, 640): (2, 2),
    (1080, 1920): (3, 5),
    (4000, 3000): (4, 3),
    (3000, 4000): (3, 4),
    (100, 4800): (1, 15),
    (20, 3000): (1, 9),
    (6000, 50): (16, 1),
    (1344, 1344): (4, 4),
    (1345, 1344): (4, 4),
}
"""Height and width of an image -> rows and columns of its canvas by transformers' processor."""


def processed(images: list[Any], **settings: Any) -> tuple[Any, list[list[int]]]:
    out = Llama4ImageProcessor(**settings)(images, return_tensors="pt")
    return out["pixel_values"], out["aspect_ratios"].tolist()


def assert_equal(got: VisionInputs, pixels: torch.Tensor, ratios: list[list[int]]) -> None:
    assert got.tiles == [(wide, tall, wide * tall > 1) for tall, wide in ratios]
    levels = ((got.pixel_values + 1) * 127.5).round()
    rounded = (levels.to(torch.bfloat16) * (1 / 255) - 0.5) / 0.5  # as the source rounds
    assert torch.equal(rounded, pixels)
    assert float((got.pixel_values - pixels.float()).abs().max()) < 2 / 255  # one level


@pytest.mark.parametrize(("size", "canvas"), GOLDEN.items(), ids=str)
def test_canvases_of_golden_sizes(size: tuple[int, int], canvas: tuple[int, int]) -> None:
    assert best_canvas(*size, max_tiles=16, tile=336, largest=False) == canvas


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize(("tile", "most"), [(56, 16), (56, 5), (98, 4)])
def test_tiles_are_those_of_the_processor(tile: int, most: int, largest: bool) -> None:
    rng, size = random.Random(tile), {"height": tile, "width": tile}
    settings = {"size": size, "max_patches": most, "resize_to_max_canvas": largest}
    sizes = [(rng.randint(8, 400), rng.randint(8, 400)) for _ in range(10)]
    images = [china().resize(size) for size in sizes] + photographs()[:2]
    ours = CanvasPreprocessor(14, image_size=tile).with_files({"preprocessor_config": settings})
    for image in images:
        assert_equal(ours([image]), *processed([image], **settings))
    assert_equal(ours(images), *processed(images, disable_grouping=True, **settings))


def test_max_tiles_of_a_call_bounds_the_canvas() -> None:
    got = CanvasPreprocessor(14)([china()], max_tiles=2)
    assert_equal(got, *processed([china()], max_patches=2))
    with pytest.raises(ValueError, match="max_tiles=1025: at most 1024"):
        CanvasPreprocessor(14)([china()], max_tiles=1025)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": {"height": 448, "width": 448}}, "takes views of 336x336"),
        ({"max_patches": 0}, "max_patches=0 must be a positive integer"),
        ({"resize_to_max_canvas": "no"}, "must be true or false"),
        ({"add_global_tile": False}, "add_global_tile=False is not implemented"),
    ],
)
def test_a_file_is_read_strictly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CanvasPreprocessor(14).with_files({"preprocessor_config": change})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"intermediate_size": 4096}, "intermediate_size"),
        ({"vision_output_dim": 1024}, "vision_output_dim"),
        ({"norm_eps": 1e-6}, "norm_eps"),
        ({"pixel_shuffle_ratio": 0.25}, "pixel_shuffle_ratio"),
        ({"vision_feature_layer": -2}, "vision_feature_layer"),
    ],
)
def test_values_that_are_not_implemented_are_refused(change: dict[str, Any], field: str) -> None:
    config = BY_NAME["llama4"].config
    with pytest.raises(ValueError, match=f"{field}=.* is not implemented"):
        Llama4Config.from_hf({**config, "vision_config": {**config["vision_config"], **change}})


def test_a_published_tile_matches_in_float32() -> None:
    family, grid = BY_NAME["llama4"], [[2, 24, 24], [1, 24, 24]]
    encoder, reference = build_pair(family, {**family.tiny, "image_size": 336})
    pixels = draw_pixels(encoder, grid)
    ours, theirs = encoder(pixels, grid), llama4_output(reference, pixels, torch.tensor(grid))
    assert distance(ours.pooler_output, theirs.pooler_output) <= 1e-5
    assert distance(ours.last_hidden_state, theirs.last_hidden_state) <= 1e-5
    assert ours.pooler_output.shape == (3 * 144, 48)
