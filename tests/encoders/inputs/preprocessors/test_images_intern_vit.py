"""Images and videos for InternViT have the tiles of the torchvision-backed processors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import GotOcr2ImageProcessor, InternVLVideoProcessor

from encoders.inputs.sizes import best_tiling
from encoders.intern.intern_vit_pixels import TilePreprocessor
from tests.support.photographs import china, hopper, panning_clip, photographs

OURS = TilePreprocessor()
SETTINGS: dict[str, Any] = {
    "size": {"height": 448, "width": 448},
    "image_mean": list(OURS.mean),
    "image_std": list(OURS.std),
}
REFERENCE = GotOcr2ImageProcessor(crop_to_patches=True, **SETTINGS)


def test_photographs_give_the_reference_s_tiles_to_the_bit() -> None:
    images = photographs()
    wanted = REFERENCE(images, return_tensors="pt")
    got = OURS(images)
    assert torch.equal(got.pixel_values, wanted["pixel_values"])
    assert got.grid_thw[:, 0].tolist() == [int(count) for count in wanted["num_patches"]]
    assert got.grid_thw[:, 1:].unique().tolist() == [32]


def test_tiles_say_columns_rows_and_thumbnail() -> None:
    images = [Image.new("RGB", size) for size in ((448, 448), (1344, 896), (600, 1200))]
    got = OURS(images)
    assert got.tiles == [(1, 1, False), (3, 2, True), (1, 2, True)]
    assert got.grid_thw.tolist() == [[1, 32, 32], [7, 32, 32], [3, 32, 32]]


def test_tiles_run_row_by_row_and_the_thumbnail_comes_last() -> None:
    image = np.zeros((896, 1344, 3), dtype=np.uint8)
    for number in range(6):
        row, column = divmod(number, 3)
        image[448 * row : 448 * row + 448, 448 * column : 448 * column + 448] = 40 * number
    tiles = OURS([image]).pixel_values
    green = (tiles[:, 1].mean((1, 2)) * OURS.std[1] + OURS.mean[1]) * 255
    assert torch.allclose(green, torch.tensor([0.0, 40, 80, 120, 160, 200, 100]), atol=0.5)


@pytest.mark.parametrize("most", [1, 2, 6, 40])
def test_max_tiles_bounds_the_tiles(most: int) -> None:
    image = china().resize((1000, 520))
    wanted = REFERENCE([image], return_tensors="pt", max_patches=most)
    got = OURS([image], max_tiles=most)
    assert torch.equal(got.pixel_values, wanted["pixel_values"])
    assert got.tiles is not None
    assert got.tiles[0][0] * got.tiles[0][1] <= most


def test_without_tiling_every_image_is_one_tile() -> None:
    images = photographs()
    wanted = GotOcr2ImageProcessor(**SETTINGS)(images, return_tensors="pt")["pixel_values"]
    got = TilePreprocessor(dynamic=False)(images)
    assert torch.equal(got.pixel_values, wanted)
    assert got.tiles == [(1, 1, False)] * len(images)


def test_max_tiles_turns_tiling_on() -> None:
    got = TilePreprocessor(dynamic=False)([china()], max_tiles=12)
    assert got.tiles == OURS([china()]).tiles == [(3, 2, True)]


def test_without_a_thumbnail_there_are_only_tiles() -> None:
    got = TilePreprocessor(use_thumbnail=False)([china()])
    assert got.tiles == [(3, 2, False)]
    assert torch.equal(got.pixel_values, OURS([china()]).pixel_values[:-1])


def test_another_tile_size_makes_another_grid() -> None:
    settings = {**SETTINGS, "size": {"height": 224, "width": 224}}
    reference = GotOcr2ImageProcessor(crop_to_patches=True, **settings)
    got = TilePreprocessor(image_size=224)([hopper()])
    assert torch.equal(got.pixel_values, reference([hopper()], return_tensors="pt")["pixel_values"])
    assert got.grid_thw[0, 1:].tolist() == [16, 16]


def test_a_video_is_a_tile_a_frame() -> None:
    clips = [panning_clip(5), panning_clip(3, 200, 100)]
    reference = InternVLVideoProcessor(**SETTINGS)
    wanted = [reference([clip], return_tensors="pt")["pixel_values_videos"][0] for clip in clips]
    got = OURS([china()], clips)
    assert got.grid_thw.tolist() == [[7, 32, 32], [5, 32, 32], [3, 32, 32]]
    assert got.tiles == [(3, 2, True), (1, 1, False), (1, 1, False)]
    assert torch.equal(got.pixel_values[7:], torch.cat(wanted))


@pytest.mark.slow
def test_grids_and_pixels_of_150_random_clips_are_the_reference_s() -> None:
    reference = InternVLVideoProcessor(**SETTINGS)
    rng = random.Random(11)
    array = np.asarray(china())
    for _ in range(150):
        height, width = rng.randint(8, 400), rng.randint(8, 500)
        clip = np.stack([array[n : n + height, n : n + width] for n in range(rng.randint(1, 3))])
        wanted = reference([clip], return_tensors="pt", input_data_format="channels_last")
        got = OURS(videos=[clip])
        assert got.grid_thw.tolist() == [[len(clip), 32, 32]], clip.shape
        assert torch.equal(got.pixel_values, wanted["pixel_values_videos"][0]), clip.shape


def test_sampling_takes_the_reference_s_frames() -> None:
    clip = panning_clip(20)
    reference = InternVLVideoProcessor(**SETTINGS)
    wanted = reference([clip], return_tensors="pt", do_sample_frames=True, num_frames=6)
    got = OURS(videos=[clip], num_frames=6)
    assert torch.equal(got.pixel_values, wanted["pixel_values_videos"][0])


def test_nothing_gives_no_tiles() -> None:
    got = OURS()
    assert got.pixel_values.shape == (0, 3, 448, 448)
    assert got.grid_thw.shape == (0, 3)
    assert got.tiles == []


@pytest.mark.slow
def test_tiles_of_150_random_sizes_are_the_reference_s() -> None:
    rng = random.Random(5)
    small = TilePreprocessor(image_size=56)
    settings = {**SETTINGS, "size": {"height": 56, "width": 56}}
    reference = GotOcr2ImageProcessor(crop_to_patches=True, **settings)
    for _ in range(150):
        size = rng.randint(1, 700), rng.choice([rng.randint(1, 30), rng.randint(1, 700)])
        image = china().resize(size)
        wanted = reference([image], return_tensors="pt")
        got = small([image])
        assert got.grid_thw[0].tolist() == [int(wanted["num_patches"][0]), 4, 4], size
        assert torch.equal(got.pixel_values, wanted["pixel_values"]), size


def test_tile_counts_of_600_random_sizes_are_the_reference_s() -> None:
    rng = random.Random(6)
    for _ in range(600):
        width, height = rng.randint(1, 5000), rng.randint(1, 5000)
        columns, rows = best_tiling(width, height, 1, 12, 448)
        tiles = columns * rows + (columns * rows > 1)
        assert tiles == REFERENCE.get_number_of_image_patches(height, width), (width, height)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"min_pixels": 100}, "min_pixels=100: InternViT resizes to tiles of 448x448.*max_tiles"),
        ({"max_pixels": 100}, "max_pixels=100: InternViT resizes to tiles of 448x448.*max_tiles"),
        ({"max_tiles": 2000}, "max_tiles=2000: at most 1024"),
        ({"max_tiles": 0}, "max_tiles=0: must be a positive integer"),
        ({"max_tiles": 2.5}, r"max_tiles=2\.5: must be a positive integer"),
    ],
)
def test_keywords_that_make_no_sense_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OURS([china()], **keywords)


def test_fewer_tiles_than_the_checkpoint_s_least_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_tiles=1: it must be at least .* min_tiles=2"):
        TilePreprocessor(min_tiles=2)([china()], max_tiles=1)


def test_contradicting_bounds_cannot_be_constructed() -> None:
    with pytest.raises(ValueError, match="min_tiles=3, max_tiles=2: must be from 1 to"):
        TilePreprocessor(min_tiles=3, max_tiles=2)


def test_tiles_whose_area_is_over_the_limit_are_refused() -> None:
    tower = TilePreprocessor(image_size=8192, max_tiles=4)  # 4 tiles of 2**26 pixels
    assert tower.max_tiles == 4
    with pytest.raises(ValueError, match="5 tiles of 8192x8192 pixels are 335544320 pixels"):
        TilePreprocessor(image_size=8192, max_tiles=5)
    with pytest.raises(ValueError, match="an image may be resized to at most 268435456"):
        tower([china().resize((70, 10))], max_tiles=7)
