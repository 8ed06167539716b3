"""LFM2-VL: tiles and pixels of transformers' processor, items of tiles and image, loading."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

from encoders import Lfm2VLEncoder
from encoders.inputs.sizes import best_tiling
from encoders.lfm.lfm2_vl_pixels import PatchTilesPreprocessor
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, build_pair, distance, distances
from tests.oracles.references.lfm2_vl import lfm2_output
from tests.support.hub.checkpoints import edit_config
from tests.support.photographs import china, hopper, photographs
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder
from weights.published import family_facts

SECTION = family_facts("lfm2_vl").processors["lfm2-vl"]["processor_config"]["image_processor"]
GOLDEN = [
    ((1080, 1920), (4, 2), (24, 42)),
    ((480, 640), (1, 1), (26, 36)),
    ((4000, 3000), (2, 3), (36, 26)),
    ((10, 10), (1, 1), (16, 16)),
    ((20, 3000), (1, 1), (2, 188)),
]
"""Height and width of an image, and of transformers 5.23.0 the tiles and the whole image's grid."""
IMAGES = [china().resize((900, 640)), hopper().resize((200, 90)), hopper().resize((600, 1200))]


def published(**changes: Any) -> tuple[PatchTilesPreprocessor, Lfm2VlImageProcessor]:
    """Our preprocessor and transformers', with values of the published file changed."""
    section = {**SECTION, **changes}
    files = {"processor_config": {"image_processor": section}}
    return PatchTilesPreprocessor().with_files(files), Lfm2VlImageProcessor(**section)


def test_tiles_and_sizes_are_the_published_ones_unless_a_call_bounds_them() -> None:
    ours = PatchTilesPreprocessor()
    for size, tiling, whole in GOLDEN:
        inputs = ours([Image.new("RGB", size[::-1])])
        assert inputs.tiles == [(*tiling, tiling != (1, 1))]
        assert inputs.grid_thw.tolist() == [[1, *whole]]
    assert ours([IMAGES[0]], max_tiles=2).tiles == [(2, 1, True)]
    small = ours([IMAGES[0]], min_pixels=1024, max_pixels=64 * 1024, max_tiles=1)
    assert small.tiles == [(1, 1, False)]
    assert small.grid_thw.prod() <= 64 * 4


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_soft_tokens": 280}, "=280: .* no such limit; pass min_pixels, max_pixels or max_t"),
        ({"max_pixels": -5}, "max_pixels=-5: must be a positive integer"),
        ({"min_pixels": "9"}, "min_pixels='9': must be a positive integer"),
        ({"fps": 2.0}, "fps=2.0: this tower takes only images"),
    ],
)
def test_limits_of_no_meaning_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatchTilesPreprocessor()(IMAGES, **limits)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"min_tiles": 1, "resample": 3, "use_thumbnail": False},
        {"do_image_splitting": False},
        {"tile_size": 64, "min_image_tokens": 9, "max_image_tokens": 40, "max_tiles": 5},
    ],
    ids=str,
)
def test_pixels_are_those_of_the_processor(changes: dict[str, Any]) -> None:
    rng, (ours, theirs) = random.Random(str(changes)), published(**changes)
    drawn = [china().resize((rng.randint(1, 1500), rng.randint(1, 1500))) for _ in range(6)]
    for image in [*photographs()[:4], *drawn, hopper().resize((900, 900))]:
        wanted, inputs = theirs([image], return_tensors="pt"), ours([image])
        parts = [inputs.paths[name] for name in ("tiles", "image")]
        grids = [grid for part in parts for grid in part.grid_thw.tolist()]
        assert [[h, w] for t, h, w in grids for _ in range(t)] == wanted["spatial_shapes"].tolist()
        rows = wanted["pixel_values"][wanted["pixel_attention_mask"].bool()]
        assert torch.equal(torch.cat([part.pixel_values for part in parts]), rows)


def test_images_near_the_limit_of_tiling_are_cut_as_by_the_processor() -> None:
    rng, side, area = random.Random(500), 64, 2 * 16 * 32**2
    ours, theirs = published(tile_size=side, min_image_tokens=4, max_image_tokens=16)
    images = []
    for _ in range(500):
        width = rng.randint(60, 500)
        images.append(Image.new("RGB", (width, round(area * rng.uniform(0.9, 1.1) / width))))
    inputs, counts = ours(images), []
    tiles, wholes = (inputs.paths[name].grid_thw.tolist() for name in ("tiles", "image"))
    for image, (columns, rows, thumbnail) in zip(images, inputs.tiles, strict=True):
        wanted = theirs([image], return_tensors="pt", return_row_col_info=True)
        assert [*wanted["image_rows"], *wanted["image_cols"]] == [rows, columns], image.size
        shapes = [tiles.pop(0)] if thumbnail else []
        counts.append(len(shapes))
        shapes.append(wholes.pop(0))
        expected = [[h, w] for t, h, w in shapes for _ in range(t)]
        assert expected == wanted["spatial_shapes"].tolist(), image.size
    assert 100 < sum(counts) < 400


@pytest.mark.parametrize("least", [1, 2])
def test_an_image_between_two_tilings_gets_that_of_the_processor(least: int) -> None:
    grids = (processor := Lfm2VlImageProcessor())._target_ratios(least, 10)
    for (a, b), (c, d) in product(grids, grids):
        width, height = 60 * (a * d + c * b), 120 * b * d  # the mean of both shapes
        theirs = processor._get_grid_layout(height, width, least, 10, 512)[:2]
        assert best_tiling(width, height, least, 10, 512) == theirs


def test_files_are_read_strictly_and_those_of_the_first_repos_together() -> None:
    flat = {"tile_size": 256, "max_tiles": 4, "use_thumbnail": False, "encoder_patch_size": 16}
    other = {"image_processor_type": "Siglip2ImageProcessor", "do_resize": False, "patch_size": 16}
    files = {"processor_config": flat, "preprocessor_config": {**other, "image_mean": [0.4] * 3}}
    ours = PatchTilesPreprocessor().with_files(files)
    assert (ours.tile_size, ours.max_tiles, ours.use_thumbnail) == (256, 4, False)
    assert ours.mean == (0.4, 0.4, 0.4)
    for change, message in (
        ({"tile_size": 500}, "tile_size=500 must be a multiple of 32"),
        ({"max_pixels_tolerance": 1.5}, "max_pixels_tolerance=1.5 is not implemented"),
    ):
        with pytest.raises(ValueError, match=message):
            published(**change)


@cache
def pair() -> tuple[Lfm2VLEncoder, Any]:
    """A small encoder and transformers' tower and projector, with the same weights."""
    tower, reference = build_pair(BY_NAME["lfm2_vl"], BY_NAME["lfm2_vl"].tiny)
    encoder = Lfm2VLEncoder(tower.config)
    encoder.load_state_dict(tower.state_dict())
    return encoder.eval().requires_grad_(False), reference


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("thumbnail", [True, False])
def test_an_item_is_its_tiles_then_the_whole_image_as_in_transformers(thumbnail: bool) -> None:
    encoder, reference = pair()
    encoder.preprocessor, theirs = published(use_thumbnail=thumbnail)
    fast = encoder.accelerated()
    graphed = GraphedEncoder(encoder, {"image": [512, 1536], "tiles": [1536]}, backend="static")
    results = [form.encode(IMAGES) for form in (encoder, fast, graphed)]
    for image, output, *others in zip(IMAGES, *results, strict=True):
        wanted = theirs([image], return_tensors="pt")
        grids = torch.nn.functional.pad(wanted["spatial_shapes"], (1, 0), value=1)
        rows = wanted["pixel_values"][wanted["pixel_attention_mask"].bool()]
        assert max(distances(output, lfm2_output(reference, rows, grids)).values()) <= 1e-5
        for other in others:
            assert distance(other.pooler_output, output.pooler_output) <= 2e-6
    assert [choice["layers_called"] for choice in fast.kernel_choices().values()] == [0, 0]
    inputs = encoder.preprocess(IMAGES)
    assert inputs.tiles == [(3, 2, thumbnail), (1, 1, False), (1, 2, thumbnail)]
    maps = encoder.feature_maps(results[0], inputs)
    assert maps[0]["tiles" if thumbnail else "image"].shape == (1, 64, 96, 64)
    assert maps[2]["tiles" if thumbnail else "image"].shape == (1, 64, 32, 64)
    assert [len(item) for item in maps] == [1 + thumbnail, 1, 1 + thumbnail]
    with pytest.raises(ValueError, match=r"item 0 has \d views in path 'tiles' and"):
        encoder(inputs._replace(tiles=[(5, 2, flag) for _, _, flag in inputs.tiles]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer=-2 is not implemented"),
        ({"model_type": "lfm3_vl"}, "'lfm3_vl' is not supported: its tower has gated"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_seeded_checkpoint(tmp_path, "lfm2_vl", width=64)
    assert load_encoder(folder).config.projector_norm
    edit_config(folder, lambda config: config.update(change))
    with pytest.raises(CheckpointError, match=message):
        load_encoder(folder)
