"""Cosmos3-Edge: pixels of transformers' processors, and checkpoints of its model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.cosmos3_edge import (
    Cosmos3EdgeConfig,
    Cosmos3EdgeForConditionalGeneration,
)
from transformers.models.cosmos3_edge.image_processing_cosmos3_edge import (
    Cosmos3EdgeImageProcessor,
)
from transformers.models.cosmos3_edge.video_processing_cosmos3_edge import (
    Cosmos3EdgeVideoProcessor,
)

from encoders import Cosmos3EdgeEncoder
from encoders.inputs.intake import to_rgb
from tests.oracles import BY_NAME, distance, draw_weights
from tests.support.hub.checkpoints import edit_config
from tests.support.photographs import china, hopper
from vitgraph.seeded import write_seeded_checkpoint
from weights import inspect_checkpoint, load_encoder
from weights.published import family_facts

FILES = family_facts("cosmos3_edge").processors["cosmos3-edge"]
GOLDEN = {
    (1080, 1920): 2040,
    (224, 224): 64,
    (4000, 3000): 11750,
    (100, 3000): 282,
    (16, 2000): 125,
}
"""Height and width of an image, and its tokens by the processor of transformers 5.23.0."""
TINY = BY_NAME["cosmos3_edge"].tiny


def small() -> Cosmos3EdgeEncoder:
    family = BY_NAME["cosmos3_edge"]
    return Cosmos3EdgeEncoder(family.small_config())


def test_patches_of_images_are_those_of_the_processor() -> None:
    encoder = small()
    rules = encoder.preprocessor.with_files(FILES)
    images = [china().resize((300, 200)), hopper().resize((90, 700)), hopper().resize((20, 30))]
    wanted = Cosmos3EdgeImageProcessor()(images, return_tensors="pt")
    got = rules(images)
    assert torch.equal(got.pixel_values, wanted["pixel_values"])
    assert torch.equal(got.grid_thw, wanted["image_grid_thw"])
    assert torch.equal(encoder.preprocess(images).pixel_values, got.pixel_values)


@pytest.mark.parametrize(("size", "tokens"), GOLDEN.items(), ids=str)
def test_images_have_the_published_sizes(size: tuple[int, int], tokens: int) -> None:
    (grid,) = small().preprocess([Image.new("L", size[::-1])]).grid_thw.tolist()
    assert grid[1] * grid[2] // 4 == tokens


@pytest.mark.parametrize("frames", [1, 3])
def test_patches_of_clips_are_those_of_the_video_processor(frames: int) -> None:
    clip = [china().resize((100, 70)).rotate(turn) for turn in range(frames)]
    stacked = torch.stack([to_rgb(frame) for frame in clip])
    processor = Cosmos3EdgeVideoProcessor(do_sample_frames=False)
    wanted = processor([stacked], return_tensors="pt")
    got = small().preprocessor.with_files(FILES)(videos=[clip])
    assert torch.equal(got.pixel_values, wanted["pixel_values_videos"])
    assert torch.equal(got.grid_thw, wanted["video_grid_thw"])


def test_a_saved_model_of_transformers_loads_in_either_form(tmp_path: Path) -> None:
    """With its own names of layers, and with those that it takes from the language model."""
    vision = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4}
    text: dict[str, object] = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 32,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 2, 2],
    }
    config = Cosmos3EdgeConfig(
        vision_config={**vision, "num_hidden_layers": 2},
        text_config={**text, "pad_token_id": 0},
        projector_hidden_size=56,
    )
    model = draw_weights(Cosmos3EdgeForConditionalGeneration(config).eval())
    pixels, grid = torch.randn(40, 768), torch.tensor([[1, 4, 6], [1, 8, 2]])
    wanted = torch.cat(model.get_image_features(pixels, grid).pooler_output).detach()
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    layouts = []
    for name in ("saved", "own"):
        (tmp_path / name / "processor_config.json").write_text(
            json.dumps(FILES["processor_config"])
        )
        encoder = load_encoder(tmp_path / name, progress=False)
        layouts.append(inspect_checkpoint(tmp_path / name).layout)
        assert distance(encoder(pixels, grid).pooler_output, wanted) <= 1e-5
    assert layouts == ["cosmos3-edge-saved", "cosmos3-edge"]


def test_a_config_of_nvidia_states_the_merger_in_a_section(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "cosmos3_edge", width=64)
    wanted = load_encoder(folder).config
    width = wanted.projector_hidden_size  # type: ignore[attr-defined]

    def state(config: dict[str, object]) -> None:
        del config["projector_hidden_size"]
        config["projector_config"] = {"merger_intermediate_size": width}

    edit_config(folder, state)
    assert load_encoder(folder).config == wanted
    edit_config(folder, lambda config: config["projector_config"].update(use_postshuffle_norm=True))
    with pytest.raises(ValueError, match="use_postshuffle_norm"):
        load_encoder(folder)


def test_pixels_of_a_frame_lie_channel_by_channel() -> None:
    image = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    got = small().preprocess([image], min_pixels=1, max_pixels=4096).pixel_values
    first = torch.from_numpy(image[:16, :16].reshape(-1)) / 127.5 - 1
    assert torch.allclose(got[0], first, atol=1e-6)
