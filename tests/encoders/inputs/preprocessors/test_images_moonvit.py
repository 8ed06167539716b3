"""Images and clips for MoonViT have the sizes and pixels of transformers' processors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.kimi_k25.image_processing_kimi_k25 import (
    Kimi_K25ImageProcessor,
    navit_resize,
)
from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from encoders import Video
from encoders.contract import VisionInputs
from encoders.inputs.sampling import sample_frames
from encoders.kimi.moonvit_pixels import NavitPreprocessor
from tests.oracles.references.moonvit import cut
from tests.oracles.versions import needs
from tests.support.photographs import china, panning_clip, photographs
from weights.published import family_facts

KIMI = NavitPreprocessor.kimi(14, 2, 4)
KIMI_K3 = NavitPreprocessor.kimi(14, 2, 4, third=True)
ALONE = NavitPreprocessor.kimi(14, 2, 1)
FILES = family_facts("moonvit").processors


def grid_of(ours: NavitPreprocessor, height: int, width: int, video: bool = False) -> list[int]:
    pixel = torch.zeros(3, 1, 1, dtype=torch.uint8).expand(3, height, width)
    return [*ours._grid([pixel], ours.videos if video else ours.images)]


@pytest.mark.parametrize(("video", "most"), [(False, 16384), (True, 4096)])
def test_sizes_of_500_random_images_are_the_processors(video: bool, most: int) -> None:
    rng = random.Random(3)
    for _ in range(500):
        height, width = (rng.choice([rng.randint(1, 900), rng.randint(1, 9000)]) for _ in "hw")
        (tall, wide), padded = navit_resize(height, width, 14, 2, most, 512)
        rules = KIMI.videos if video else KIMI.images
        assert KIMI._content(height, width, rules) == (tall, wide)
        assert grid_of(KIMI, height, width, video) == [1, *(side // 14 for side in padded)]


def test_images_grow_in_no_case_and_sides_stay_below_512_patches() -> None:
    assert grid_of(KIMI, 10, 10) == [1, 2, 2]
    assert grid_of(KIMI, 1080, 1920) == [1, 78, 138]
    assert grid_of(KIMI, 30, 20_000) == [1, 2, 512]
    assert grid_of(ALONE, 1080, 1920) == [1, 48, 86]


def test_pixels_of_images_are_the_processors_to_the_bit() -> None:
    images = [*photographs()[:3], china().resize((9, 70)), china().resize((2800, 1900))]
    theirs = Kimi_K25ImageProcessor()(images, return_tensors="pt")
    got = KIMI(images)
    assert torch.equal(got.grid_thw, theirs["image_grid_thw"])
    assert torch.equal(got.pixel_values, theirs["pixel_values"].flatten(1))
    assert torch.equal(VisionInputs.from_processor(theirs).pixel_values, got.pixel_values)


@pytest.mark.parametrize("ours", [ALONE, KIMI_K3], ids=["kimi-vl", "kimi-k3"])
def test_images_of_moonshots_own_processors_have_pixels_of_pil(ours: NavitPreprocessor) -> None:
    for size in ((9, 70), (2800, 1900), (7300, 400)):
        image = china().resize(size)
        inputs = ours([image])
        height, width = ours._content(size[1], size[0], ours.images)
        (_, h, w) = inputs.grid_thw[0].tolist()
        canvas = Image.new("RGB", (14 * w, 14 * h))
        canvas.paste(image.resize((width, height), Image.Resampling.BICUBIC))
        wanted = torch.from_numpy(np.array(canvas)).view(h, 14, w, 14, 3).permute(0, 2, 4, 1, 3)
        levels = (inputs.pixel_values.view(h, w, 3, 14, 14) + 1) * 127.5
        assert torch.equal(levels.round(), wanted.float()), size


def test_pixels_of_clips_are_the_processors_and_the_grid_has_its_segments() -> None:
    clips = [np.stack(panning_clip(count)) for count in (1, 4, 10)]
    theirs = Kimi_K25VideoProcessor()(clips, do_sample_frames=False, return_tensors="pt")
    got = KIMI(videos=clips)
    assert cut(got.grid_thw.tolist(), 4) == theirs["video_grid_thw"].tolist()
    assert torch.equal(got.pixel_values, theirs["pixel_values_videos"].flatten(1))


RARE = needs("transformers", "5.21", "it takes no frame of a clip where fps is low")


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"fps": 2}, marks=RARE),
        {"fps": 7.5},
        pytest.param({"fps": 0.1}, marks=RARE),
        {"num_frames": 7},
    ],
)
def test_frames_are_sampled_as_the_processor_does(asked: dict[str, Any]) -> None:
    for total, rate in ((7, 30.0), (100, 24.0), (251, 23.976)):
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        wanted = default_sample_indices_fn(metadata, **asked).tolist()
        assert sample_frames(total, "uniform", source_fps=rate, **asked) == wanted


def test_a_clip_is_sampled_where_it_is_asked_for() -> None:
    frames = panning_clip(6)
    assert KIMI(videos=[frames]).grid_thw[0, 0] == 6
    assert KIMI(videos=[Video(frames, 6.0)], fps=2).grid_thw[0, 0] == 2
    assert KIMI(videos=[frames], num_frames=5).grid_thw[0, 0] == 5


@pytest.mark.parametrize("name", ["kimi-k25", "kimi-k25-hf"])
def test_published_files_give_the_published_rules(name: str) -> None:
    assert KIMI.with_files(FILES[name]) == KIMI
    assert ALONE.with_files(FILES["kimi-vl"]) == ALONE
    assert KIMI_K3.with_files(FILES["kimi-k3"]) == KIMI_K3


@pytest.mark.parametrize(
    ("size", "content", "padded"),
    [
        ((1080, 1920), (1080, 1920), (1092, 1932)),
        ((480, 640), (480, 640), (504, 644)),
        ((4000, 3000), (4000, 3000), (4004, 3024)),
        ((10, 10), (10, 10), (28, 28)),
        ((6000, 8000), (3107, 4142), (3108, 4144)),
        ((100, 9000), (79, 7168), (84, 7168)),
    ],
)
def test_kimi_k3_shrinks_images_less(
    size: tuple[int, int], content: tuple[int, int], padded: tuple[int, int]
) -> None:
    assert KIMI_K3._content(*size, KIMI_K3.images) == content
    assert grid_of(KIMI_K3, *size) == [1, padded[0] // 14, padded[1] // 14]


def test_files_bound_patches_and_sides() -> None:
    size = {"max_height": 8, "max_width": 8}
    files = {"preprocessor_config": {"max_patches": 100, "size": size, "image_mean": [0, 0, 0]}}
    ours = KIMI.with_files(files)
    assert grid_of(ours, 2000, 20) == [1, 8, 2]
    assert ours.images.max_pixels == 100 * 196
    assert ours.images.mean == (0, 0, 0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"patch_size": 16}, "patch_size=16 but the tower has 14"),
        ({"merge_kernel_size": [2, 4]}, "merge_kernel_size=.* but the tower has 2"),
        ({"media_proc_cfg": {"temporal_merge_kernel_size": 2}}, "but the tower has 4"),
        ({"media_proc_cfg": {"fixed_output_tokens": 64}}, "fixed_output_tokens=64"),
        ({"media_proc_cfg": {"in_patch_limit_video": 9}}, "in_patch_limit_video=9"),
        ({"in_token_limit": 4096}, "pad_input must be true"),
        ({"size": {"max_height": 8, "max_width": 4}}, "max_height and max_width, one number"),
        ({"size": 448}, "max_height and max_width, one number"),
        ({"max_patches": 0}, "max_patches=0 must be a positive integer"),
    ],
)
def test_files_that_cannot_be_followed_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KIMI.with_files({"preprocessor_config": section})


def test_a_bad_value_for_videos_is_raised_by_the_first_video() -> None:
    ours = KIMI.with_files({"video_preprocessor_config": {"max_patches": -1}})
    assert ours([china()]).grid_thw.shape == (1, 3)
    with pytest.raises(ValueError, match="max_patches=-1"):
        ours(videos=[panning_clip(2)])


def test_bounds_on_the_area_shrink_and_never_enlarge() -> None:
    assert KIMI([china()], max_pixels=90_000).grid_thw.tolist() == [[1, 18, 28]]
    with pytest.raises(ValueError, match="this family never enlarges an image"):
        KIMI([china()], min_pixels=90_000)
    with pytest.raises(ValueError, match="this tower takes only images"):
        ALONE(videos=[panning_clip(2)])
