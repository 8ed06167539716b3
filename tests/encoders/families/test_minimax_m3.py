"""MiniMax-M3: pixels of transformers' processors, segments of a clip, loading."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import (
    MiniMaxM3VLImageProcessor,
)
from transformers.models.minimax_m3_vl.video_processing_minimax_m3_vl import (
    MiniMaxM3VLVideoProcessor,
)

from encoders import MiniMaxM3Config
from encoders.contract import EncoderItemSpec
from encoders.inputs.patches import PatchPreprocessor
from tests.oracles import BY_NAME, distances, draw_pixels, tiny
from tests.support.photographs import china, photographs
from weights.published import family_facts

FILES = family_facts("minimax_m3").processors["minimax-m3"]
GOLDEN = {
    (672, 672): (48, 48),
    (10, 10): (4, 4),
    (27, 100): (2, 8),
    (480, 640): (34, 46),
    (1080, 1920): (36, 64),
    (4000, 3000): (54, 40),
    (100, 4800): (6, 332),
}
"""Height and width of an image -> rows and columns of patches by transformers' processor."""


def ours() -> PatchPreprocessor:
    plain = PatchPreprocessor.published(
        "minimax_m3", patch_size=14, temporal_patch_size=2, merge_size=2
    )
    return plain.with_files(FILES)


@pytest.mark.parametrize(("size", "grid"), GOLDEN.items(), ids=str)
def test_grids_of_golden_sizes(size: tuple[int, int], grid: tuple[int, int]) -> None:
    image = Image.fromarray(np.zeros((*size, 3), np.uint8))
    assert ours()([image]).grid_thw.tolist() == [[1, *grid]]


def test_the_published_file_leaves_the_rules_of_the_class() -> None:
    plain = PatchPreprocessor.published(
        "minimax_m3", patch_size=14, temporal_patch_size=2, merge_size=2
    )
    assert ours() == plain
    bounds = {"shortest_edge": 784, "longest_edge": 7840}
    named = {"image_processor_type": "MiniMaxM3VLImageProcessor", "size": bounds}
    assert plain.with_files({"preprocessor_config": named}).images.max_pixels == 7840
    with pytest.raises(ValueError, match=r"size=\[336, 336\] must have shortest_edge"):
        plain.with_files({"preprocessor_config": {"size": [336, 336]}})
    with pytest.raises(ValueError, match="max_long_side_pixel=1008 is not implemented"):
        plain.with_files({"preprocessor_config": {"max_long_side_pixel": 1008}})


def test_patches_of_images_are_those_of_the_processor() -> None:
    rng, processor = random.Random(0), MiniMaxM3VLImageProcessor(size=[672, 672])
    sizes = [(rng.randint(8, 900), rng.randint(8, 900)) for _ in range(12)]
    for image in [*photographs()[:3], *(china().resize(size) for size in sizes)]:
        wanted, got = processor([image], return_tensors="pt"), ours()([image])
        assert torch.equal(got.grid_thw, wanted["image_grid_thw"])
        assert (got.pixel_values - wanted["pixel_values"]).abs().max() <= 1 / 255 / 0.26 + 1e-6


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 60, 90), (7, 40, 64), (18, 90, 31)])
def test_patches_of_clips_are_those_of_the_processor(frames: int, height: int, width: int) -> None:
    clip = torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8)
    wanted = MiniMaxM3VLVideoProcessor()([clip], return_tensors="pt")
    got, grids = ours()(videos=[clip]), wanted["video_grid_thw"]
    assert got.grid_thw.tolist() == [[int(grids[:, 0].sum()), *grids[0, 1:].tolist()]]
    limit = 1 / 255 / 0.26 + 1e-6
    assert (got.pixel_values - wanted["pixel_values_videos"]).abs().max() <= limit


def test_the_size_of_a_file_bounds_only_images() -> None:
    clip = torch.randint(0, 256, (2, 3, 150, 108), dtype=torch.uint8)
    section = {"size": {"shortest_edge": 3136, "longest_edge": 12544}}
    wanted = MiniMaxM3VLVideoProcessor(**section)([clip], return_tensors="pt")
    read = ours().with_files({"preprocessor_config": section})
    assert read(videos=[clip]).grid_thw.tolist() == wanted["video_grid_thw"].tolist()
    assert read.images.max_pixels == 12544


def test_a_clip_costs_one_segment_per_four_frame_pairs() -> None:
    assert tiny("minimax_m3").item_specs([[2, 4, 20], [9, 4, 6]]) == [
        EncoderItemSpec(160, 40, 1, 160),
        EncoderItemSpec(216, 54, 3, 96),
    ]


def test_a_clip_is_its_segments_as_items() -> None:
    encoder, clip, segments = tiny("minimax_m3"), [[9, 4, 6]], [[4, 4, 6], [4, 4, 6], [1, 4, 6]]
    pixels = draw_pixels(encoder, clip)
    apart = distances(encoder(pixels, clip), encoder(pixels, segments))
    assert max(apart.values()) == 0
    mixed = distances(encoder(pixels, clip), encoder(pixels, [[1, 4, 6]] * 9))
    assert min(mixed.values()) > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_mode": "2d"}, "rope_mode='2d' is not implemented"),
        ({"vision_segment_max_frames": None}, "no vision_segment_max_frames"),
        ({"num_attention_heads": 256}, "head size=5 must be at least 6"),
        ({"img_token_compression_config": {"image_token_compression_method": "x"}}, "implemented"),
    ],
)
def test_values_that_are_not_implemented_are_refused(change: dict[str, Any], message: str) -> None:
    config = BY_NAME["minimax_m3"].config
    with pytest.raises(ValueError, match=message):
        MiniMaxM3Config.from_hf({**config, "vision_config": {**config["vision_config"], **change}})
