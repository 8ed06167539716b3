"""Images for the Pixtral towers have the sizes and pixels of transformers' processor."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor
from transformers.models.pixtral.image_processing_pixtral import (
    PixtralImageProcessor,
    get_resize_output_image_size,
)

from encoders.contract import VisionInputs
from encoders.inputs.patches import PatchPreprocessor
from tests.support.photographs import china, panning_clip, photographs

MISTRAL = PatchPreprocessor.pixtral(patch_size=14, merge_size=2, longest_edge=1540)
PIXTRAL = PatchPreprocessor.pixtral(patch_size=16, merge_size=1, longest_edge=1024)
BOTH = [pytest.param(MISTRAL, id="mistral3"), pytest.param(PIXTRAL, id="pixtral_12b")]
GOLDEN = [
    (MISTRAL, (1080, 1920, 868, 1540)),
    (MISTRAL, (224, 224, 224, 224)),
    (MISTRAL, (480, 640, 504, 644)),
    (MISTRAL, (4000, 3000, 1540, 1176)),
    (MISTRAL, (10, 10, 28, 28)),
    (PIXTRAL, (1080, 1920, 576, 1024)),
    (PIXTRAL, (4000, 3000, 1024, 768)),
]


def size_of(ours: PatchPreprocessor, height: int, width: int) -> tuple[int, int]:
    pixel = torch.zeros(3, 1, 1, dtype=torch.uint8).expand(3, height, width)
    _, h, w = ours._grid([pixel], ours.images)
    return ours.patch_size * h, ours.patch_size * w


def images_of(ours: PatchPreprocessor, inputs: VisionInputs) -> list[Tensor]:
    """Put the patches of each image back in their places, [3, H, W]."""
    m, p = ours.merge_size, ours.patch_size
    grids = inputs.grid_thw.tolist()
    order = "(h w a b) (c p q) -> c (h a p) (w b q)"
    return [
        rearrange(rows, order, h=h // m, w=w // m, a=m, b=m, p=p, q=p)
        for rows, (_, h, w) in zip(
            inputs.pixel_values.split([h * w for _, h, w in grids]), grids, strict=True
        )
    ]


@pytest.mark.parametrize(("ours", "sizes"), GOLDEN)
def test_golden_sizes_are_those_of_the_processor(ours: Any, sizes: tuple[int, ...]) -> None:
    assert size_of(ours, *sizes[:2]) == sizes[2:]


@pytest.mark.parametrize("ours", BOTH)
def test_sizes_of_500_random_images_are_the_processors(ours: PatchPreprocessor) -> None:
    rng, factor = random.Random(3), ours.patch_size * ours.merge_size
    longest = ours.images.longest_edge
    assert longest is not None
    for _ in range(500):
        height, width = (rng.choice([rng.randint(40, 900), rng.randint(40, 6000)]) for _ in "hw")
        image = torch.zeros(3, 1, 1).expand(3, height, width)
        wanted = get_resize_output_image_size(image, longest, factor, "channels_first")
        assert size_of(ours, height, width) == wanted, (height, width)


@pytest.mark.parametrize("ours", BOTH)
def test_pixels_of_images_are_the_processors_to_the_bit(ours: PatchPreprocessor) -> None:
    images = [*photographs()[:4], china().resize((9, 70)), china().resize((2000, 300))]
    factor = ours.patch_size * ours.merge_size
    theirs = PixtralImageProcessor(
        size={"longest_edge": ours.images.longest_edge},
        patch_size={"height": factor, "width": factor},
        do_pad=False,
    )(images)
    got = ours(images)
    assert [tuple(image.shape[1:]) for image in images_of(ours, got)] == theirs["image_sizes"]
    for mine, wanted in zip(images_of(ours, got), theirs["pixel_values"], strict=True):
        assert torch.equal(mine, wanted)


def test_bounds_on_the_area_shrink_and_enlarge_in_shape() -> None:
    assert images_of(MISTRAL, MISTRAL([china()], max_pixels=90_000))[0].shape == (3, 224, 364)
    assert images_of(MISTRAL, MISTRAL([china()], min_pixels=10**6))[0].shape == (3, 840, 1232)


def test_files_give_the_longest_side_and_may_not_contradict_the_tower() -> None:
    outer = {"patch_size": 14, "spatial_merge_size": 2}
    own = {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 700}}
    ours = MISTRAL.with_files({"processor_config": outer, "preprocessor_config": own})
    assert size_of(ours, 1400, 700) == (700, 364)
    assert MISTRAL.with_files({"preprocessor_config": {}}).images.longest_edge == 1024
    with pytest.raises(ValueError, match="spatial_merge_size=1 but the tower has 2"):
        MISTRAL.with_files({"processor_config": {**outer, "spatial_merge_size": 1}})
    with pytest.raises(ValueError, match=r"size=.* must have longest_edge"):
        MISTRAL.with_files({"preprocessor_config": {"size": {"height": 9, "width": 9}}})
    with pytest.raises(ValueError, match="do_center_crop=True is not implemented"):
        MISTRAL.with_files({"preprocessor_config": {"do_center_crop": True, "crop_size": 224}})


def test_videos_are_refused_before_and_after_files_are_read() -> None:
    for ours in (MISTRAL, MISTRAL.with_files({"preprocessor_config": {}})):
        with pytest.raises(ValueError, match="this tower takes only images"):
            ours(videos=[panning_clip(2)])
