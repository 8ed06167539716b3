"""Images and videos for the GLM towers have the grids and pixels of transformers' processors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.glm5_next.image_processing_glm5_next import Glm5NextImageProcessor
from transformers.models.glm5_next.video_processing_glm5_next import Glm5NextVideoProcessor
from transformers.models.glm46v.image_processing_glm46v import Glm46VImageProcessor
from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor
from transformers.video_utils import VideoMetadata

from encoders.inputs.intake import Video
from encoders.inputs.patches import PatchPreprocessor
from encoders.inputs.sampling import SamplingRule, sample_frames
from tests.support.photographs import china, panning_clip, photographs
from weights.published import family_facts

SIZES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
RULES = {
    "glm4v": (Glm4vImageProcessor, Glm4vVideoProcessor),
    "glm46v": (Glm46VImageProcessor, Glm46VVideoProcessor),
    "glm5_next": (Glm5NextImageProcessor, Glm5NextVideoProcessor),
}
GOLDEN = {
    "glm4v": [
        *((1080, 1920, 1092, 1932), (4000, 3000, 2800, 2100)),
        *((10, 10, 84, 84), (27, 100, 56, 168)),
    ],
    "glm_ocr": [(3000, 4000, 1876, 2520), (100, 100, 112, 112), (4000, 6000, 1792, 2688)],
    "glm5_next": [(480, 640, 504, 644), (3000, 4000, 2156, 2884), (10, 10, 112, 112)],
}
"""Height and width of an image, and of what the tower is given."""


def glm(rule: Any) -> PatchPreprocessor:
    return PatchPreprocessor.published(rule, **SIZES)


def size_of(ours: PatchPreprocessor, height: int, width: int) -> tuple[int, int]:
    pixel = torch.zeros(3, 1, 1, dtype=torch.uint8).expand(3, height, width)
    _, h, w = ours._grid([pixel], ours.images)
    return 14 * h, 14 * w


@pytest.mark.parametrize("rule", GOLDEN)
def test_golden_sizes_are_those_of_the_processors(rule: str) -> None:
    ours = glm("glm46v" if rule == "glm_ocr" else rule)
    if rule == "glm_ocr":
        ours = ours.with_files(family_facts("glm_ocr").processors["glm_ocr"])
    for height, width, tall, wide in GOLDEN[rule]:
        assert size_of(ours, height, width) == (tall, wide), (height, width)


@pytest.mark.parametrize("rule", RULES)
def test_sizes_of_500_random_images_are_the_processors(rule: str) -> None:
    ours, theirs, rng = glm(rule), RULES[rule][0](), random.Random(5)
    for _ in range(500):
        side = rng.randint(1, 5000)
        height, width = rng.sample([side, rng.randint(max(1, side // 100), 5000)], 2)
        if max(height, width) <= 150 * min(height, width):
            tall, wide = size_of(ours, height, width)
            count = theirs.get_number_of_image_patches(height, width)
            assert tall // 14 * (wide // 14) == count, (height, width)


@pytest.mark.parametrize("rule", RULES)
def test_pixels_of_images_are_the_processors_to_the_bit(rule: str) -> None:
    images = [*photographs(), china().resize((9, 70)), china().resize((90, 40))]
    theirs, ours = RULES[rule][0]()(images, return_tensors="pt"), glm(rule)
    got = ours(images)
    assert torch.equal(got.grid_thw, theirs["image_grid_thw"])
    assert torch.equal(got.pixel_values, theirs["pixel_values"])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("frames", [2, 3, 6])
def test_pixels_of_videos_are_the_processors_to_the_bit(rule: str, frames: int) -> None:
    clip, ours = panning_clip(frames), glm(rule)
    bounds = {"min_image_tokens": 16, "max_image_tokens": 250}
    if rule != "glm5_next":
        bounds = {"size": {"shortest_edge": 12544, "longest_edge": 250 * 1568}}
    theirs = RULES[rule][1](**bounds)([clip], do_sample_frames=False, return_tensors="pt")
    got = ours(videos=[clip], max_pixels=250 * 1568)
    assert torch.equal(got.grid_thw, theirs["video_grid_thw"])
    assert torch.equal(got.pixel_values, theirs["pixel_values_videos"])
    assert torch.equal(ours(videos=[clip[:1]]).pixel_values, ours([clip[0]]).pixel_values)


@pytest.mark.parametrize("rule", RULES)
def test_frames_sampled_of_200_videos_are_the_processors(rule: SamplingRule) -> None:
    rng, theirs, ours = random.Random(7), RULES[rule][1](), glm(rule).videos
    for _ in range(200):
        own = rng.choice([1, 10, 23.976, 24, 25, 29.97, 30, 60])
        total, fps = rng.choice([rng.randint(8, 400), rng.randint(8, 30_000)]), rng.uniform(0.5, 8)
        metadata = VideoMetadata(total_num_frames=total, fps=own, duration=total / own)
        wanted = theirs.sample_frames(metadata, fps=fps)
        limits = {"max_frames": ours.max_frames, "max_duration": ours.max_duration}
        got = sample_frames(total, rule, fps=fps, source_fps=own, **limits)
        assert got == (wanted.tolist() or [0, 0]), (total, own, fps)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seconds", [30, 300, 2400])
def test_frames_at_the_bounds_of_duration_are_the_processors(
    rule: SamplingRule, seconds: int
) -> None:
    """The rules take fewer frames per second beyond these durations, and not at them."""
    theirs, ours = RULES[rule][1](), glm(rule).videos
    limits = {"max_frames": ours.max_frames, "max_duration": ours.max_duration}
    counts = []
    for total in (8 * seconds - 1, 8 * seconds, 8 * seconds + 1):
        metadata = VideoMetadata(total_num_frames=total, fps=8, duration=total / 8)
        wanted = theirs.sample_frames(metadata, fps=2).tolist()
        assert sample_frames(total, rule, fps=2, source_fps=8, **limits) == wanted, total
        counts.append(len(wanted))
    if rule == "glm46v" and seconds < 2400:
        assert counts[1] > 1.9 * counts[2]


@pytest.mark.parametrize("rule", RULES)
def test_videos_sampled_on_request_are_the_processors(rule: str) -> None:
    clip = panning_clip(24)
    metadata = VideoMetadata(total_num_frames=24, fps=12, duration=2.0)
    theirs = RULES[rule][1]()(
        [clip], do_sample_frames=True, fps=3, video_metadata=[metadata], return_tensors="pt"
    )
    got = glm(rule)(videos=[Video(clip, 12)], fps=3)
    assert torch.equal(got.grid_thw, theirs["video_grid_thw"])
    assert torch.equal(got.pixel_values, theirs["pixel_values_videos"])


@pytest.mark.parametrize("rule", RULES)
def test_a_number_of_frames_is_spread_evenly_and_made_even(rule: SamplingRule) -> None:
    assert sample_frames(20, rule, num_frames=4) == [0, 5, 10, 15]
    assert sample_frames(9, rule, num_frames=3) == [0, 3, 6, 6]
    assert sample_frames(1, rule, fps=2, source_fps=30) == [0, 0]
    with pytest.raises(ValueError, match="fps=2: this checkpoint samples by time"):
        sample_frames(20, rule, fps=2)


def test_a_file_names_the_class_whose_rules_hold() -> None:
    files = {"preprocessor_config": {"image_processor_type": "Glm46VImageProcessor"}}
    ours = glm("glm4v").with_files(files)
    assert (ours.images, ours.videos) == (glm("glm46v").images, glm("glm46v").videos)
    tokens = {"min_image_tokens": 4, "max_image_tokens": 100, "max_duration": 60}
    named = {"image_processor_type": "Glm5NextImageProcessorFast", "size": {"longest_edge": 1}}
    ours = glm("glm5_next").with_files({"preprocessor_config": {**named, **tokens}})
    assert (ours.images.min_pixels, ours.images.max_pixels) == (4 * 1568, 100 * 1568)
    assert (ours.videos.max_pixels, ours.videos.max_duration) == (100 * 1568, 60)
    with pytest.raises(ValueError, match="patch_expand_factor=2 is not implemented"):
        ours.with_files({"preprocessor_config": {"patch_expand_factor": 2}})


def test_a_video_of_more_frames_than_the_bound_is_refused() -> None:
    clip = np.zeros((8, 30, 30, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"video 0: max_pixels=4000: 8 frames have at least 6272"):
        glm("glm5_next")(videos=[clip], min_pixels=1, max_pixels=4000)
