"""PaddleOCR-VL: its preprocessing, position taps, order of rows, decoys and strict loading."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import (
    PaddleOCRVLImageProcessor,
)

from encoders.baidu.paddleocr_vl import merge_order
from encoders.baidu.paddleocr_vl_pixels import RasterPreprocessor
from encoders.layers.table_taps import bilinear_taps
from tests.oracles import tiny
from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from tests.support.photographs import china, photographs
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

OURS = RasterPreprocessor.paddleocr_vl(patch_size=14, token_size=2)
TOWER = "visual.vision_model."


def test_pixels_and_grids_are_those_of_the_processor() -> None:
    rng = random.Random(0)
    sizes = [(rng.randint(1, 900), rng.randint(20, 900)) for _ in range(8)]
    sizes = [size for size in sizes if max(size) < 150 * min(size)]
    images = [*photographs(), *(china().resize(size) for size in [*sizes, (10, 10), (13, 200)])]
    wanted = PaddleOCRVLImageProcessor()(images, return_tensors="pt")
    got = OURS(images)
    assert torch.equal(got.grid_thw, wanted["image_grid_thw"])
    assert torch.equal(got.pixel_values, wanted["pixel_values"].flatten(1))


def test_the_file_sets_area_mean_and_std() -> None:
    section = {"min_pixels": 100_352, "max_pixels": 401_408, "image_mean": [0.5] * 3}
    wanted = PaddleOCRVLImageProcessor(**section)([china()], return_tensors="pt")
    got = OURS.with_files({"preprocessor_config": {**section, "merge_size": 2}})([china()])
    assert torch.equal(got.pixel_values, wanted["pixel_values"].flatten(1))
    with pytest.raises(ValueError, match="merge_size=1 but the tower has 2"):
        OURS.with_files({"preprocessor_config": {"merge_size": 1}})
    with pytest.raises(ValueError, match="this tower takes only images"):
        OURS([], [[china(), china()]])


@pytest.mark.parametrize("grid", [(2, 2), (27, 27), (6, 40), (60, 4), (13, 31)])
def test_taps_are_those_of_bilinear_interpolation(grid: tuple[int, int]) -> None:
    h, w = grid
    table = torch.randn(27, 27, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(h))
    cells = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    index, weight = bilinear_taps(cells, [(1, h, w)], 27, torch.float64)
    ours = (table.flatten(0, 1)[index] * weight[..., None]).sum(1)
    wanted = F.interpolate(table.permute(2, 0, 1)[None], size=grid, mode="bilinear")[0]
    torch.testing.assert_close(ours, wanted.flatten(1).T, rtol=0, atol=1e-12)


def test_tokens_take_their_patches_from_rows_of_the_image() -> None:
    order = merge_order([(1, 2, 4), (2, 2, 2)], 2, 18).tolist()
    assert order[:8] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert order[8:] == list(range(8, 18))


def test_maps_run_row_by_row() -> None:
    encoder, grids = tiny("paddleocr_vl"), [[1, 4, 6], [2, 2, 2]]
    codes = torch.arange(32.0)[:, None]
    first, second = encoder.feature_maps(codes, grids)
    assert torch.equal(first, codes[:24].view(1, 4, 6, 1))
    assert torch.equal(second, codes[24:].view(2, 2, 2, 1))
    assert encoder.feature_maps(codes[:8], grids)[0].shape == (1, 2, 3, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "paddle", "paddleocr_vl", width=64)


def test_decoys_are_left_alone_by_name(folder: Path, hub: HubServer, cache: Path) -> None:
    hub.push(REPO, folder)
    fetched = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert all(torch.isfinite(value).all() for value in fetched.state_dict().values())
    for decoy in ("head.probe2", "head.extra.weight", "packing_position_embedding.weight"):
        edit_tensors(folder, lambda t, name=TOWER + decoy: t.update({name: torch.zeros(2)}))
        with pytest.raises(CheckpointError, match=rf"unexpected \(1\): {TOWER}{decoy}"):
            load_encoder(folder)
        edit_tensors(folder, lambda t, name=TOWER + decoy: t.pop(name))


def test_a_config_with_a_text_section_or_few_fields_loads(folder: Path) -> None:
    whole = load_encoder(folder)

    def nest(config: dict[str, Any]) -> None:
        config["text_config"] = {"hidden_size": config.pop("hidden_size")}
        keep = ("model_type", "num_attention_heads", "image_size")
        config["vision_config"] = {key: config["vision_config"][key] for key in keep}

    edit_config(folder, nest)
    found = load_encoder(folder)
    assert same_weights(found, whole)
    assert found.config == whole.config
