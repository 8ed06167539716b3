"""Images for DINOv2 and DINOv3 have the sizes and pixels of transformers' processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from transformers.models.bit.image_processing_bit import BitImageProcessor
from transformers.models.dinov3_vit.image_processing_dinov3_vit import DINOv3ViTImageProcessor

from encoders.contract import Limits, VisionInputs
from encoders.dino.dino_pixels import DinoPreprocessor
from tests.support.photographs import china, of_random_sizes, photographs
from weights.published import family_facts

V2_FILE = family_facts("dinov2").processors["dinov2"]
V2: dict[str, Any] = dict(V2_FILE["preprocessor_config"])
V3_FILE = family_facts("dinov3").processors["dinov3"]
V3: dict[str, Any] = dict(V3_FILE["preprocessor_config"])
DINOV2, DINOV3 = DinoPreprocessor.dinov2(14), DinoPreprocessor.dinov3(16)


def images_of(inputs: VisionInputs, patch: int) -> Tensor:
    """The patches of images of one size as images."""
    _, h, w = inputs.grid_thw[0].tolist()
    pattern = "(b h w) (c p q) -> b c (h p) (w q)"
    return rearrange(inputs.pixel_values, pattern, h=h, w=w, p=patch, q=patch)


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("sizes", [(256, 224), (112, 100), (90, 90)], ids=str)
def test_dinov2_pixels_are_those_of_the_processor(patch: int, sizes: tuple[int, int]) -> None:
    short, crop = sizes
    changes = {"size": {"shortest_edge": short}, "crop_size": {"height": crop, "width": crop}}
    images = [*photographs(), *of_random_sizes(short, 6)]
    wanted = BitImageProcessor(**{**V2, **changes})(images, return_tensors="pt")["pixel_values"]
    ours = DinoPreprocessor.dinov2(patch)
    got = ours.with_files({"preprocessor_config": {**V2, **changes}})(images)
    cut = crop // patch * patch
    assert torch.equal(images_of(got, patch), wanted[:, :, :cut, :cut])


@pytest.mark.parametrize("size", [(224, 224), (96, 250)], ids=str)
def test_dinov3_pixels_are_those_of_the_processor(size: tuple[int, int]) -> None:
    section = {**V3, "size": {"height": size[0], "width": size[1]}}
    images = [*photographs(), *of_random_sizes(size[0], 6)]
    wanted = DINOv3ViTImageProcessor(**section)(images, return_tensors="pt")["pixel_values"]
    got = DINOV3.with_files({"preprocessor_config": section})(images)
    cut = size[1] // 16 * 16
    torch.testing.assert_close(images_of(got, 16), wanted[..., :cut], rtol=0, atol=1e-6)


def test_the_published_file_of_dinov3_sets_the_defaults() -> None:
    assert DINOV3.with_files(V3_FILE) == DINOV3
    assert DINOV3([china()]).grid_thw.tolist() == [[1, 14, 14]]
    whole = DINOV3([china().resize((640, 480))], max_pixels=1 << 24)
    assert whole.grid_thw.tolist() == [[1, 30, 40]]


def test_a_number_as_size_of_a_dinov3_file_is_that_of_both_sides() -> None:
    section = {"size": 112, "crop_size": 96}
    wanted = DINOv3ViTImageProcessor(**section)([china()], return_tensors="pt")["pixel_values"]
    assert wanted.shape == (1, 3, 112, 112)
    got = DINOV3.with_files({"preprocessor_config": section})([china()])
    assert got.grid_thw.tolist() == [[1, 7, 7]]
    with pytest.raises(ValueError, match=r"size=.* is not implemented"):
        DINOV3.with_files({"preprocessor_config": {**section, "do_center_crop": True}})


def test_the_published_file_of_dinov2_sets_the_defaults() -> None:
    assert DINOV2.with_files(V2_FILE) == DINOV2
    assert DINOV2([china()]).grid_thw.tolist() == [[1, 16, 16]]


@pytest.mark.parametrize("key", ["size", "crop_size", "image_mean", "image_std", "resample"])
def test_a_missing_key_of_a_dinov2_file_is_the_class_default(key: str) -> None:
    section = {name: value for name, value in V2.items() if name != key}
    wanted = BitImageProcessor(**section)([china()], return_tensors="pt")["pixel_values"]
    got = DINOV2.with_files({"preprocessor_config": section})([china()])
    assert torch.equal(images_of(got, 14), wanted)


def test_a_bound_on_the_area_keeps_the_shape_of_dino_images() -> None:
    image = china().resize((640, 480))
    whole = DINOV2([image], max_pixels=1 << 24)
    assert whole.grid_thw.tolist() == [[1, 34, 46]]  # 476 x 644 pixels
    assert DINOV2([image], max_pixels=200 * 196).grid_thw.tolist() == [[1, 12, 16]]
    assert DINOV2([image], min_pixels=1 << 20).grid_thw.tolist() == [[1, 64, 85]]


def test_dino_refuses_a_short_side_of_an_endless_image() -> None:
    with pytest.raises(ValueError, match=r"image 0: is 1x8000 pixels, and 256x2048000 when"):
        DINOV2([Image.new("RGB", (1, 8000))])
    with pytest.raises(ValueError, match=r"is 8000x1 .* and 2048000x256 when .* pass max_pixels"):
        DINOV2([Image.new("RGB", (8000, 1))])


@pytest.mark.parametrize("limits", [{}, {"max_pixels": 100_000}], ids=str)
@pytest.mark.parametrize("ours", [DINOV2, DINOV3], ids=["dinov2", "dinov3"])
def test_staged_dino_pixels_are_the_same_bits(
    ours: DinoPreprocessor, limits: dict[str, int]
) -> None:
    images = [*photographs()[:3], *of_random_sizes(5, 3)]
    bounds = Limits(*[limits.get(name) for name in Limits._fields])
    staged = ours.finish(ours.stage(images, [], bounds))
    called = ours(images, **limits)  # type: ignore[arg-type]  # one keyword
    assert torch.equal(staged.pixel_values, called.pixel_values)
    assert torch.equal(staged.grid_thw, called.grid_thw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": {"shortest_edge": 200}}, "crop_size=.* is over size="),
        ({"size": {"longest_edge": 256}}, "size={'longest_edge': 256} is not implemented"),
        ({"size": {"height": 256, "width": 256}}, "size=.* is not implemented"),
        ({"crop_size": {"height": 224}}, "crop_size={'height': 224} must be height and width"),
        ({"crop_size": 7}, "images of 7x7 pixels have no patch of 14x14"),
        ({"size": 224, "do_center_crop": False}, "size=224 is not implemented"),
        ({"image_processor_type": "ViTImageProcessor"}, "must be CLIPImageProcessor or Bit"),
        ({"resample": 0}, "resample=0 is not implemented"),
        ({"do_resize": False}, "do_resize=False is not implemented"),
    ],
)
def test_a_dinov2_file_that_cannot_be_followed_is_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DINOV2.with_files({"preprocessor_config": {**V2, **change}})
