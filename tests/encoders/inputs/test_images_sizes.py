"""Sizes, tilings and sampled frames: golden values, invariants, and transformers' functions."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import InternVLVideoProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as qwen2_reference
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_reference
from transformers.video_utils import VideoMetadata

from encoders.inputs.sampling import sample_frames
from encoders.inputs.sizes import best_tiling, smart_resize, smart_resize_video

BUDGETS = {"small": (28, 3136, 1003520), "hub": (28, 3136, 12845056), "qwen3": (32, 65536, 4096**2)}
GOLDEN_SIZES = {
    (1080, 1920): [(728, 1316), (1092, 1932), (1088, 1920)],
    (224, 224): [(224, 224), (224, 224), (256, 256)],
    (336, 504): [(336, 504), (336, 504), (320, 512)],
    (640, 480): [(644, 476), (644, 476), (640, 480)],
    (4000, 3000): [(1148, 840), (4004, 2996), (4000, 3008)],
    (10, 10): [(56, 56), (56, 56), (256, 256)],
    (42, 70): [(56, 56), (56, 56), (224, 352)],
    (98, 98): [(112, 112), (112, 112), (256, 256)],
    (20, 3000): [(28, 2996), (28, 2996), (32, 3008)],
}
GOLDEN_TILINGS = {
    (448, 448, 12): (1, 1),
    (1000, 1000, 12): (3, 3),
    (800, 600, 12): (4, 3),
    (640, 480, 12): (4, 3),
    (1920, 1080, 12): (4, 2),
    (1344, 896, 12): (3, 2),
    (600, 1200, 12): (1, 2),
    (3000, 500, 12): (6, 1),
    (300, 900, 12): (1, 3),
    (1024, 1024, 12): (3, 3),
    (800, 600, 6): (3, 2),
    (1920, 1080, 6): (2, 1),
    (4000, 4000, 6): (2, 2),
    (1920, 1080, 40): (7, 4),
    (4000, 4000, 40): (6, 6),
}
SIDES = st.integers(1, 5000)


@pytest.mark.parametrize(("size", "wanted"), GOLDEN_SIZES.items())
def test_golden_sizes(size: tuple[int, int], wanted: list[tuple[int, int]]) -> None:
    assert [smart_resize(*size, *budget) for budget in BUDGETS.values()] == wanted


def test_golden_sizes_of_a_whole_clip() -> None:
    budget = (32, 4096, 25_165_824)
    assert smart_resize_video(8, 1080, 1920, *budget) == (1088, 1920)
    assert smart_resize_video(768, 720, 1280, *budget) == (128, 224)
    assert smart_resize_video(4, 240, 320, *budget) == (256, 320)
    assert smart_resize_video(5, 240, 320, *budget) == (256, 320)


@pytest.mark.parametrize(("case", "wanted"), GOLDEN_TILINGS.items())
def test_golden_tilings(case: tuple[int, int, int], wanted: tuple[int, int]) -> None:
    width, height, most = case
    assert best_tiling(width, height, 1, most, 448) == wanted


@given(SIDES, SIDES, st.sampled_from([28, 32]), st.integers(1, 10**6), st.integers(0, 10**7))
def test_sizes_are_the_reference_s(
    height: int, width: int, factor: int, low: int, more: int
) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    size = smart_resize(height, width, factor, low, low + more)
    assert size == qwen2_reference(height, width, factor, low, low + more)
    assert all(side > 0 and side % factor == 0 for side in size)


@given(st.integers(2, 768), SIDES, SIDES, st.integers(1, 10**5), st.integers(0, 3 * 10**7))
def test_clip_sizes_are_the_reference_s(
    frames: int, height: int, width: int, low: int, more: int
) -> None:
    assume(max(height, width) <= 150 * min(height, width))
    ours = smart_resize_video(frames, height, width, 32, low, low + more)
    assert ours == qwen3_reference(frames, height, width, 2, 32, low, low + more)


@given(SIDES, SIDES, st.integers(1, 4), st.integers(0, 40))
def test_tilings_are_the_reference_s(width: int, height: int, low: int, more: int) -> None:
    columns, rows = best_tiling(width, height, low, low + more, 448)
    assert (columns, rows) == get_optimal_tiled_canvas((height, width), (448, 448), low, low + more)


@given(st.integers(28, 4000), st.integers(28, 4000))
def test_resized_area_stays_in_the_budget(height: int, width: int) -> None:
    assume(max(height, width) <= 20 * min(height, width))
    tall, wide = smart_resize(height, width, 28, 3136, 1_003_520)
    assert 3136 <= tall * wide <= 1_003_520
    assert abs(tall * width - wide * height) <= 28 * (width + height)  # each side off by < 28


def test_an_aspect_ratio_over_200_is_refused() -> None:
    budget = (28, 3136, 12845056)
    assert smart_resize(10, 2000, *budget) == qwen2_reference(10, 2000, *budget)
    with pytest.raises(ValueError, match=r"2010x10 pixels, aspect ratio 201.*at most 200.*crop"):
        smart_resize(10, 2010, *budget)
    with pytest.raises(ValueError, match="at most 200"):
        smart_resize_video(4, 2010, 10, 32, 4096, 10**7)


def test_no_pixels_and_no_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="is 0x5 pixels"):
        smart_resize(5, 0, 28, 3136, 10**6)
    with pytest.raises(ValueError, match="is 5x0 pixels"):
        best_tiling(5, 0, 1, 12, 448)
    with pytest.raises(ValueError, match=r"max_tiles=1.*min_tiles=2"):
        best_tiling(5, 5, 2, 1, 448)


@pytest.mark.parametrize("name", ["factor", "min_pixels", "max_pixels"])
def test_a_factor_or_area_of_zero_is_refused(name: str) -> None:
    settings = {"factor": 28, "min_pixels": 1, "max_pixels": 10**9, name: 0}
    with pytest.raises(ValueError, match=f"^{name}=0: must be at least 1$"):
        smart_resize(10, 500, **settings)
    with pytest.raises(ValueError, match=f"^{name}=0: must be at least 1$"):
        smart_resize_video(2, 10, 500, **settings)


def reference_indices(processor: Any, total: int, **request: Any) -> list[int] | None:
    metadata = VideoMetadata(total_num_frames=total, fps=24.0)
    try:
        indices = processor.sample_frames(metadata, **request)
    except (ValueError, ZeroDivisionError):
        return None
    return [int(index) for index in indices]


@pytest.mark.parametrize(
    ("rule", "processor"),
    [
        ("qwen2_vl", Qwen2VLVideoProcessor()),
        ("qwen3_vl", Qwen3VLVideoProcessor()),
        ("internvl", InternVLVideoProcessor()),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_sampled_frames_are_the_reference_s(rule: Any, processor: Any, seed: int) -> None:
    rng = random.Random(seed)
    compared = 0
    for _ in range(300):
        total = rng.choice([rng.randint(1, 40), rng.randint(40, 3000)])
        if rng.random() < 0.5:
            request: dict[str, Any] = {"fps": rng.choice([0.5, 1, 2, 3.7, 24, 60])}
        else:
            request = {"num_frames": rng.randint(1, 64)}
        wanted = reference_indices(processor, total, **request)
        if wanted is None:
            continue
        got = sample_frames(total, rule, **request)
        assert got == [index for index in wanted if index < total], (total, request)
        assert len(wanted) - len(got) in (0, 1)
        compared += 1
    assert compared >= 150


def test_the_internvl_shift_starts_where_it_is_told() -> None:
    processor = InternVLVideoProcessor()
    for shift in (True, False, 0, 2.5):
        wanted = reference_indices(processor, 100, num_frames=7, initial_shift=shift)
        assert sample_frames(100, "internvl", num_frames=7, initial_shift=shift) == wanted


def test_without_a_request_every_frame_is_taken() -> None:
    assert sample_frames(7, "qwen3_vl") == list(range(7))


def test_fewer_frames_than_a_pair_are_all_taken() -> None:
    assert sample_frames(1, "qwen2_vl", fps=2) == [0]
    assert sample_frames(1, "qwen3_vl", fps=2) == [0]


@pytest.mark.parametrize("rule", ["qwen2_vl", "internvl"])
def test_more_frames_than_there_are_is_an_error(rule: Any) -> None:
    with pytest.raises(ValueError, match="asks for 12 frames, and the video has 10"):
        sample_frames(10, rule, num_frames=12)


@pytest.mark.parametrize("rule", ["qwen2_vl", "internvl"])
def test_asking_for_no_frame_is_an_error(rule: Any) -> None:
    request: dict[str, Any] = {"num_frames": 1} if rule == "qwen2_vl" else {"fps": 0.1}
    with pytest.raises(ValueError, match="makes none of 10 frames: ask for at least"):
        sample_frames(10, rule, **request)


@pytest.mark.parametrize("rule", ["qwen2_vl", "qwen3_vl", "internvl"])
def test_fps_and_num_frames_exclude_each_other(rule: Any) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        sample_frames(10, rule, fps=2, num_frames=4)


@pytest.mark.parametrize(("size", "tokens"), [((3024, 4032), 11_844), ((1024, 1024), 1024)])
def test_token_counts_of_the_readme_are_those_of_qwen3_vl(
    size: tuple[int, int], tokens: int
) -> None:
    height, width = smart_resize(*size, 32, 65_536, 16_777_216)
    assert height * width // 32**2 == tokens
