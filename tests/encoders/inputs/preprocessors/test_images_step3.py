"""Images for the Step towers are cut as StepFun's own processor cuts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor

from encoders.inputs.intake import Video
from encoders.inputs.processor_files import CLIP_MEAN, CLIP_STD
from encoders.step.step3_pixels import CropPreprocessor
from tests.support.photographs import china, hopper

OURS = CropPreprocessor()
LEVELS = torch.tensor(CLIP_STD).view(3, 1, 1) * 255
"""Levels of 255 per unit of normalised pixels."""
COUNTS = {
    (1920, 1080): (4, 2),
    (728, 728): (2, 2),
    (727, 727): None,
    (728, 300): (2, 1),
    (729, 700): (2, 2),
    (1000, 600): (2, 1),
    (2000, 1400): (4, 3),
    (4000, 400): (10, 1),
    (1536, 1024): (3, 2),
    (300, 200): None,
    (10, 200): None,
}
"""Columns and rows of tiles by width and height of the image, from a run of vLLM's copy."""


def blank(size: tuple[int, int]) -> Image.Image:
    return Image.new("RGB", size, (200, 100, 50))


@pytest.mark.parametrize("size", COUNTS, ids=str)
def test_an_image_is_cut_into_the_published_number_of_tiles(size: tuple[int, int]) -> None:
    inputs = OURS([blank(size)])
    columns, rows = COUNTS[size] or (0, 0)
    assert inputs.tiles == [(columns, rows, True) if columns else (1, 1, False)]
    pixels, grids, _ = inputs.paths["tiles"]
    assert pixels.shape == (columns * rows, 3, 504, 504)
    assert grids.tolist() == ([[columns * rows, 36, 36]] if columns else [])
    assert inputs.pixel_values.shape == (1, 3, 728, 728)
    assert inputs.grid_thw.tolist() == [[1, 52, 52]]


@pytest.mark.parametrize("size", [(1024, 768), (1920, 1080), (640, 360)], ids=str)
def test_windows_inside_an_image_have_the_pixels_of_transformers(size: tuple[int, int]) -> None:
    image = china().resize(size)
    wanted, got = Step3p7ImageProcessor()(image, return_tensors="pt"), OURS([image])
    assert torch.equal(got.pixel_values, wanted["pixel_values"])
    assert torch.equal(got.paths["tiles"].pixel_values, wanted["pixel_values_local"])


@pytest.mark.parametrize(
    "size",
    [
        (800, 450),
        (450, 800),
        (729, 400),
        (1920, 480),
        (3200, 300),
        (640, 360),
        (20, 200),
        (640, 427),
    ],
    ids=str,
)
def test_pixels_are_those_of_pil_and_floats_but_for_rounding(size: tuple[int, int]) -> None:
    """PIL and torch round to other levels twice, so two levels are between them at most."""
    image = hopper().resize(size)
    whole, tiles = by_pil(image)
    got = OURS([image])
    pairs = [(got.pixel_values[0], whole)]
    pairs += zip(got.paths["tiles"].pixel_values, tiles, strict=True)
    for ours, theirs in pairs:
        apart = (ours - theirs).abs() * LEVELS
        assert float(apart.max()) <= 2.01
        assert float(apart.mean()) <= 0.35


def by_pil(image: Image.Image) -> tuple[Tensor, list[Tensor]]:
    """The whole view and the tiles of an image, cut by PIL and resized the last time as floats."""
    width, height = image.size
    if min(width, height) < 32 and max(width, height) > 4 * min(width, height):
        square = Image.new("RGB", (max(image.size), max(image.size)))
        square.paste(image, (0, 0))
        image, width, height = square, *square.size
    if max(width, height) > 3024:
        scale = 3024 / max(width, height)
        image = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BILINEAR)
        width, height = image.size
    long, short = max(width, height), min(width, height)
    side = 504 if long <= 4 * short else min(short, 504)
    if long < 728:
        side = short if long > 1.5 * short else 0
    if not side:
        return as_floats(image, 728), []
    sizes = []
    for length in (width, height):
        part = length / side - length // side
        sizes.append(side * (length // side + (part > 0.2)) if length >= side else length)
    cut = image.resize((sizes[0], sizes[1]), Image.Resampling.BILINEAR)
    places = [(x, y) for y in range(0, sizes[1], side) for x in range(0, sizes[0], side)]
    crops = [cut.crop((x, y, x + side, y + side)) for x, y in places]
    return as_floats(image, 728), [as_floats(crop, 504) for crop in crops]


def as_floats(image: Image.Image, side: int) -> Tensor:
    """Normalise, then resize."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(stats).view(3, 1, 1) for stats in (CLIP_MEAN, CLIP_STD))
    normal = ((pixels - mean) / std)[None]
    return F.interpolate(normal, (side, side), mode="bilinear", antialias=True)[0]


def test_a_window_is_black_where_it_leaves_the_image() -> None:
    (first, second) = OURS([blank((800, 450))]).paths["tiles"].pixel_values
    black = (0 - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD)
    for tile in (first, second):
        assert torch.allclose(tile[:, 450:], black.view(3, 1, 1))
        assert float((tile[:, :450] - tile[:, :1, :1]).abs().max()) == 0.0


def test_tiles_run_row_by_row() -> None:
    image = np.zeros((1008, 1512, 3), dtype=np.uint8)
    for number in range(6):
        row, column = divmod(number, 3)
        image[504 * row : 504 * row + 504, 504 * column : 504 * column + 504] = 40 * number
    tiles = OURS([image]).paths["tiles"].pixel_values
    green = (tiles[:, 1].mean((1, 2)) * CLIP_STD[1] + CLIP_MEAN[1]) * 255
    assert torch.allclose(green, torch.tensor([0.0, 40, 80, 120, 160, 200]), atol=0.5)


def test_a_thin_image_lies_on_a_black_square() -> None:
    whole = OURS([blank((200, 10))]).pixel_values[0]
    black = (0 - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD)
    assert torch.allclose(whole[:, 60:], black.view(3, 1, 1).expand(-1, 668, 728))
    assert bool((whole[:, :30] > black.view(3, 1, 1)).all())


def test_items_with_and_without_tiles_keep_their_order() -> None:
    inputs = OURS([blank((300, 200)), blank((1000, 600)), blank((100, 100)), blank((728, 728))])
    assert inputs.tiles == [(1, 1, False), (2, 1, True), (1, 1, False), (2, 2, True)]
    assert inputs.paths["tiles"].grid_thw.tolist() == [[2, 36, 36], [4, 36, 36]]
    assert inputs.paths["tiles"].items == (1, 3)
    assert inputs.paths["image"].items == (0, 1, 2, 3)


def test_no_images_make_empty_paths() -> None:
    for path in OURS().paths.values():
        assert len(path.pixel_values) == len(path.grid_thw) == len(path.items) == 0


def test_tiling_can_be_off() -> None:
    inputs = CropPreprocessor(tiled=False)([blank((1920, 1080))])
    assert inputs.tiles == [(1, 1, False)]
    assert len(inputs.paths["tiles"].pixel_values) == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_tiles": 4}, "max_tiles=4: this family takes images in views of fixed sizes; leave"),
        ({"max_pixels": 4000}, "max_pixels=4000: this family takes images in views"),
        ({"min_pixels": 4000}, "min_pixels=4000: this family takes images in views"),
        ({"fps": 2.0}, r"fps=2.0: this tower takes only images, which have no frames"),
        ({"max_tiles": 0}, "max_tiles=0: must be a positive integer"),
    ],
)
def test_keywords_that_would_change_the_cut_are_refused(
    limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OURS([blank((100, 100))], **limits)


def test_a_video_is_refused_and_the_fix_is_named() -> None:
    frames = [blank((100, 100))] * 2
    for videos in ([frames], frames, Video(frames), iter([frames]), "clip.mp4"):
        with pytest.raises(ValueError, match="only images: pass the frames of a video as images"):
            OURS(videos=videos)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            (1, 100_000),
            "is 1x100000 pixels: a thin image is laid on a square, and one of 10000000000",
        ),
        ((32, 200_000), "is 32x200000 pixels: nothing is left of it at 3024 pixels; crop it"),
        ((40, 100_000), "is 1x3024 pixels after scaling, which makes 3024 tiles: at most 1024"),
    ],
    ids=str,
)
def test_an_absurd_image_is_refused_before_memory_is_taken(
    size: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"image 1: {message}"):
        OURS([blank((8, 8)), blank(size)])


def test_files_of_transformers_set_mean_and_std() -> None:
    section = {"image_processor_type": "Step3p7ImageProcessor", "image_mean": [0.5, 0.4, 0.3]}
    found = OURS.with_files({"preprocessor_config": section})
    assert (found.mean, found.std) == ((0.5, 0.4, 0.3), CLIP_STD)
    other = {"processor_class": "Step3VLProcessor", "size": 1}  # a file that StepFun's code ignores
    assert OURS.with_files({"preprocessor_config": other}) == OURS


@pytest.mark.parametrize(
    ("key", "value"),
    [("resample", 3), ("patch_size", 448), ("max_image_size", 1000), ("size", {"height": 512})],
)
def test_files_that_contradict_the_tower_are_refused(key: str, value: Any) -> None:
    section = {"image_processor_type": "Step3p7ImageProcessor", key: value}
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {key}=.* is not implemented"):
        OURS.with_files({"preprocessor_config": section})
