"""Images for MiniCPM-V have the sizes, slices and pixels of transformers' processors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from encoders import Video
from encoders.contract import VisionInputs
from encoders.inputs.sampling import sample_frames
from encoders.minicpm.minicpm_v_pixels import SlicePreprocessor, slice_grid
from tests.oracles.versions import MINICPM_V, needs
from tests.support.photographs import china, photographs
from weights.published import family_facts

OURS = SlicePreprocessor(14)
OCR = SlicePreprocessor(14, token_size=2)
pytestmark = needs(*MINICPM_V)


def processor(mode: str) -> Any:
    if mode == "4x":
        from transformers.models.minicpm_ocr.image_processing_minicpm_ocr import (
            MiniCPMOcrImageProcessor,
        )

        return MiniCPMOcrImageProcessor()
    from transformers.models.minicpmv4_6.image_processing_minicpmv4_6 import (
        MiniCPMV4_6ImageProcessor,
    )

    return MiniCPMV4_6ImageProcessor()


def views_of(inputs: VisionInputs) -> tuple[list[list[int]], list[Tensor]]:
    """The grid and the patches of every view, each image or frame before its slices."""
    views: list[list[tuple[int, list[int], Tensor]]] = [[] for _ in inputs.grid_thw]
    frames = inputs.grid_thw[:, 0].tolist()
    for name in ("image", "tiles"):
        pixels, grid_thw, items = inputs.paths[name]
        start = 0
        for item, (t, h, w) in zip(items, grid_thw.tolist(), strict=True):
            for view in range(t):
                frame = view * frames[item] // t
                views[item].append((frame, [h, w], pixels[start : start + h * w]))
                start += h * w
    flat = [view for item in views for view in sorted(item, key=lambda view: view[0])]
    return [grid for _, grid, _ in flat], [rows for _, _, rows in flat]


@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_pixels_and_grids_are_those_of_the_processor(mode: str) -> None:
    images = [china(), *photographs()[:1], *(china().resize(s) for s in [(10, 10), (30, 900)])]
    wanted = processor(mode)(images, return_tensors="pt")
    got = (OURS if mode == "16x" else OCR)(images)
    grids, rows = views_of(got)
    assert grids == wanted["target_sizes"].tolist()
    theirs = wanted["pixel_values"][0].unflatten(2, (-1, 14)).permute(2, 0, 1, 3).flatten(1)
    assert torch.equal(torch.cat(rows), theirs)
    tilings = [[rows, columns] if more else [0, 0] for columns, rows, more in got.tiles or ()]
    assert tilings == wanted["grids"]


def video_processor() -> Any:
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import (
        MiniCPMV4_6VideoProcessor,
    )

    return MiniCPMV4_6VideoProcessor()


def test_frames_are_what_the_processor_makes_of_a_video() -> None:
    frames = [china().resize((640, 480)), china().transpose(Image.Transpose.ROTATE_180)]
    frames[1] = frames[1].resize((640, 480))
    wanted = video_processor()([frames], do_sample_frames=False, return_tensors="pt")
    pixels = wanted["pixel_values_videos"][0].unflatten(2, (-1, 14)).permute(2, 0, 1, 3).flatten(1)
    for got in (OURS((), [frames]), OURS(frames)):
        grids, rows = views_of(got)
        assert grids == wanted["target_sizes_videos"].tolist()
        assert torch.equal(torch.cat(rows), pixels)
    assert OURS((), [frames], max_tiles=1).tiles == [(1, 1, False)]


def test_one_frame_per_second_is_the_processors_sample() -> None:
    from transformers.video_utils import VideoMetadata

    theirs = video_processor()
    for total, rate, most in [(90, 29.97, 128), (4, 24.0, 128), (700, 3.5, 16), (50, 0.4, 20)]:
        film = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
        wanted = theirs.sample_frames(film, max_num_frames=most)
        assert sample_frames(total, "minicpm_v", fps=1, source_fps=rate, max_frames=most) == wanted
    assert sample_frames(90, "minicpm_v", num_frames=3) == [0, 44, 89]


def test_files_bound_the_frames_and_slices_of_videos() -> None:
    section = {"max_slice_nums": 1, "max_num_frames": 2}
    ours = OURS.with_files({"video_preprocessor_config": section})
    film = Video(torch.zeros(4, 3, 480, 640, dtype=torch.uint8), fps=1)
    got = ours([china()], [film], fps=1)
    assert got.grid_thw[1].tolist() == [2, 28, 36]
    assert [tiled for _, _, tiled in got.tiles or ()] == [True, False]
    stacked = OURS.with_files({"video_preprocessor_config": {"stack_frames": 2}})
    with pytest.raises(ValueError, match="stack_frames=2 is not implemented: it must be 1"):
        stacked((), [film])


def test_grids_of_random_images_are_the_processors() -> None:
    rng, theirs = random.Random(0), processor("16x")
    for _ in range(300):
        size = rng.randint(1, 4000), rng.randint(1, 4000)
        grid = theirs.get_sliced_grid(size, 9, 448)
        assert slice_grid(*size, 9, 448) == (None if grid is None else tuple(grid))
        for ours, mode in ((OURS, "16x"), (OCR, "4x")):
            best = theirs.find_best_resize(size, 448, 14, mode, grid is None)
            assert ours._whole_tokens(*size, grow=grid is None) == best


@pytest.mark.parametrize(
    ("size", "image", "tiles"),
    [
        ((1920, 1080), [1, 24, 44], [8, 32, 32]),
        ((640, 480), [1, 28, 36], [2, 40, 28]),
        ((3000, 100), [1, 4, 172], [3, 12, 100]),
        ((1000, 1000), [1, 32, 32], [4, 32, 32]),
        ((224, 224), [1, 32, 32], None),
    ],
)
def test_the_whole_image_has_slices_beside_it(
    size: tuple[int, int], image: list[int], tiles: list[int] | None
) -> None:
    got = OURS([Image.new("RGB", size)])
    assert got.grid_thw.tolist() == [image]
    assert got.paths["tiles"].grid_thw.tolist() == ([] if tiles is None else [tiles])


def test_files_and_a_keyword_bound_the_slices() -> None:
    assert OURS.with_files(family_facts("minicpm_v").processors["minicpm-v"]) == OURS
    few = OURS.with_files({"preprocessor_config": {"max_slice_nums": 4}})
    assert (
        few([Image.new("RGB", (1920, 1080))]).tiles
        == OURS([Image.new("RGB", (1920, 1080))], max_tiles=4).tiles
    )
    whole = OURS.with_files({"preprocessor_config": {"slice_mode": False}})
    assert whole([china()]).tiles == OURS([china()], max_tiles=1).tiles == [(1, 1, False)]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"downsample_mode": "4x"}, "downsample_mode='4x' is not implemented"),
        ({"image_processor_type": "MiniCPMOcrImageProcessor"}, "downsample_mode='4x' is not"),
        ({"small_image_upsize": "adaptive"}, "small_image_upsize='adaptive'"),
        ({"small_image_upsize": None}, "small_image_upsize=null is not implemented"),
        ({"patch_size": 16}, "patch_size=16"),
        ({"max_slice_nums": 0}, "max_slice_nums=0 must be a positive integer"),
    ],
)
def test_files_that_cannot_be_followed_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OURS.with_files({"preprocessor_config": section})
