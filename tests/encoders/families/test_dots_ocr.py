"""dots.ocr: pixels of its processor, which is Qwen2-VL's, and what its tower does not run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor

from encoders import DotsOCRConfig, DotsOCREncoder
from encoders.contract import Preprocessor
from tests.oracles import tiny
from tests.support.hub.checkpoints import edit_config
from tests.support.photographs import china
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder
from weights.published import family_facts

FILES = family_facts("dots_ocr").processors["dots-ocr"]
GOLDEN = {
    (1080, 1920): (1092, 1932),
    (224, 224): (224, 224),
    (480, 640): (476, 644),
    (4000, 3000): (3864, 2884),
    (10, 10): (56, 56),
    (100, 3000): (112, 2996),
}
"""Height and width of an image -> those to which the published processor resizes it."""


def ours() -> Preprocessor:
    encoder = tiny("dots_ocr")
    assert isinstance(encoder, DotsOCREncoder)
    return encoder.preprocessor.with_files(FILES)


def test_grids_of_golden_sizes() -> None:
    for size, (height, width) in GOLDEN.items():
        image = Image.fromarray(np.zeros((*size, 3), np.uint8))
        assert ours()([image]).grid_thw.tolist() == [[1, height // 14, width // 14]], size


def test_patches_of_images_are_those_of_the_processor() -> None:
    fields: dict[str, Any] = {**FILES["preprocessor_config"]}
    del fields["image_processor_type"]
    rng, processor = random.Random(0), Qwen2VLImageProcessor(**fields)
    sizes = [(rng.randint(8, 600), rng.randint(8, 600)) for _ in range(6)]
    for image in (china().resize(size) for size in sizes):
        wanted, got = processor([image], return_tensors="pt"), ours()([image])
        assert torch.equal(got.grid_thw, wanted["image_grid_thw"])
        assert (got.pixel_values - wanted["pixel_values"]).abs().max() <= 1 / 255 / 0.26 + 1e-6


def test_videos_are_refused() -> None:
    clip = torch.zeros(2, 3, 56, 56, dtype=torch.uint8)
    with pytest.raises(ValueError, match="takes only images: pass the frames of a video as images"):
        tiny("dots_ocr").encode(videos=[clip])


@pytest.mark.parametrize(
    "fields",
    [{"is_causal": True}, {"use_bias": True}, {"post_norm": False}, {"temporal_patch_size": 2}],
    ids=str,
)
def test_a_tower_that_runs_otherwise_is_refused(fields: dict[str, object]) -> None:
    (name,) = fields
    with pytest.raises(ValueError, match=f"config field {name}=.* is not implemented"):
        DotsOCRConfig.from_hf({"vision_config": fields})


def test_the_tower_of_dots3_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "dots_ocr", width=32, depth=1)
    edit_config(folder, lambda config: config.update(model_type="dots3_note"))
    with pytest.raises(CheckpointError, match=r"'dots3_note' is not supported: .*experts"):
        load_encoder(folder)
