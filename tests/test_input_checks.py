"""Arguments of a wrong type are ValueErrors in every tower, whichever method is called."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from encoders import VisionEncoder
from oracles import draw_pixels, tiny

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
