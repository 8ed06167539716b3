"""Defaults from a repo's processor files equal those of transformers' auto classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoVideoProcessor

from encoders.inputs.patches import PatchPreprocessor
from encoders.inputs.processor_files import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD
from encoders.intern.intern_vit_pixels import TilePreprocessor
from tests.support.photographs import china, panning_clip

SIZES = {"temporal_patch_size": 2, "merge_size": 2}
P14 = {"patch_size": 14, **SIZES}
P16 = {"patch_size": 16, **SIZES}
QWEN2 = PatchPreprocessor.published("qwen2_vl", **P14)
QWEN3 = PatchPreprocessor.published("qwen3_vl", **P16)
CLIP = {"image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)}
CENTRED = {"image_mean": list(HALF), "image_std": list(HALF)}
FAST, SLOW = "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessor"
QWEN3_IMAGES = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    **P16,
    **CENTRED,
    "image_processor_type": FAST,
    "processor_class": "Qwen3VLProcessor",
}
QWEN3_CLIPS = {
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    **P16,
    **CENTRED,
    "video_processor_type": "Qwen3VLVideoProcessor",
    "fps": 2,
    "do_sample_frames": True,
    "min_frames": 4,
    "max_frames": 768,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
OLD = {"min_pixels": 3136, "max_pixels": 12845056}

# name: (model_type, files). Sizes are small enough to bite, so that a wrong default shows.
REPOS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "Qwen2-VL as published": (
        "qwen2_vl",
        {"preprocessor_config": {
            **OLD, **P14, **CLIP, "size": dict(OLD), "image_processor_type": SLOW,
            "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
            "resample": 3, "rescale_factor": 0.00392156862745098,
        }},
    ),
    "Qwen2.5-VL as published": (
        "qwen2_5_vl",
        {"preprocessor_config": {**OLD, **P14, **CLIP, "image_processor_type": SLOW}},
    ),
    "Qwen2-VL, sizes left out": (
        "qwen2_vl", {"preprocessor_config": {"image_processor_type": SLOW}},
    ),
    "Qwen2-VL, videos apart": (
        "qwen2_vl",
        {
            "preprocessor_config": {"min_pixels": 9000, "max_pixels": 20000,
                                    "image_processor_type": FAST},
            "video_preprocessor_config": {
                "size": {"shortest_edge": 5000, "longest_edge": 8000}, **CENTRED,
                "video_processor_type": "Qwen2VLVideoProcessor",
            },
        },
    ),
    "Qwen2-VL, nested": (
        "qwen2_vl",
        {
            "processor_config": {
                "image_processor": {"min_pixels": 9000, "max_pixels": 20000,
                                    "image_processor_type": FAST},
                "video_processor": {"min_pixels": 3000, "max_pixels": 6000,
                                    "video_processor_type": "Qwen2VLVideoProcessor"},
            },
            "preprocessor_config": {"min_pixels": 1, "max_pixels": 2, "image_processor_type": FAST},
        },
    ),
    "Qwen2-VL, old processor_config": (
        "qwen2_vl",
        {
            "processor_config": {"processor_class": "Qwen2VLProcessor"},
            "preprocessor_config": {"min_pixels": 9000, "max_pixels": 20000, **CENTRED,
                                    "image_processor_type": SLOW},
        },
    ),
    "Qwen3-VL as published": (
        "qwen3_vl",
        {"preprocessor_config": QWEN3_IMAGES, "video_preprocessor_config": QWEN3_CLIPS},
    ),
    "Qwen3-VL without a video file": ("qwen3_vl", {"preprocessor_config": QWEN3_IMAGES}),
    "Qwen3-VL without a video file, slow class": (
        "qwen3_vl", {"preprocessor_config": {**QWEN3_IMAGES, "image_processor_type": SLOW}},
    ),
    "Qwen3-VL, sizes left out": (
        "qwen3_vl",
        {
            "preprocessor_config": {"patch_size": 16, "image_processor_type": FAST},
            "video_preprocessor_config": {"video_processor_type": "Qwen3VLVideoProcessor"},
        },
    ),
    "Qwen3-VL, a file for videos without class and size": (
        "qwen3_vl",
        {"preprocessor_config": QWEN3_IMAGES, "video_preprocessor_config": P16},
    ),
    "Qwen3-VL, old spelling": (
        "qwen3_vl",
        {"preprocessor_config": {**P16, **CENTRED, "min_pixels": 9000, "max_pixels": 20000,
                                 "image_processor_type": FAST}},
    ),
    "Qwen3-Omni as published": (
        "qwen3_omni_moe",
        {"preprocessor_config": {**OLD, **P16, **CENTRED, "image_processor_type": SLOW,
                                 "feature_extractor_type": "WhisperFeatureExtractor"}},
    ),
}  # fmt: skip


def write_repo(folder: Path, model_type: str, files: dict[str, dict[str, Any]]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("repo", REPOS)
def test_qwen_defaults_are_what_the_auto_classes_take(repo: str, tmp_path: Path) -> None:
    model_type, files = REPOS[repo]
    folder = write_repo(tmp_path, model_type, files)
    family = QWEN3 if model_type.startswith("qwen3") else QWEN2
    ours = family.with_files(files)
    image = AutoImageProcessor.from_pretrained(folder)([china()], return_tensors="pt")
    got = ours([china()])
    assert torch.equal(got.grid_thw, image["image_grid_thw"])
    assert torch.equal(got.pixel_values, image["pixel_values"])
    clip = panning_clip(5, 300, 400)
    video = AutoVideoProcessor.from_pretrained(folder)(
        [clip], return_tensors="pt", do_sample_frames=False, cap_pixels_per_frame=False
    )
    got = ours(videos=[clip])
    assert torch.equal(got.grid_thw, video["video_grid_thw"])
    assert torch.equal(got.pixel_values, video["pixel_values_videos"])


def test_published_qwen2_files_bound_videos_by_the_image_sizes() -> None:
    _, files = REPOS["Qwen2-VL as published"]
    clip = torch.zeros(1, 3, 720, 1280, dtype=torch.uint8).expand(8, -1, -1, -1)
    assert QWEN2.with_files(files)(videos=[clip]).grid_thw.tolist() == [[4, 52, 92]]
    assert QWEN2(videos=[clip]).grid_thw.tolist() == [[4, 40, 72]]


def test_published_qwen3_files_are_the_family_s_own_defaults() -> None:
    _, files = REPOS["Qwen3-VL as published"]
    assert QWEN3.with_files(files) == QWEN3
    assert QWEN3.with_files({}) == QWEN3


def test_frame_limits_of_the_files_bound_the_sampling() -> None:
    limits = {"min_frames": 6, "max_frames": 8}
    ours = QWEN3.with_files({"video_preprocessor_config": {**QWEN3_CLIPS, **limits}})
    assert ours(videos=[panning_clip(48, 50, 60)], fps=24).grid_thw[0, 0] == 4
    assert ours(videos=[panning_clip(48, 50, 60)], fps=1).grid_thw[0, 0] == 3


CONVERTED = {
    "size": {"height": 448, "width": 448},
    "image_mean": list(IMAGENET_MEAN),
    "image_std": list(IMAGENET_STD),
}
GOT = {"image_processor_type": "GotOcr2ImageProcessorFast", **CONVERTED}
INTERN_CLIPS = {"video_processor_type": "InternVLVideoProcessor", **CONVERTED}


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config": {**GOT, "crop_to_patches": True}},
        {"preprocessor_config": {**GOT, "crop_to_patches": True, "max_patches": 4}},
        {"preprocessor_config": {**GOT, "crop_to_patches": True, "min_patches": 7}},
        {"preprocessor_config": {**GOT, "crop_to_patches": False}},
        {"preprocessor_config": GOT, "video_preprocessor_config": {**INTERN_CLIPS, **CENTRED}},
        {
            "processor_config": {
                "image_processor": {**GOT, **CENTRED},
                "video_processor": INTERN_CLIPS,
            }
        },
        {
            "preprocessor_config": {
                "image_processor_type": GOT["image_processor_type"],
                "size": CONVERTED["size"],
            }
        },
    ],
)
def test_intern_defaults_are_what_the_auto_classes_take(
    files: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_repo(tmp_path, "internvl", files)
    ours = TilePreprocessor().with_files(files)
    image = AutoImageProcessor.from_pretrained(folder)([china()], return_tensors="pt")
    assert torch.equal(ours([china()]).pixel_values, image["pixel_values"])
    clip = panning_clip(3)
    video = AutoVideoProcessor.from_pretrained(folder)([clip], return_tensors="pt")
    assert torch.equal(ours(videos=[clip]).pixel_values, video["pixel_values_videos"][0])


@pytest.mark.parametrize("nested", [True, False])
def test_internvl_s_processor_tiles_whatever_its_file_says(nested: bool) -> None:
    # As published -hf repos have it; InternVLProcessor passes crop_to_patches=True all the same.
    images = {**GOT, "crop_to_patches": False}
    named = {"processor_class": "InternVLProcessor"}
    files: dict[str, dict[str, Any]] = {"preprocessor_config": {**images, **named}}
    if nested:
        files = {"processor_config": {"image_processor": images, **named}}
    assert TilePreprocessor(dynamic=False).with_files(files)([china()]).tiles == [(3, 2, True)]


def test_a_clip_feature_extractor_gives_only_mean_and_std() -> None:
    files = {
        "preprocessor_config": {
            "feature_extractor_type": "CLIPFeatureExtractor",
            **CENTRED,
            "size": 448,
            "crop_size": 448,
            "do_center_crop": True,
            "do_resize": True,
            "resample": 3,
            "do_normalize": True,
        }
    }
    before = TilePreprocessor(max_tiles=6, min_tiles=2, use_thumbnail=False)
    after = before.with_files(files)
    assert (after.mean, after.std, after.video_mean, after.video_std) == (HALF,) * 4
    assert (after.min_tiles, after.max_tiles, after.use_thumbnail) == (2, 6, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_normalize": False}, "do_normalize=False is not implemented: it must be True"),
        ({"do_rescale": False}, "do_rescale=False is not implemented"),
        ({"do_resize": False}, "do_resize=False is not implemented"),
        ({"do_convert_rgb": False}, "do_convert_rgb=False is not implemented"),
        ({"resample": 2}, "resample=2 is not implemented: it must be 3"),
        ({"rescale_factor": 1.0}, r"rescale_factor=1\.0 is not implemented: it must be 1/255"),
        ({"rescale_factor": "x"}, "rescale_factor='x' is not implemented"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame=True is not implemented"),
        ({"patch_size": 16}, "patch_size=16 but the tower has 14"),
        ({"merge_size": 4}, "merge_size=4 but the tower has 2"),
        ({"temporal_patch_size": 1}, "temporal_patch_size=1 but the tower has 2"),
        ({"min_pixels": 0}, "min_pixels=0 must be a positive integer"),
        ({"max_pixels": "big"}, "max_pixels='big' must be a positive integer"),
        ({"min_pixels": 10, "max_pixels": 5}, "min_pixels=10 is over max_pixels=5"),
        ({"size": 448}, "size=448 must have shortest_edge and longest_edge"),
        ({"size": {"longest_edge": 9}}, r"size=\{'longest_edge': 9\} lacks shortest_edge"),
        ({"image_mean": [1, 2]}, r"image_mean=\[1, 2\] must be three numbers"),
        ({"image_std": [0.1, 0, 0.2]}, "image_std=.* must be three numbers from 0.001 to"),
        ({"max_frames": 0}, "max_frames=0 must be a positive integer"),
    ],
)
def test_values_that_are_not_implemented_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        QWEN2.with_files({"preprocessor_config": change})
    assert str(caught.value).startswith("preprocessor_config.json: ")


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("preprocessor_config", {"resample": 2}, "resample=2 is not implemented"),
        ("preprocessor_config", {"size": None}, "size=.*384.* but the tower takes .* 448x448"),
        ("preprocessor_config", {"max_patches": 0}, "max_patches=0 must be a positive integer"),
    ],
)
def test_tile_values_that_are_not_implemented_are_named(
    section: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        TilePreprocessor().with_files({section: {**GOT, **change}})
    assert str(caught.value).startswith(f"{section}.json: ")


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (TilePreprocessor(), {**INTERN_CLIPS, "do_center_crop": True}, "do_center_crop=True is no"),
        (TilePreprocessor(), {**INTERN_CLIPS, "initial_shift": "x"}, "initial_shift='x' must be"),
        (QWEN2, {"resample": 2}, "resample=2 is not implemented"),
        (QWEN2, {"min_pixels": 2**28 + 1}, "min_pixels=268435457 must be at most 268435456"),
        (
            QWEN3,
            {"size": {"shortest_edge": 9, "longest_edge": 1 << 40}},
            "max_pixels=1099511627776",
        ),
    ],
)
def test_bad_values_for_videos_wait_for_the_first_video(
    family: PatchPreprocessor | TilePreprocessor, change: dict[str, Any], message: str
) -> None:
    ours = family.with_files({"video_preprocessor_config": change})
    assert torch.equal(ours([china()]).pixel_values, family([china()]).pixel_values)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^video_preprocessor_config.json: {message}"):
            ours([china()], [panning_clip(2)])
    assert ours.with_files({}) == family


@pytest.mark.parametrize(
    ("old", "new"), [("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")]
)
def test_areas_over_the_limit_are_refused(old: str, new: str) -> None:
    limit = 2**28
    largest = {"min_pixels": limit, "max_pixels": limit}
    assert QWEN2.with_files({"preprocessor_config": largest}).images.min_pixels == limit
    size = {"shortest_edge": limit, "longest_edge": limit, new: limit + 1}
    for section in ({**largest, old: limit + 1}, {"size": size}):
        with pytest.raises(ValueError, match=f"{old}=268435457 must be at most 268435456"):
            QWEN2.with_files({"preprocessor_config": section})


def test_a_small_max_pixels_alone_bounds_images_as_in_transformers(tmp_path: Path) -> None:
    # It lies below the default of min_pixels of the video processor, which reads the same file.
    files = {"preprocessor_config": {"max_pixels": 50176, "image_processor_type": SLOW}}
    folder = write_repo(tmp_path, "qwen2_5_vl", files)
    image = AutoImageProcessor.from_pretrained(folder)([china()], return_tensors="pt")
    ours = QWEN2.with_files(files)
    assert torch.equal(ours([china()]).pixel_values, image["pixel_values"])
    with pytest.raises(ValueError, match="min_pixels=100352 is over max_pixels=50176: pass both"):
        ours(videos=[panning_clip(2)])
    assert len(ours(videos=[panning_clip(2)], min_pixels=3136, max_pixels=50176).grid_thw) == 1


def test_a_null_that_is_no_flag_or_filter_means_left_out() -> None:
    _, files = REPOS["Qwen2.5-VL as published"]
    nulls = dict.fromkeys(("size", "do_convert_rgb", "rescale_factor", "min_frames"))
    padded = {"preprocessor_config": {**nulls, **files["preprocessor_config"]}}
    assert QWEN2.with_files(padded) == QWEN2.with_files(files)


def test_a_misspelt_file_name_is_refused() -> None:
    for ours in (QWEN2, TilePreprocessor()):
        with pytest.raises(ValueError, match=r"\['preprocessor_config.json'\]: must be among"):
            ours.with_files({"preprocessor_config.json": {}})
