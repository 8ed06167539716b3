"""Images for SAM 3 have the pixels of transformers' processor."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers.models.sam3.image_processing_sam3 import Sam3ImageProcessor

from encoders.meta.sam3_pixels import Sam3Preprocessor
from tests.support.photographs import china, photographs
from weights.published import family_facts

FILES = family_facts("sam3").processors["sam3"]
SECTION: dict[str, Any] = dict(FILES["processor_config"]["image_processor"])  # type: ignore[call-overload]


@pytest.mark.parametrize("changes", [{}, {"resample": 3}, {"image_mean": [0.1, 0.2, 0.3]}], ids=str)
def test_views_are_those_of_the_processor(changes: dict[str, Any]) -> None:
    rng = random.Random(1)
    sizes = [(rng.randint(1, 700), rng.randint(1, 700)) for _ in range(6)]
    images = [*photographs()[:4], *(china().resize(size) for size in sizes)]
    section = {**SECTION, "size": {"height": 168, "width": 168}, **changes}
    wanted = Sam3ImageProcessor(**section)(images, return_tensors="pt")["pixel_values"]
    ours = Sam3Preprocessor(14, image_size=168).with_files({"preprocessor_config": section})
    got = ours(images)
    assert torch.equal(got.pixel_values, wanted)
    assert got.grid_thw.tolist() == [[1, 12, 12]] * 10


def test_a_bare_file_and_the_published_one_have_the_defaults() -> None:
    ours = Sam3Preprocessor(14, image_size=1008)
    assert ours.with_files(FILES) == ours.with_files({"preprocessor_config": {}}) == ours
    wanted = Sam3ImageProcessor()([china()], return_tensors="pt")["pixel_values"]
    assert torch.equal(ours([china()]).pixel_values, wanted)


def test_views_of_another_size_than_the_tower_s_are_refused() -> None:
    with pytest.raises(ValueError, match="the tower takes views of 168x168"):
        Sam3Preprocessor(14, image_size=168).with_files(FILES)


@pytest.mark.parametrize("step", [{"do_center_crop": True, "crop_size": 96}, {"do_pad": True}])
def test_a_step_that_changes_the_square_is_refused(step: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"=True is not implemented: it must be False"):
        Sam3Preprocessor(14, image_size=1008).with_files({"preprocessor_config": step})
