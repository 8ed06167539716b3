"""Images for the Qwen towers have the grids and pixels of the torchvision-backed processor."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor

from encoders.inputs.patches import PatchPreprocessor
from tests.support.photographs import china, photographs

SIZES = {"temporal_patch_size": 2, "merge_size": 2}
QWEN2 = PatchPreprocessor.published("qwen2_vl", patch_size=14, **SIZES)
QWEN3 = PatchPreprocessor.published("qwen3_vl", patch_size=16, **SIZES)
FAMILIES = [pytest.param(QWEN2, id="qwen2_vl"), pytest.param(QWEN3, id="qwen3_vl")]


def settings(ours: PatchPreprocessor, **size: int) -> dict[str, Any]:
    rules = ours.images.bounded(size.get("min_pixels"), size.get("max_pixels"))
    return {
        "patch_size": ours.patch_size,
        "image_mean": list(rules.mean),
        "image_std": list(rules.std),
        "size": {"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels},
        **SIZES,
    }


def levels(ours: PatchPreprocessor, difference: torch.Tensor) -> float:
    """Return the largest difference of two ``pixel_values`` in steps of the 8-bit image."""
    return float(difference.abs().max()) * 255 * max(ours.images.std)


@pytest.mark.parametrize("ours", FAMILIES)
def test_photographs_give_the_reference_s_pixels_to_the_bit(ours: PatchPreprocessor) -> None:
    images = photographs()
    wanted = Qwen2VLImageProcessor(**settings(ours))(images, return_tensors="pt")
    got = ours(images)
    assert torch.equal(got.grid_thw, wanted["image_grid_thw"])
    assert torch.equal(got.pixel_values, wanted["pixel_values"])
    assert got.tiles is None


@pytest.mark.parametrize("ours", FAMILIES)
def test_arrays_tensors_and_pil_images_mix_in_one_call(ours: PatchPreprocessor) -> None:
    pictures = photographs()[:4]
    array = np.asarray(pictures[1])
    tensor = torch.from_numpy(np.array(pictures[2])).permute(2, 0, 1)
    mixed = [pictures[0], array, tensor, tensor.contiguous(), np.asarray(pictures[3])[::-1]]
    plain = [*pictures[:3], pictures[2], pictures[3].transpose(Image.Transpose.FLIP_TOP_BOTTOM)]
    assert torch.equal(ours(mixed).pixel_values, ours(plain).pixel_values)


@pytest.mark.parametrize("ours", FAMILIES)
def test_pixel_bounds_given_are_used(ours: PatchPreprocessor) -> None:
    bounds = {"min_pixels": 70_000, "max_pixels": 90_000}
    wanted = Qwen2VLImageProcessor(**settings(ours, **bounds))([china()], return_tensors="pt")
    got = ours([china()], **bounds)
    assert torch.equal(got.grid_thw, wanted["image_grid_thw"])
    assert torch.equal(got.pixel_values, wanted["pixel_values"])


def random_sizes(count: int, longest: int) -> list[tuple[int, int]]:
    rng = random.Random(count)
    sizes = []
    while len(sizes) < count:
        width = rng.choice([rng.randint(1, 60), rng.randint(1, longest)])
        height = rng.choice([rng.randint(1, 60), rng.randint(1, longest)])
        if max(width, height) <= 200 * min(width, height):
            sizes.append((width, height))
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("ours", FAMILIES)
def test_grids_and_pixels_of_150_random_sizes_are_the_reference_s(ours: PatchPreprocessor) -> None:
    bounds = {"min_pixels": 10_000, "max_pixels": 60_000}
    reference = Qwen2VLImageProcessor(**settings(ours, **bounds))
    for width, height in random_sizes(150, 900):
        image = china().resize((width, height))
        wanted = reference([image], return_tensors="pt")
        got = ours([image], **bounds)
        assert torch.equal(got.grid_thw, wanted["image_grid_thw"]), (width, height)
        assert torch.equal(got.pixel_values, wanted["pixel_values"]), (width, height)


@pytest.mark.parametrize("ours", FAMILIES)
def test_grids_of_600_random_sizes_are_the_reference_s(ours: PatchPreprocessor) -> None:
    reference = Qwen2VLImageProcessor(**settings(ours))
    pixel = torch.zeros(3, 1, 1, dtype=torch.uint8)
    for width, height in random_sizes(600, 5000):
        _, h, w = ours._grid([pixel.expand(3, height, width)], ours.images)
        assert h * w == reference.get_number_of_image_patches(height, width), (width, height)


@pytest.mark.parametrize("ours", FAMILIES)
def test_patches_run_block_by_block_and_pixels_channel_frame_row_column(
    ours: PatchPreprocessor,
) -> None:
    p = ours.patch_size
    image = np.zeros((4 * p, 4 * p, 3), dtype=np.uint8)
    image[:p, p : 2 * p] = 51  # patch 1: row 0, column 1 of the first block
    image[2 * p, 3, 1] = 102  # patch 8: first of the third block; row 0, column 3, green
    got = ours([image], min_pixels=1).pixel_values
    stats = (ours.images.mean, ours.images.std)
    mean, std = (torch.tensor(values)[:, None, None, None] for values in stats)
    pixels = (got.view(16, 3, 2, p, p) * std + mean) * 255
    assert torch.allclose(pixels[1], torch.full_like(pixels[1], 51.0), atol=1e-3)
    assert torch.allclose(pixels[8, 1, :, 0, 3], torch.full((2,), 102.0), atol=1e-3)
    assert torch.allclose(pixels[[0, 2, 3, 4, 9]], torch.zeros(()), atol=1e-3)


@pytest.mark.parametrize("ours", FAMILIES)
def test_nothing_gives_no_rows_of_the_right_width(ours: PatchPreprocessor) -> None:
    got = ours([], [])
    assert got.pixel_values.shape == (0, 6 * ours.patch_size**2)
    assert got.pixel_values.dtype == torch.float32
    assert got.grid_thw.shape == (0, 3)
    assert got.grid_thw.dtype == torch.int64


@pytest.mark.parametrize("ours", FAMILIES)
def test_a_large_image_is_written_in_strips_with_the_same_bits(ours: PatchPreprocessor) -> None:
    image = china().resize((1500, 977))
    wanted = Qwen2VLImageProcessor(**settings(ours))([image], return_tensors="pt")
    assert torch.equal(ours([image]).pixel_values, wanted["pixel_values"])


@pytest.mark.parametrize("ours", FAMILIES)
def test_an_image_does_not_depend_on_its_neighbours(ours: PatchPreprocessor) -> None:
    images = photographs()[:3]
    together = ours(images)
    rows = together.grid_thw.prod(1).tolist()
    for image, part in zip(images, together.pixel_values.split(rows), strict=True):
        assert torch.equal(part, ours([image]).pixel_values)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_tiles": 6}, "max_tiles=6: this tower has no tiles; .*max_pixels"),
        ({"max_soft_tokens": 280}, "max_soft_tokens=280: this family has no fixed .*max_pixels"),
        (
            {"min_pixels": 10**14, "max_pixels": 10**15},
            "min_pixels=10{14}: must be at most 26843545",
        ),
        ({"min_pixels": 0}, "min_pixels=0: must be a positive integer"),
        ({"max_pixels": -5}, "max_pixels=-5: must be a positive integer"),
        ({"max_pixels": 1e6}, "max_pixels=1000000.0: must be a positive integer"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels=9 is over max_pixels=8: pass both"),
        ({"max_pixels": 100}, "is over max_pixels=100: pass both .*checkpoint's own"),
        ({"fps": 0}, "fps=0: must be a positive number"),
        ({"fps": float("nan")}, "fps=nan: must be a positive number"),
        ({"fps": "2"}, "fps='2': must be a positive number"),
        ({"num_frames": 0}, "num_frames=0: must be a positive integer"),
    ],
)
def test_keywords_that_make_no_sense_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QWEN2([china()], **keywords)


def test_numpy_integers_are_integers() -> None:
    got = QWEN2([china()], max_pixels=np.int64(50_000)).grid_thw
    assert torch.equal(got, QWEN2([china()], max_pixels=50_000).grid_thw)


def test_an_extreme_shape_names_its_item() -> None:
    with pytest.raises(ValueError, match="image 1: is 3000x10 pixels, aspect ratio 300"):
        QWEN2([china(), china().resize((3000, 10))])
