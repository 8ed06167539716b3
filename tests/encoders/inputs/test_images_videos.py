"""Videos for the Qwen towers: frame pairs, bounds on the area, sampling, refused input."""

from __future__ import annotations

import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

from encoders.inputs.intake import Video
from encoders.inputs.patches import PatchPreprocessor
from encoders.intern.intern_vit_pixels import TilePreprocessor
from tests.support.photographs import china, flower, panning_clip

SIZES = {"temporal_patch_size": 2, "merge_size": 2}
QWEN2 = PatchPreprocessor.published("qwen2_vl", patch_size=14, **SIZES)
QWEN3 = PatchPreprocessor.published("qwen3_vl", patch_size=16, **SIZES)
FAMILIES = [
    pytest.param(QWEN2, Qwen2VLVideoProcessor, id="qwen2_vl"),
    pytest.param(QWEN3, Qwen3VLVideoProcessor, id="qwen3_vl"),
]


def reference(ours: PatchPreprocessor, processor: Any, **size: int) -> Any:
    rules = ours.videos.bounded(size.get("min_pixels"), size.get("max_pixels"))
    built = processor(
        patch_size=ours.patch_size,
        image_mean=list(rules.mean),
        image_std=list(rules.std),
        size={"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels},
        **SIZES,
    )

    def process(clip: Any, **request: Any) -> tuple[torch.Tensor, torch.Tensor]:
        request.setdefault("do_sample_frames", False)
        out = built([clip], return_tensors="pt", cap_pixels_per_frame=False, **request)
        return out["pixel_values_videos"], out["video_grid_thw"]

    return process


@pytest.mark.parametrize(("ours", "processor"), FAMILIES)
@pytest.mark.parametrize("frames", [2, 3, 4, 5, 8])
def test_clips_give_the_reference_s_pixels_to_the_bit(
    ours: PatchPreprocessor, processor: Any, frames: int
) -> None:
    clip = panning_clip(frames)
    pixels, grid = reference(ours, processor)(clip)
    got = ours(videos=[clip])
    assert torch.equal(got.grid_thw, grid)
    assert torch.equal(got.pixel_values, pixels)


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "processor"), FAMILIES)
def test_grids_and_pixels_of_500_random_clips_are_the_reference_s(
    ours: PatchPreprocessor, processor: Any
) -> None:
    bounds = {"min_pixels": 8_000, "max_pixels": 80_000}
    process = reference(ours, processor, **bounds)
    rng = random.Random(8)
    array = np.asarray(china())
    for _ in range(500):
        height, width = rng.randint(2, 400), rng.randint(3, 400)
        frames = rng.randint(2, 5)
        clip = np.stack([array[n : n + height, n : n + width] for n in range(frames)])
        pixels, grid = process(clip, input_data_format="channels_last")
        got = ours(videos=[clip], **bounds)
        assert torch.equal(got.grid_thw, grid), clip.shape
        assert torch.equal(got.pixel_values, pixels), clip.shape


@pytest.mark.parametrize(("ours", "processor"), FAMILIES)
@pytest.mark.parametrize("frames", [2, 7])
def test_sampling_takes_the_reference_s_frames(
    ours: PatchPreprocessor, processor: Any, frames: int
) -> None:
    clip = panning_clip(30, 60, 80)
    request = {"num_frames": frames, "fps": None, "do_sample_frames": True}
    pixels, grid = reference(ours, processor)(clip, **request)
    got = ours(videos=[clip], num_frames=frames)
    assert torch.equal(got.grid_thw, grid)
    assert torch.equal(got.pixel_values, pixels)


@pytest.mark.parametrize(("ours", "processor"), FAMILIES)
def test_fps_goes_by_the_rate_of_the_source(ours: PatchPreprocessor, processor: Any) -> None:
    clip = panning_clip(30, 60, 80)
    for source, rate in ((None, 24.0), (12.0, 12.0)):
        metadata = {"total_num_frames": 30, "fps": rate}
        pixels, grid = reference(ours, processor)(
            clip, fps=5, do_sample_frames=True, video_metadata=[metadata]
        )
        got = ours(videos=[Video(clip, source)], fps=5)
        assert torch.equal(got.grid_thw, grid)
        assert torch.equal(got.pixel_values, pixels)


def test_areas_are_per_frame_in_qwen2_and_per_clip_in_qwen3() -> None:
    frame = torch.zeros(1, 3, 720, 1280, dtype=torch.uint8)
    eight = frame.expand(8, -1, -1, -1)
    assert QWEN2(videos=[eight]).grid_thw.tolist() == [[4, 40, 72]]
    assert QWEN3(videos=[eight]).grid_thw.tolist() == [[4, 44, 80]]
    half = QWEN3(videos=[eight], max_pixels=8 * 360 * 640)
    assert half.grid_thw.tolist() == [[4, 22, 40]]


@pytest.mark.parametrize("ours", [QWEN2, QWEN3])
def test_a_video_of_one_frame_becomes_a_pair(ours: PatchPreprocessor) -> None:
    one, two = panning_clip(1), np.repeat(panning_clip(1), 2, axis=0)
    assert torch.equal(ours(videos=[one]).pixel_values, ours(videos=[two]).pixel_values)
    assert ours(videos=[one]).grid_thw[0, 0] == 1


@pytest.mark.parametrize("ours", [QWEN2, QWEN3])
def test_a_clip_can_be_given_in_any_form(ours: PatchPreprocessor) -> None:
    array = panning_clip(4)
    tensor = torch.from_numpy(array).permute(0, 3, 1, 2)
    pictures = [Image.fromarray(frame) for frame in array]
    mixed = (pictures[0], array[1], tensor[2], pictures[3])
    wanted = ours(videos=[array]).pixel_values
    for clip in (tensor, tensor.contiguous(), pictures, mixed, iter(pictures), Video(array)):
        assert torch.equal(ours(videos=[clip]).pixel_values, wanted)


@pytest.mark.parametrize("ours", [QWEN2, QWEN3, TilePreprocessor(image_size=56)])
def test_a_list_of_pictures_is_one_clip(ours: Any) -> None:
    pictures = [Image.fromarray(frame) for frame in panning_clip(4)]
    wanted = ours(videos=[pictures])
    for clip in (pictures, tuple(pictures)):
        got = ours(videos=clip)
        assert torch.equal(got.grid_thw, wanted.grid_thw)
        assert torch.equal(got.pixel_values, wanted.pixel_values)


@pytest.mark.parametrize("ours", [QWEN2, QWEN3])
def test_images_come_first_and_then_videos_in_order(ours: PatchPreprocessor) -> None:
    clips = [panning_clip(3), panning_clip(2, 50, 60)]
    both = ours([china(), flower()], clips)
    apart = [ours([china()]), ours([flower()]), *(ours(videos=[clip]) for clip in clips)]
    assert torch.equal(both.grid_thw, torch.cat([part.grid_thw for part in apart]))
    assert torch.equal(both.pixel_values, torch.cat([part.pixel_values for part in apart]))


@pytest.mark.parametrize("ours", [QWEN2, QWEN3, TilePreprocessor()])
@pytest.mark.parametrize(
    ("videos", "message"),
    [
        ([[]], "video 0: has no frames"),
        ([np.zeros((0, 5, 5, 3), np.uint8)], "video 0: has no frames"),
        ([np.zeros((2, 0, 5, 3), np.uint8)], "video 0: frame 0: is 5x0 pixels: an image needs at"),
        ([torch.zeros(2, 3, 4, 0, dtype=torch.uint8)], "video 0: frame 0: is 0x4 pixels: an im"),
        ([[Image.new("RGB", (0, 5))]], "video 0: frame 0: is 0x5 pixels: an image needs at least"),
        ([panning_clip(2)[0]], r"video 0: shape \(90, 130, 3\): a video array has four dim"),
        ([china(), 3], "video 0: is of type Image, not a video: pass the path"),
        (["clip.mp4"], "video 0: clip.mp4: there is no such file"),
        ([3], "video 0: is of type int, not a video"),
        (china(), "videos is one Image: pass a video, or a list"),
        ("clip.mp4", "video 0: clip.mp4: there is no such file"),
        (
            [panning_clip(2), [china(), china().resize((9, 8))]],
            "video 1: frame 1: is 9x8 pixels, the first 640x427: all frames",
        ),
        ([[china(), None]], "video 0: frame 1: is of type NoneType, not an image"),
        ([panning_clip(2).astype(np.float32)], "video 0: frame 0: array of float32"),
    ],
)
def test_what_is_no_video_is_refused(ours: Any, videos: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(videos=videos)


def test_sampling_that_cannot_be_names_the_video() -> None:
    with pytest.raises(ValueError, match=r"video 0: .*asks for 12 frames, and the video has 4"):
        QWEN2(videos=[panning_clip(4)], num_frames=12)
    with pytest.raises(ValueError, match="give one of them"):
        QWEN3(videos=[panning_clip(4)], num_frames=2, fps=1)


@pytest.mark.parametrize("number", [Decimal, Fraction, np.float32])
def test_rates_may_be_numbers_of_any_type(number: Any) -> None:
    array = panning_clip(30, 60, 80)
    for ours in (QWEN2, QWEN3, TilePreprocessor(image_size=56)):
        wanted = ours(videos=[Video(array, 12.0)], fps=2.5).pixel_values
        for source, sampled in ((number(12), 2.5), (12.0, number(2.5)), (number(12), number(2.5))):
            got = ours(videos=[Video(array, source)], fps=sampled).pixel_values
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("rate", [10**400, Decimal("NaN"), torch.ones(2), 1j, True], ids=type)
def test_a_rate_that_is_no_number_is_refused_as_a_keyword(rate: Any) -> None:
    for ours in (QWEN2, QWEN3, TilePreprocessor()):
        with pytest.raises(ValueError, match=r"fps=.*: must be a positive number of frames"):
            ours(videos=[panning_clip(4)], fps=rate)


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_videos_without_values_are_refused(kind: str) -> None:
    clip = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    clip = clip.to("meta") if kind == "meta" else clip.to_sparse()
    for ours in (QWEN2, QWEN3, TilePreprocessor()):
        with pytest.raises(ValueError, match=r"^video 0: frame 0: is a .*dense tensor with values"):
            ours(videos=[clip])


@pytest.mark.parametrize("rate", [0, -24.0, float("nan"), float("inf"), "24", True])
def test_a_bad_source_rate_is_refused_when_sampling_by_fps(rate: Any) -> None:
    clip = Video(panning_clip(4), rate)
    for ours in (QWEN2, QWEN3, TilePreprocessor()):
        with pytest.raises(ValueError, match=rf"video 0: .*fps={rate}: must be .*leave it out"):
            ours(videos=[clip], fps=2)
        assert len(ours(videos=[clip]).grid_thw) == 1


def test_only_the_sampled_frames_are_read() -> None:
    frames = [china(), "not there.png", "nor there.png", flower()]
    assert QWEN3(videos=[frames], num_frames=2).grid_thw[0, 0] == 1


@pytest.mark.parametrize("ours", [QWEN2, QWEN3, TilePreprocessor()])
def test_one_video_needs_no_list(ours: Any) -> None:
    clip = panning_clip(2)
    for bare in (clip, Video(clip), torch.from_numpy(clip).permute(0, 3, 1, 2)):
        assert torch.equal(ours(videos=bare).pixel_values, ours(videos=[clip]).pixel_values)
