"""Arguments of a wrong type are ValueErrors in every tower, whichever method is called."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from encoders import VisionEncoder
from tests.oracles import PATCH_TOWERS, draw_pixels, fresh, tiny

TOWERS = ["intern_vit_300m", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
GRID = [[1, 8, 8]]
STRANGERS: list[Any] = ["x", 3, 2.5, [1.0], np.zeros((4, 4)), {}, (torch.zeros(4), None), object()]


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_is_a_value_error(name: str, stranger: Any) -> None:
    encoder: VisionEncoder = tiny(name)
    pixels = draw_pixels(encoder, GRID)
    for call in (
        lambda: encoder(stranger, GRID),
        lambda: encoder.forward_intermediates(stranger, GRID),
        lambda: encoder.split(stranger, GRID),
        lambda: encoder.feature_maps(stranger, GRID),
        lambda: encoder(pixels, encoder_metadata=stranger),
    ):
        with pytest.raises(ValueError, match=r"is of type|must be"):
            call()


@pytest.mark.parametrize("name", TOWERS)
def test_metadata_of_lists_is_refused(name: str) -> None:
    encoder = tiny(name)
    metadata = encoder.prepare_encoder_metadata(GRID)
    for key in metadata:
        with pytest.raises(ValueError, match=rf"encoder_metadata\['{key}'\] is of type list"):
            encoder(draw_pixels(encoder, GRID), encoder_metadata={**metadata, key: [1, 2]})


@pytest.mark.parametrize("name", TOWERS)
def test_grids_without_values_are_refused(name: str) -> None:
    encoder = tiny(name)
    grid = torch.tensor(GRID)
    for bad in (grid.to("meta"), grid.to_sparse()):
        for call in (encoder.item_specs, encoder.prepare_encoder_metadata):
            with pytest.raises(ValueError, match="has no values to read: pass a dense tensor"):
                call(bad)


@pytest.mark.parametrize("keyword", ["min_pixels", "max_pixels", "num_frames"])
def test_an_array_is_refused_as_a_keyword_of_preprocess(keyword: str) -> None:
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{keyword}=.*must be a positive integer"):
        tiny("qwen2_vl").preprocess([image], **{keyword: np.zeros(4)})


# --- grids that are far too large -----------------------------------------------------------------


@pytest.mark.parametrize("form", ["encoder", "accelerated", "blocks"])
@pytest.mark.parametrize("name", PATCH_TOWERS)
def test_a_grid_in_pixels_is_refused_before_metadata_are_made(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = fresh(name)
    pixels, grids = draw_pixels(encoder, [[1, 4, 6]]), [[1, 4480, 6720]]

    def refuse(*arguments: object) -> None:
        raise AssertionError("gigabytes of metadata")

    monkeypatch.setattr(type(encoder), "_grid_metadata", refuse)
    call: Any = encoder.accelerated() if form == "accelerated" else encoder
    if form == "blocks":
        call = encoder.forward_intermediates
    with pytest.raises(ValueError, match="has 24 rows but the grid makes 30105600: pass the grid"):
        call(pixels, grids)


@pytest.mark.parametrize("name", TOWERS)
def test_rows_that_overflow_the_offsets_are_refused(name: str) -> None:
    """Offsets are int32: they would go on below zero."""
    encoder = fresh(name)
    _, h, w = encoder.grid_for(1)
    rows = encoder.item_specs([[1, h, w]])[0].longest_segment
    for frames in (2**31 // rows + 1, 10**20):
        with pytest.raises(ValueError, match=r"rows, and int32 offsets end at 2\^31: pass fewer"):
            encoder.prepare_encoder_metadata([[frames, h, w]])
