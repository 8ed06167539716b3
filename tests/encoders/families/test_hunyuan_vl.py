"""HunyuanOCR: pixels of its processor, learned tokens among those of an image, and its configs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.hunyuan_vl.configuration_hunyuan_vl import HunYuanVLVisionConfig
from transformers.models.hunyuan_vl.image_processing_hunyuan_vl import HunYuanVLImageProcessor

from encoders import HunyuanVLConfig, HunyuanVLEncoder
from encoders.contract import Preprocessor
from graphwrap import GraphedEncoder
from tests.oracles import distance, draw_pixels, tiny
from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from tests.support.photographs import china
from vitgraph.integrations.export import export_program
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder
from weights.published import family_facts

FILES = family_facts("hunyuan_vl").processors["hunyuan-vl"]
GOLDEN = {
    (1080, 1920): (1088, 1920, 2076),
    (224, 224): (512, 512, 274),
    (10, 10): (512, 512, 274),
    (480, 640): (480, 640, 317),
    (4000, 3000): (2336, 1760, 4090),
    (100, 3000): (96, 3008, 287),
    (1000, 1000): (992, 992, 994),
}
"""Height and width of an image -> those that the published processor resizes it to, and tokens."""


def ours() -> Preprocessor:
    return tiny("hunyuan_vl").preprocessor.with_files(FILES)


def test_grids_and_tokens_of_golden_sizes() -> None:
    for size, (height, width, tokens) in GOLDEN.items():
        grids = ours()([Image.fromarray(np.zeros((*size, 3), np.uint8))]).grid_thw
        assert grids.tolist() == [[1, height // 16, width // 16]], size
        assert tiny("hunyuan_vl").item_specs(grids)[0].output_tokens == tokens, size


def test_patches_are_those_of_the_processor() -> None:
    fields: dict[str, Any] = {**FILES["preprocessor_config"]}
    del fields["image_processor_type"]
    rng, processor = random.Random(0), HunYuanVLImageProcessor(**fields)
    sizes = [(rng.randint(8, 900), rng.randint(8, 900)) for _ in range(4)]
    for image in (china().resize(size) for size in sizes):
        wanted, got = processor([image], return_tensors="pt"), ours()([image])
        assert torch.equal(got.grid_thw, wanted["image_grid_thw"])
        assert (got.pixel_values - wanted["pixel_values"]).abs().max() <= 1 / 255 / 0.26 + 1e-6


def test_videos_are_refused() -> None:
    clip = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="takes only images: pass the frames of a video as images"):
        tiny("hunyuan_vl").encode(videos=[clip])


def tokens_of(grids: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
    """Encode random patches; return all tokens, and those of each item without learned ones.

    The learned ones are at the start and the end of a frame, and behind each row of it.
    """
    encoder = tiny("hunyuan_vl")
    tokens = encoder(draw_pixels(encoder, grids), grids).pooler_output
    cells, place = [], 0
    for t, h, w in grids:
        frames = []
        for _ in range(t):
            lines = tokens[place + 1 : place + 1 + h // 2 * (w // 2 + 1)]
            frames.append(lines.view(h // 2, w // 2 + 1, -1)[:, :-1])
            place += len(lines) + 2
        cells.append(torch.stack(frames))
    assert place == len(tokens)
    return tokens, cells


GRIDS = [[1, 4, 6], [2, 2, 4], [1, 2, 2], [1, 6, 2]]


def test_maps_leave_out_the_learned_tokens() -> None:
    tokens, cells = tokens_of(GRIDS)
    maps = tiny("hunyuan_vl").feature_maps(tokens, GRIDS)
    assert all(torch.equal(*pair) for pair in zip(maps, cells, strict=True))


def test_maps_of_one_cell_are_told_by_their_width() -> None:
    encoder = tiny("hunyuan_vl")
    tokens, [cell] = tokens_of([[1, 2, 2]])
    [token_map] = encoder.feature_maps(tokens, [[1, 2, 2]])
    assert torch.equal(token_map, cell)
    [patch_map] = encoder.feature_maps(torch.randn(4, encoder.config.hidden_size), [[1, 2, 2]])
    assert patch_map.shape[:3] == (1, 2, 2)


def test_every_image_has_the_same_learned_tokens() -> None:
    tokens, _ = tokens_of([[1, 2, 4], [1, 4, 2]])
    first, second = tokens.split([5, 6])
    begin, *_, newline, end = first
    learned = torch.stack([begin, newline, newline, end])
    assert torch.equal(second[[0, 2, 4, 5]], learned)


@pytest.mark.parametrize("tokens", [1, 4, 5, 64, 274, 1000])
def test_a_grid_for_tokens_makes_just_as_many(tokens: int) -> None:
    encoder = tiny("hunyuan_vl")
    [spec] = encoder.item_specs([encoder.grid_for(tokens)])
    assert spec.output_tokens == max(tokens, 4)


def test_graphs_hold_more_tokens_of_fewer_patches() -> None:
    encoder = tiny("hunyuan_vl")
    graphed = GraphedEncoder(encoder, backend="static", budgets=[129, 130], max_batch_size=8)
    for grids in ([[1, 16, 14]], [[1, 2, 252]], [[1, 30, 2]] * 2, [[1, 2, 2]] * 8):
        pixels = draw_pixels(encoder, grids)
        got, wanted = graphed(pixels, grids).pooler_output, encoder(pixels, grids).pooler_output
        assert got is not None
        assert distance(got, wanted) <= 2e-6, grids
    assert graphed.stats().to_dict()["eager_calls"] == 0


@pytest.mark.slow
def test_a_program_for_images_of_any_size_returns_learned_tokens() -> None:
    encoder = tiny("hunyuan_vl")
    run = export_program(encoder).module()
    pixels, metadata = draw_pixels(encoder, GRIDS), encoder.prepare_encoder_metadata(GRIDS)
    del metadata["max_seqlen"]
    wanted = encoder(pixels, GRIDS).pooler_output
    torch.testing.assert_close(run(pixels, metadata)["pooler_output"], wanted)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path, "hunyuan_vl", width=64, depth=1)


def test_a_flat_config_loads(folder: Path) -> None:
    whole = load_encoder(folder)
    assert isinstance(whole, HunyuanVLEncoder)

    def flatten(config: dict[str, Any]) -> None:
        config["hidden_size"] = config.pop("text_config")["hidden_size"]
        keep = ("num_attention_heads", "max_image_size", "spatial_merge_size")
        config["vision_config"] = {key: config["vision_config"][key] for key in keep}

    edit_config(folder, flatten)
    found = load_encoder(folder)
    assert same_weights(found, whole)
    assert found.config == whole.config


def test_the_separator_that_no_forward_reads_is_ignored_by_name(folder: Path) -> None:
    whole = load_encoder(folder)
    edit_tensors(folder, lambda t: t.update({"vit.perceive.image_sep": torch.zeros(96)}))
    assert same_weights(load_encoder(folder), whole)


def test_the_aliases_of_transformers_are_followed() -> None:
    fields = {"attention_heads": 8, "layer_norm_eps": 1e-3}
    theirs = HunYuanVLVisionConfig.from_dict(dict(fields))
    ours = HunyuanVLConfig.from_hf({"vision_config": fields, "text_config": {"hidden_size": 64}})
    assert ours.num_heads == theirs.num_attention_heads == 8
    assert ours.layer_norm_eps == theirs.rms_norm_eps == 1e-3


@pytest.mark.parametrize(
    "fields",
    [
        {"interpolate_mode": "bicubic"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"spatial_merge_size": 4},
        {"temporal_patch_size": 2},
        {"head_dim": 64},
    ],
    ids=str,
)
def test_a_tower_that_runs_otherwise_is_refused(fields: dict[str, object]) -> None:
    (name,) = fields
    with pytest.raises(ValueError, match=f"config field {name}=.* is not implemented"):
        HunyuanVLConfig.from_hf({"vision_config": fields, "text_config": {"hidden_size": 64}})


def test_the_tower_of_hy4_is_refused_by_name(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(model_type="hy_v4_vl"))
    with pytest.raises(CheckpointError, match=r"'hy_v4_vl' is not supported: .*newlines"):
        load_encoder(folder)
