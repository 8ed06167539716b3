"""Images for CLIP have the sizes and pixels of transformers' processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.clip.image_processing_clip import CLIPImageProcessor

from encoders.clip.clip_pixels import CentreCropPreprocessor
from encoders.inputs.sizes import fit_short_side
from tests.support.photographs import china, hopper, of_random_sizes, photographs
from weights.published import family_facts

GOLDEN = {
    (1080, 1920): ((224, 398), (336, 597)),
    (480, 640): ((224, 298), (336, 448)),
    (4000, 3000): ((298, 224), (448, 336)),
    (331, 500): ((224, 338), (336, 507)),
    (225, 337): ((224, 335), (336, 503)),
    (20, 3000): ((224, 33600), (336, 50400)),
}
"""Heights and widths of images, and what transformers 5.24.0 resizes them to, for 224 and 336."""
FILES = family_facts("llava").processors["llava"]
SQUARE = {"height": 112, "width": 112}
SECTIONS = (
    {"size": 112, "crop_size": 112},
    {"size": {"shortest_edge": 112}, "crop_size": SQUARE},
    {"size": {"shortest_edge": 131}, "crop_size": SQUARE, "resample": 2},
    {"size": SQUARE, "crop_size": SQUARE},
    {"size": SQUARE, "do_center_crop": False},
)


def test_the_short_side_is_resized_as_published() -> None:
    for (height, width), wanted in GOLDEN.items():
        assert tuple(fit_short_side(height, width, side) for side in (224, 336)) == wanted


@pytest.mark.parametrize("section", SECTIONS, ids=str)
@pytest.mark.parametrize("patch", [14, 16, 32])
def test_views_are_those_of_the_processor(patch: int, section: dict[str, Any]) -> None:
    images = [*photographs()[:4], *of_random_sizes(patch, 8)]
    wanted = CLIPImageProcessor(**section)(images, return_tensors="pt")["pixel_values"]
    ours = CentreCropPreprocessor(patch, image_size=112)
    got = ours.with_files({"preprocessor_config": section})(images)
    cut = 112 // patch * patch
    assert torch.equal(got.pixel_values, wanted[:, :, :cut, :cut])
    assert got.grid_thw.tolist() == [[1, cut // patch, cut // patch]] * 12


def test_a_long_and_narrow_image_keeps_its_middle() -> None:
    images = [china().resize((900, 7)), china().resize((3, 500)), china().resize((1, 1))]
    wanted = CLIPImageProcessor(**SECTIONS[0])(images, return_tensors="pt")["pixel_values"]
    ours = CentreCropPreprocessor(14, image_size=112)
    assert torch.equal(ours(images).pixel_values, wanted)
    with pytest.raises(ValueError, match=r"image 0: is 30000x1 pixels, .* crop the image"):
        ours([hopper().resize((30000, 1))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 224}, r"size=224 and crop_size=336 but the tower takes views of 336x336"),
        ({"crop_size": 224}, r"size=336 and crop_size=224"),
        ({"size": {"height": 336, "width": 336}, "crop_size": 224}, r"and crop_size=224 but"),
        ({"size": {"shortest_edge": 336, "longest_edge": 400}}, "longest_edge"),
        ({"do_center_crop": False}, "do_center_crop=False is not implemented"),
        ({"resample": 0}, "resample=0 is not implemented: it must be 1, 2 or 3"),
        ({"do_pad": True}, "do_pad=True is not implemented"),
        ({"image_processor_type": "SiglipImageProcessor"}, "must be CLIPImageProcessor or Bit"),
        ({"image_processor_type": "ViTImageProcessorFast"}, "must be CLIPImageProcessor or Bit"),
    ],
    ids=str,
)
def test_a_file_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    section = {**FILES["preprocessor_config"], **change}
    with pytest.raises(ValueError, match=message):
        CentreCropPreprocessor(14, image_size=336).with_files({"preprocessor_config": section})
