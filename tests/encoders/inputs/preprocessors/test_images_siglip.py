"""Images for SigLIP, Gemma 3 and NaFlex have the sizes and pixels of transformers' processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor
from transformers.models.siglip2.image_processing_siglip2 import Siglip2ImageProcessor

from encoders.siglip.siglip2_pixels import NaflexPreprocessor, most_patches
from encoders.siglip.siglip_pixels import StretchPreprocessor
from tests.support.photographs import china, flower, hopper, of_random_sizes, photographs
from weights.published import family_facts

GOLDEN = {
    256: {
        (1080, 1920): (192, 336),
        (224, 224): (256, 256),
        (480, 640): (224, 288),
        (4000, 3000): (288, 224),
        (10, 10): (256, 256),
        (20, 3000): (16, 2400),
    },
    1024: {
        (1080, 1920): (384, 672),
        (224, 224): (512, 512),
        (480, 640): (432, 576),
        (4000, 3000): (576, 432),
        (10, 10): (512, 512),
        (20, 3000): (48, 5456),
    },
}
"""Heights and widths of images, and what transformers 5.23.0 resizes them to, by patches."""
FILES = {
    "siglip": family_facts("siglip").processors["siglip"],
    "gemma3": family_facts("gemma3").processors["gemma3"],
    "siglip2": family_facts("siglip2").processors["siglip2-naflex"],
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
NAFLEX = NaflexPreprocessor.siglip2(16)


@pytest.mark.parametrize("most", GOLDEN)
def test_naflex_takes_the_published_sizes(most: int) -> None:
    for (height, width), wanted in GOLDEN[most].items():
        rows, columns = most_patches(height, width, 16, most)
        assert (16 * rows, 16 * columns) == wanted


def naflex_pixels(images: list[Image.Image], most: int) -> tuple[torch.Tensor, torch.Tensor]:
    processor = Siglip2ImageProcessor(max_num_patches=most, **HALF)
    wanted = processor(images, return_tensors="pt")
    keep = wanted["pixel_attention_mask"].bool()
    return wanted["pixel_values"][keep], wanted["spatial_shapes"]


@pytest.mark.parametrize("most", [64, 256, 1000])
def test_naflex_pixels_are_those_of_the_processor(most: int) -> None:
    images = [*photographs(), *of_random_sizes(most, 8)]
    rows, shapes = naflex_pixels(images, most)
    got = NaflexPreprocessor.siglip2(16, most)(images)
    assert torch.equal(got.grid_thw[:, 1:], shapes)
    assert torch.equal(got.pixel_values, rows)


def test_max_pixels_bounds_naflex_as_a_number_of_patches() -> None:
    rows, shapes = naflex_pixels([china(), hopper()], 100)
    got = NAFLEX([china(), hopper()], max_pixels=100 * 256)
    assert torch.equal(got.grid_thw[:, 1:], shapes)
    assert torch.equal(got.pixel_values, rows)
    with pytest.raises(ValueError, match="min_pixels=9: this family resizes every image"):
        NAFLEX([china()], min_pixels=9)


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("resample", [2, 3])
def test_views_of_one_size_are_those_of_the_processor(patch: int, resample: int) -> None:
    side, images = 112 + patch // 2, [*photographs()[:4], *of_random_sizes(patch, 6)]
    size = {"height": side, "width": side}
    section = {"size": size, "resample": resample, **HALF}
    wanted = SiglipImageProcessor(**section)(images, return_tensors="pt")["pixel_values"]
    ours = StretchPreprocessor(patch, image_size=side)
    got = ours.with_files({"preprocessor_config": section})(images)
    cut = side // patch * patch
    assert torch.equal(got.pixel_values, wanted[:, :, :cut, :cut])
    assert got.grid_thw.tolist() == [[1, cut // patch, cut // patch]] * 10


def test_gemma_s_file_is_bilinear_and_has_no_crops() -> None:
    files = FILES["gemma3"]
    section: dict[str, Any] = dict(files["preprocessor_config"])
    wanted = Gemma3ImageProcessor(**section)([flower()], return_tensors="pt")["pixel_values"]
    ours = StretchPreprocessor(14, image_size=896).with_files(files)
    assert torch.equal(ours([flower()]).pixel_values, wanted)
    bare = {name: value for name, value in section.items() if name != "resample"}
    assert StretchPreprocessor(14, image_size=896).with_files({"preprocessor_config": bare}) == ours
    with pytest.raises(ValueError, match="do_pan_and_scan=True is not implemented"):
        ours.with_files({"preprocessor_config": {**section, "do_pan_and_scan": True}})


@pytest.mark.parametrize("ours", [NAFLEX, StretchPreprocessor(14, image_size=100)], ids=type)
def test_clips_are_refused(ours: Any) -> None:
    with pytest.raises(ValueError, match="takes only images"):
        ours([], [[china(), china()]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resample": 0}, "resample=0 is not implemented: it must be 1, 2 or 3"),
        ({"max_num_patches": 0}, "max_num_patches=0 must be a positive integer"),
        ({"patch_size": 14}, "patch_size=14 is not implemented: it must be 16"),
        ({"do_resize": False}, "do_resize=False is not implemented"),
    ],
    ids=str,
)
def test_a_file_of_naflex_is_read_strictly(change: dict[str, Any], message: str) -> None:
    section = {**FILES["siglip2"]["preprocessor_config"], **change}
    with pytest.raises(ValueError, match=message):
        NAFLEX.with_files({"preprocessor_config": section})


SQUARE = {"height": 112, "width": 112}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 112}, "size=112 is the length of the shorter side"),
        ({"do_center_crop": True, "crop_size": 96}, "do_center_crop=True is not implemented"),
        ({"do_pad": True, "pad_size": 128}, "do_pad=True is not implemented"),
        ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type='ViTImageProcessor'"),
    ],
    ids=str,
)
def test_steps_that_make_no_square_of_the_tower_are_refused(
    change: dict[str, Any], message: str
) -> None:
    ours = StretchPreprocessor(14, image_size=112)
    with pytest.raises(ValueError, match=message):
        ours.with_files({"preprocessor_config": {"size": SQUARE, **change}})


def test_a_crop_of_the_whole_square_leaves_it_as_it_is() -> None:
    section = {"size": SQUARE, "do_center_crop": True, "crop_size": SQUARE}
    wanted = SiglipImageProcessor(**section)([flower()], return_tensors="pt")["pixel_values"]
    ours = StretchPreprocessor(14, image_size=112).with_files({"preprocessor_config": section})
    assert torch.equal(ours([flower()]).pixel_values, wanted)


def test_a_file_without_a_class_has_the_filter_of_the_encoder() -> None:
    gemma = StretchPreprocessor(14, image_size=112, resample="bilinear")
    bare = {"preprocessor_config": {"size": SQUARE}}
    assert gemma.with_files(bare).resample == "bilinear"
    assert StretchPreprocessor(14, image_size=112).with_files(bare).resample == "bicubic"
