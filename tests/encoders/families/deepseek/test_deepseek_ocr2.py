"""DeepSeek-OCR-2 beside transformers: sequences, attention, fused blocks, views and configs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoders import DeepseekOCR2Config, DeepseekOCR2Encoder
from encoders.deepseek.deepseek_ocr_pixels import OcrPreprocessor
from graphwrap import GraphedEncoder
from tests.oracles import NO_LIFT, LiftFloat32, distance, distances, draw_pixels
from tests.oracles.references.deepseek import ocr2_output
from tests.support.photographs import china
from tests.support.towers.deepseek import (
    OCR_TILES,
    build,
    build_reference,
    draw_inputs,
    tiny_config,
    tokens_of,
)
from vitgraph.analysis.attention import maps_of_inputs
from weights.published import family_facts

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
OURS, THEIRS = (model.config for model in family_facts("deepseek_ocr2").published)
PIXELS = OcrPreprocessor(16, tile_size=768)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_ocr2_sequences_match_transformers(dtype: torch.dtype) -> None:
    """Tiles, whole image and separator, as its DeepseekOcr2Model puts them together."""
    encoder = build("deepseek_ocr2", dtype)
    lift: Any = LiftFloat32() if dtype == torch.float64 else NO_LIFT
    reference = build_reference("deepseek_ocr2", encoder, dtype, lift)
    inputs = draw_inputs(encoder, OCR_TILES, dtype)
    with lift:
        image = ocr2_output(reference, inputs.pixel_values, inputs.grid_thw)
        (pixels, grid_thw, users) = inputs.paths["tiles"]
        tiles = ocr2_output(reference, pixels, grid_thw)
    for field, end in (("pooler_output", [reference.separator[None]]), ("last_hidden_state", [])):
        whole = getattr(image, field).flatten(0, -2).chunk(len(OCR_TILES))
        local = getattr(tiles, field).flatten(0, -2)
        parts = dict(zip(users, local.split((grid_thw[:, 0] * 9).tolist()), strict=True))
        for item, output in enumerate(encoder(inputs)):
            theirs = torch.cat([*parts.get(item, local[:0])[None], whole[item], *end])
            assert distance(getattr(output, field), theirs) <= BOUNDS[dtype]


def test_attention_maps_are_those_of_eager_attention() -> None:
    """Of cells among cells, and, by queries="cls", of the learned queries on the cells."""
    encoder = build("deepseek_ocr2").paths["image"]
    reference: Any = build_reference("deepseek_ocr2", encoder)
    stack = reference["tower"].vision_encoder
    stack.config._attn_implementation = "eager"
    kept: list[torch.Tensor] = []
    for layer in stack.layers:
        layer.self_attn.register_forward_hook(lambda module, args, out: kept.append(out[1]))
    grids = [[2, 16, 16]]
    pixels = draw_pixels(encoder, grids)
    ocr2_output(reference, pixels, torch.tensor(grids))
    (inputs,) = [draw_inputs(build("deepseek_ocr2"), [(1, 1, False)])]
    inputs = inputs._replace(pixel_values=pixels, grid_thw=torch.tensor(grids), other_paths={})
    for queries, rows in ((None, slice(0, 16)), ("cls", slice(16, 32))):
        (found,) = maps_of_inputs(encoder, inputs, blocks=None, queries=queries, heads="all")
        for ours, weights in zip(found, kept, strict=True):
            wanted = weights[:, :, rows, :16].sum(2).movedim(0, 1) / (2 * 16)
            assert (ours - wanted.unflatten(-1, (4, 4))).abs().max() <= 1e-6


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("path", ["image", "tiles"])
@torch.no_grad()
def test_fused_blocks_over_cells_and_queries_agree(path: str) -> None:
    encoder = build("deepseek_ocr2").paths[path]
    grids = [[2, *encoder.grid_for(1)[1:]]]
    pixels, fast = draw_pixels(encoder, grids), encoder.accelerated()
    assert max(distances(fast(pixels, grids), encoder(pixels, grids)).values()) <= 1e-5
    choices = fast.kernel_choices()
    assert (choices["reference_because"], choices["layers_called"]) == (None, 3)  # those of SAM
    again = encoder.accelerated()
    again.load_kernel_choices(choices)
    assert torch.equal(again(pixels, grids).pooler_output, fast(pixels, grids).pooler_output)


def test_static_graphs_return_what_the_encoder_does() -> None:
    encoder = build("deepseek_ocr2")
    inputs = draw_inputs(encoder, OCR_TILES)
    graphed = GraphedEncoder(encoder, backend="static", max_graphs=2)
    assert distance(tokens_of(graphed(inputs)), tokens_of(encoder(inputs))) <= 2e-6
    assert graphed.stats().eager_items == 0


@pytest.mark.parametrize("grid", [[1, 8, 8], [1, 20, 20]])
def test_a_view_without_queries_is_refused(grid: list[int]) -> None:
    tower = build("deepseek_ocr2").paths["image"]
    message = r"cells, and this tower has queries for 16 or 9: pass views of 256x256 or 192x192"
    with pytest.raises(ValueError, match=message):
        tower.prepare_encoder_metadata([grid])
    metadata = tower.prepare_encoder_metadata([[1, 16, 16]])
    with pytest.raises(ValueError, match=message):
        tower(draw_pixels(tower, [grid]), encoder_metadata=metadata)


def test_both_published_configs_describe_one_tower() -> None:
    ours, theirs = map(DeepseekOCR2Config.from_hf, (OURS, THEIRS))
    assert ours == theirs
    assert ours.queries == {"image": 256, "tiles": 144}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name": "deeplip_b_l"}, "model_name='deeplip_b_l' is not implemented"),
        ({"width": {}}, "must describe 'sam_vit_b' and 'qwen2-0-5b'"),
        ({"image_size": 1000}, "image_size=1000 must be a multiple"),
    ],
    ids=str,
)
def test_a_config_of_another_tower_is_refused(changes: dict[str, Any], message: str) -> None:
    config = tiny_config("deepseek_ocr2")
    with pytest.raises(ValueError, match=message):
        DeepseekOCR2Config.from_hf({**config, "vision_config": config["vision_config"] | changes})


GOLDEN = {
    (640, 480): (0, 257),
    (768, 768): (0, 257),
    (1920, 1080): (2, 545),
    (3000, 4000): (6, 1121),
    (3000, 300): (6, 1121),
    (100, 769): (6, 1121),
}
"""Width and height of an image -> tiles and tokens, made with transformers 5.24.0."""


@pytest.mark.parametrize("size", GOLDEN)
def test_an_image_makes_the_published_tiles_and_tokens(size: tuple[int, int]) -> None:
    with torch.device("meta"):
        encoder = DeepseekOCR2Encoder(DeepseekOCR2Config.from_hf(OURS))
    ((columns, rows, tiled),) = encoder.preprocess([Image.new("RGB", size)]).tiles or []
    tiles = columns * rows * tiled
    assert (tiles, 144 * tiles + 257) == GOLDEN[size]


def test_the_processor_file_of_transformers_is_read() -> None:
    from transformers.models.deepseek_ocr2 import DeepseekOcr2ImageProcessor

    theirs = {**DeepseekOcr2ImageProcessor().to_dict(), "resample": 3}  # a number, as in files
    followed = replace(PIXELS, as_transformers=True)
    assert PIXELS.with_files({"preprocessor_config": theirs}) == followed
    fewer = PIXELS.with_files({"preprocessor_config": {**theirs, "max_patches": 4}})
    assert fewer.max_tiles == 4
    with pytest.raises(ValueError, match=r"tile_size=640 is not implemented: it must be 768"):
        PIXELS.with_files({"preprocessor_config": {**theirs, "tile_size": 640}})
    with pytest.raises(ValueError, match=r"tile_size=640 is not implemented: it must be 768"):
        PIXELS.with_files(
            {"preprocessor_config": {"image_processor_type": "UnlimitedOcrImageProcessor"}}
        )
    with pytest.raises(ValueError, match=r"the tower takes views of 1024x1024"):
        PIXELS.with_files({"preprocessor_config": {**theirs, "size": 512}})


def test_ocr2_padding_of_a_file_of_transformers_is_grey_whatever_the_mean() -> None:
    from transformers.models.deepseek_ocr2 import DeepseekOcr2ImageProcessor

    section = {"image_mean": [0.1, 0.2, 0.3]}
    theirs = DeepseekOcr2ImageProcessor(**section)([china()], return_tensors="pt")
    named = {"image_processor_type": "DeepseekOcr2ImageProcessor", **section}
    ours = PIXELS.with_files({"preprocessor_config": named})([china()])
    torch.testing.assert_close(ours.pixel_values, theirs["pixel_values"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [(1280, 853), (700, 500), (800, 1600)])
def test_ocr2_pixels_of_a_file_of_transformers_are_its_classes(size: tuple[int, int]) -> None:
    from transformers.models.deepseek_ocr2 import DeepseekOcr2ImageProcessor

    image = china().resize(size, Image.Resampling.BICUBIC)
    theirs = DeepseekOcr2ImageProcessor()([image], return_tensors="pt")
    ours = replace(PIXELS, as_transformers=True)([image])
    exact: dict[str, float] = {"rtol": 0, "atol": 1e-5}  # normalised in another order
    torch.testing.assert_close(ours.pixel_values, theirs["pixel_values"], **exact)
    if theirs["num_local_patches"][0]:
        local = torch.as_tensor(np.stack(theirs["pixel_values_local"]))
        torch.testing.assert_close(ours.paths["tiles"].pixel_values, local, **exact)
