"""Images and clips for ERNIE-4.5-VL have the grids and pixels of transformers' processors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Ernie4_5_VLMoeImageProcessor, Ernie4_5_VLMoeVideoProcessor
from transformers.models.ernie4_5_vl_moe.image_processing_ernie4_5_vl_moe import smart_resize
from transformers.video_utils import VideoMetadata

from encoders.inputs.patches import PatchPreprocessor
from encoders.inputs.sampling import sample_frames
from tests.support.photographs import china, panning_clip, photographs
from weights.published import family_facts

ERNIE = PatchPreprocessor.published("ernie", patch_size=14, merge_size=2)


def test_sizes_of_500_random_images_are_the_processors() -> None:
    rng = random.Random(5)
    sizes = [tuple(rng.choice([60, rng.randint(20, 4000)]) for _ in "hw") for _ in range(500)]
    for kind, rules, known, grid in (
        (Ernie4_5_VLMoeImageProcessor, ERNIE.images, (1080, 1920), (78, 138)),
        (Ernie4_5_VLMoeVideoProcessor, ERNIE.videos, (240, 320), (30, 40)),
    ):
        low, high = kind.size["shortest_edge"], kind.size["longest_edge"]
        wanted = {size: smart_resize(*size, 28, low, high) for size in sizes}
        for size, sides in {**wanted, known: [side * 14 for side in grid]}.items():
            pixel = torch.zeros(3, 1, 1, dtype=torch.uint8).expand(3, *size)
            assert ERNIE._grid([pixel], rules) == (1, sides[0] // 14, sides[1] // 14), size


def test_pixels_of_images_are_the_processors_to_the_bit() -> None:
    images = [*photographs()[:3], china().resize((30, 70)), china().resize((2800, 1900))]
    theirs, got = Ernie4_5_VLMoeImageProcessor()(images, return_tensors="pt"), ERNIE(images)
    assert torch.equal(got.grid_thw, theirs["image_grid_thw"])
    assert torch.equal(got.pixel_values, theirs["pixel_values"])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_pixels_of_clips_are_the_processors_and_frames_are_even(count: int) -> None:
    clip, keep = np.stack(panning_clip(count)), {"do_sample_frames": False, "draw_on_frames": False}
    theirs = Ernie4_5_VLMoeVideoProcessor()([clip], return_tensors="pt", **keep)
    got = ERNIE(videos=[clip])
    assert torch.equal(got.grid_thw, theirs["video_grid_thw"])
    assert torch.equal(got.pixel_values, theirs["pixel_values_videos"])


@pytest.mark.parametrize("asked", [{"fps": 2}, {"fps": 5}, {"fps": 0.1}, {"num_frames": 17}])
def test_frames_are_sampled_as_the_processor_does(asked: dict[str, Any]) -> None:
    for total, rate in ((20, 30.0), (100, 24.0), (251, 23.976), (3000, 25.0)):
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        wanted = Ernie4_5_VLMoeVideoProcessor().sample_frames(metadata, **asked).tolist()
        wanted += wanted[-1:] * (len(wanted) % 2)
        bounds = {"min_frames": 16, "max_frames": 180, "source_fps": rate}
        assert sample_frames(total, "ernie", **bounds, **asked) == wanted


def test_files_of_both_layouts_give_the_rules_of_the_classes_and_set_bounds_in_size() -> None:
    old = {
        "preprocessor_config": {"min_pixels": 9, "max_pixels": 99_999}
    }  # transformers ignores it
    for files in (*family_facts("ernie4_5_vl").processors.values(), old):
        assert ERNIE.with_files(files) == ERNIE
    size = {"preprocessor_config": {"size": {"shortest_edge": 784, "longest_edge": 99_999}}}
    assert ERNIE.with_files(size).images.max_pixels == 99_999
