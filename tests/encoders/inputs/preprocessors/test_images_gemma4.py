"""Images and frames for Gemma 4 have the grids and pixels of the checkpoint's own processor."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.gemma4.image_processing_gemma4 import (
    Gemma4ImageProcessor,
    get_aspect_ratio_preserving_size,
)
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
from transformers.video_utils import VideoMetadata

from encoders.contract import Limits
from encoders.gemma.gemma4_pixels import (
    SOFT_TOKENS,
    SoftTokenPreprocessor,
    soft_token_size,
)
from encoders.inputs.clips import Video
from tests.oracles.versions import needs
from tests.support.photographs import china, photographs
from weights.published import family_facts

OURS = SoftTokenPreprocessor.gemma4(16, 3)


def unpadded(rows: Tensor, places: Tensor) -> list[Tensor]:
    """The rows of each image or frame of the reference, brought from 0 to 1 to -1 to 1."""
    return [2 * (x[p[:, 0] >= 0] - 0.5) for x, p in zip(rows, places, strict=True)]


@pytest.mark.parametrize(
    "tokens", [pytest.param(n, marks=pytest.mark.slow) if n > 280 else n for n in SOFT_TOKENS]
)
def test_photographs_have_the_reference_s_pixels_in_every_tier(tokens: int) -> None:
    images = photographs()[:3]
    wanted = Gemma4ImageProcessor(max_soft_tokens=tokens)(images, return_tensors="pt")
    got = OURS(images, max_soft_tokens=tokens)
    counts = (got.grid_thw.prod(1) // 9).tolist()
    assert counts == [int(n) for n in wanted["num_soft_tokens_per_image"]]
    rows = torch.cat(unpadded(wanted["pixel_values"], wanted["image_position_ids"]))
    assert float((got.pixel_values - rows).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    ("size", "tokens", "resized"),
    [
        ((1080, 1920), 280, (576, 1056)),
        ((224, 224), 280, (768, 768)),
        ((10, 10), 280, (768, 768)),
        ((480, 640), 280, (672, 912)),
        ((20, 3000), 280, (48, 9792)),
        ((100, 4800), 280, (96, 5520)),
        ((1080, 1920), 70, (288, 528)),
        ((224, 224), 70, (384, 384)),
        ((480, 640), 70, (336, 432)),
        ((20, 3000), 70, (48, 3360)),
        ((100, 4800), 70, (48, 2736)),
    ],
)
def test_sizes_are_the_golden_ones(
    size: tuple[int, int], tokens: int, resized: tuple[int, int]
) -> None:
    rows, columns = soft_token_size(*size, 48, tokens)
    assert (48 * rows, 48 * columns) == resized


def test_2000_random_sizes_are_the_reference_s() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        height, width = (rng.choice([rng.randint(1, 60), rng.randint(1, 6000)]) for _ in "hw")
        tokens = rng.choice(SOFT_TOKENS)
        wanted = get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)
        rows, columns = soft_token_size(height, width, 48, tokens)
        assert (48 * rows, 48 * columns) == wanted, (height, width, tokens)


def frames_of(count: int) -> Tensor:
    frame = torch.from_numpy(np.array(china().resize((96, 64)))).permute(2, 0, 1)
    return torch.stack([frame.roll(number, 2) for number in range(count)])


RARE = needs("transformers", "5.21", "it takes no frame of a clip where fps is low")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"num_frames": 5},
        {"num_frames": 1},
        {"fps": 2.0},
        pytest.param({"fps": 0.01}, marks=RARE),
    ],
    ids=str,
)
def test_frames_are_those_of_the_video_processor(asked: dict[str, Any]) -> None:
    clip = frames_of(24)
    metadata = VideoMetadata(total_num_frames=24, fps=8.0, duration=3.0)
    wanted = Gemma4VideoProcessor(num_frames=None)(  # its 32 would come before fps
        [clip],
        video_metadata=[metadata],
        do_sample_frames=bool(asked),
        return_tensors="pt",
        **asked,
    )
    got = OURS(videos=[Video(clip, 8.0)], **asked)
    rows = torch.cat(unpadded(wanted["pixel_values_videos"], wanted["video_position_ids"]))
    assert got.grid_thw[:, 0].tolist() == wanted["num_frames_per_video"].tolist()
    assert float((got.pixel_values - rows).abs().max()) <= 1e-6


def test_staged_items_have_the_pixels_of_a_call() -> None:
    clip, images = frames_of(3), photographs()[:2]
    whole = OURS(images, [clip])
    staged = OURS.finish(OURS.stage(images, [clip], Limits()))
    assert torch.equal(staged.pixel_values, whole.pixel_values)
    assert torch.equal(staged.grid_thw, whole.grid_thw)


def test_published_files_give_the_class_defaults() -> None:
    files = family_facts("gemma4").processors["gemma4"]
    assert OURS.with_files(files) == OURS


def test_files_set_the_tokens_of_images_and_of_frames() -> None:
    files: dict[str, Any] = {
        "processor_config": {
            "image_processor": {"max_soft_tokens": 560},
            "video_processor": {"max_soft_tokens": 140},
        }
    }
    inputs = OURS.with_files(files)([Image.new("RGB", (480, 480))], [frames_of(1)])
    assert (inputs.grid_thw.prod(1) // 9).tolist() == [23 * 23, 9 * 14]
    section = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 1120}
    alone = OURS.with_files({"preprocessor_config": section})
    assert alone.images.max_pixels == alone.videos.max_pixels == 1120 * 48**2
    colours = OURS.with_files({"preprocessor_config": {"image_mean": 0.5}})
    assert colours.images == OURS.images  # only the class for videos normalises without being told
    with pytest.raises(ValueError, match="image_mean and image_std are not implemented"):
        colours(videos=[frames_of(1)])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"max_soft_tokens": 300}, "max_soft_tokens=300: must be one of 70, 140, 280, 560, 1120"),
        ({"patch_size": 14}, "patch_size=14 is not implemented"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size=2 is not implemented"),
        ({"resample": 2}, "resample=2 is not implemented"),
        ({"do_normalize": True, "image_mean": [0.5] * 3}, "image_mean and image_std are not"),
    ],
)
def test_files_of_other_rules_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OURS.with_files({"preprocessor_config": section})
    videos = {"processor_config": {"video_processor": section}}
    preprocessor = OURS.with_files(videos)
    with pytest.raises(ValueError, match=message):
        preprocessor(videos=[frames_of(1)])


@pytest.mark.parametrize("bound", ["min_pixels", "max_pixels", "max_tiles"])
def test_other_bounds_than_tokens_are_refused(bound: str) -> None:
    with pytest.raises(ValueError, match=r"=9: Gemma 4 resizes every image to max_soft_tokens"):
        OURS([china()], **{bound: 9})  # type: ignore[arg-type]


def test_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_soft_tokens=100: must be one of 70, 140"):
        OURS([china()], max_soft_tokens=100)
