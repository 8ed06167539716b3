"""Granite for Docling: tiles and pixels of transformers' processor, the fine route, loading."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.granite_docling.image_processing_granite_docling import (
    GraniteDoclingImageProcessor,
)

from encoders.ibm.granite_docling_pixels import PagePreprocessor
from tests.oracles import BY_NAME, NO_LIFT, LiftFloat32, build_pair, distance, draw_pixels
from tests.oracles.references.granite_docling import granite_docling_output
from tests.support.hub.checkpoints import edit_config, edit_tensors
from tests.support.photographs import china, photographs
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

CLIP = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


def section(tile: int, **more: Any) -> dict[str, Any]:
    return {"size": {"height": tile, "width": tile}, **CLIP, "resample": 3, **more}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"min_patches": 2, "max_patches": 6},
        {"max_patches": 64},
        {"crop_to_patches": False},
        {"max_patches": 1},
    ],
    ids=str,
)
def test_tiles_are_those_of_the_processor(more: dict[str, Any]) -> None:
    rng = random.Random(3)
    drawn = [china().resize((rng.randint(8, 400), rng.randint(8, 400))) for _ in range(4)]
    thin = [china().resize(size) for size in ((1500, 20), (20, 1500), (64, 64), (10, 10))]
    file = section(64, **more)
    ours = PagePreprocessor(16, image_size=64).with_files({"preprocessor_config": file})
    reference = GraniteDoclingImageProcessor(**file)
    for image in [*photographs()[:2], *drawn, *thin]:
        wanted = reference([image], return_tensors="pt")
        got = ours([image])
        assert torch.equal(got.pixel_values, wanted["pixel_values"][0])
        rows, columns = wanted["rows"][0][0], wanted["cols"][0][0]
        assert got.tiles == [(columns, rows, rows * columns > 1)]


def test_a_call_bounds_the_tiles_of_a_page() -> None:
    ours = PagePreprocessor(16, image_size=64)
    assert ours([china()], max_tiles=1).tiles == [(1, 1, False)]
    ((columns, rows, whole),) = ours([china()], max_tiles=4).tiles or []
    assert whole
    assert columns * rows <= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense_max_patches": 48}, "dense_max_patches=48 is not implemented"),
        ({"size": {"height": 80, "width": 80}}, "but the tower takes views of 64x64"),
        ({"min_patches": 9, "max_patches": 4}, "min_tiles at most max_tiles"),
    ],
)
def test_a_file_is_read_strictly(change: dict[str, Any], message: str) -> None:
    ours = PagePreprocessor(16, image_size=64)
    with pytest.raises(ValueError, match=message):
        ours.with_files({"preprocessor_config": section(64, **change)})


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("side", [(8, 8), (4, 12), (6, 2)])
def test_the_fine_route_is_that_of_transformers(
    dtype: torch.dtype, within: float, side: tuple[int, int]
) -> None:
    family = BY_NAME["granite_docling"]
    encoder, reference = build_pair(family, family.tiny, dtype)
    fine = encoder.at_route("fine")  # type: ignore[operator]
    grid = [[2, *side], [1, *side]]
    pixels = draw_pixels(encoder, grid, dtype=dtype)
    ours = fine(pixels, grid)
    with LiftFloat32() if dtype == torch.float64 else NO_LIFT:
        theirs = granite_docling_output(reference, pixels, torch.tensor(grid), fine=True)
    assert len(ours.pooler_output) == 3 * side[0] * side[1]
    for got, wanted in zip(
        [ours.pooler_output, *ours.deepstack_features],
        [theirs.pooler_output, *(theirs.deepstack_features or ())],
        strict=True,
    ):
        assert distance(got, wanted) <= within
    assert [spec.output_tokens for spec in fine.item_specs(grid)] == [
        4 * spec.output_tokens for spec in encoder.item_specs(grid)
    ]


def test_a_connector_without_the_fine_route_loads(tmp_path: Path) -> None:
    """As in the checkpoint of 2B, whose config says so; else the tensors do."""
    folder = write_seeded_checkpoint(tmp_path, "granite_docling", width=64)
    edit_tensors(folder, lambda t: [t.pop(name) for name in list(t) if ".fine." in name])
    with pytest.raises(CheckpointError, match=r"connector\.fine"):
        load_encoder(folder)
    edit_config(folder, lambda config: config["vision_config"].update(use_fine_route=False))
    encoder = load_encoder(folder)
    with pytest.raises(ValueError, match="route='fine': the connector of this checkpoint has"):
        encoder.at_route("fine")  # type: ignore[operator]
    edit_config(folder, lambda config: config["vision_config"].pop("use_fine_route"))
    assert load_encoder(folder).config == encoder.config


def test_a_video_is_refused_by_name(tmp_path: Path) -> None:
    encoder = load_encoder(write_seeded_checkpoint(tmp_path, "granite_docling", width=64))
    with pytest.raises(ValueError, match="only images"):
        encoder.preprocess(videos=[[china(), china()]])
