"""Modes of DeepSeek-OCR: sizes and numbers of views, and the tokens that they make."""

from __future__ import annotations

import pytest
import torch

from encoders import DeepseekOCRConfig, DeepseekOCREncoder, VisionInputs
from encoders.deepseek.deepseek_ocr import MODES
from tests.support.towers.deepseek import build, draw_inputs, tiny_config, tokens_of


def test_inputs_of_another_mode_with_the_same_paths_are_encoded() -> None:
    """The tokens are laid out by the grid of the inputs, not by the size of the mode."""
    encoder = build("deepseek_ocr")
    tiny, small = encoder.at_mode("tiny"), encoder.at_mode("small")
    tiny.paths = {"image": encoder.paths["tiles"]}
    small.paths = {"image": encoder.paths["image"]}
    inputs = draw_inputs(small, [(1, 1, False)])
    assert torch.equal(tokens_of(tiny(inputs)), tokens_of(small(inputs)))
    assert len(tokens_of(tiny(inputs))) == 2 * 3 + 1


PUBLISHED_TOKENS = {"tiny": 73, "small": 111, "base": 273, "large": 421, "gundam": 273}
"""Tokens of an image without tiles: n rows of n tokens and a newline, and a separator."""


def meta_ocr() -> DeepseekOCREncoder:
    with torch.device("meta"):
        return DeepseekOCREncoder(DeepseekOCRConfig.from_hf(tiny_config("deepseek_ocr")))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_makes_the_published_number_of_tokens(mode: str) -> None:
    encoder = meta_ocr().at_mode(mode)
    inputs = encoder.preprocess([torch.zeros(3, 200, 300, dtype=torch.uint8)])
    (output,) = encoder(VisionInputs(inputs.pixel_values.to("meta"), *inputs[1:]))
    assert len(output.pooler_output) == PUBLISHED_TOKENS[mode]
    assert set(encoder.paths) == ({"image", "tiles"} if mode == "gundam" else {"image"})


def test_tiles_add_a_newline_per_row_of_the_stitched_picture() -> None:
    encoder = meta_ocr()
    inputs = encoder.preprocess([torch.zeros(3, 700, 1400, dtype=torch.uint8)])
    assert inputs.tiles == [(2, 1, True)]
    tiles = inputs.paths["tiles"]
    moved = {"tiles": tiles._replace(pixel_values=tiles.pixel_values.to("meta"))}
    (output,) = encoder(VisionInputs(inputs.pixel_values.to("meta"), *inputs[1:3], moved))
    assert len(output.pooler_output) == 273 + 10 * (20 + 1)


def test_a_mode_shares_the_weights_of_its_encoder() -> None:
    encoder = build("deepseek_ocr")
    view = encoder.at_mode("tiny")
    assert view.config.mode == "tiny"
    assert encoder.config.mode == "gundam"
    assert view.projector is encoder.projector
    pairs = zip(view.parameters(), encoder.parameters(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"mode='huge'.*'tiny', 'small', 'base', 'large', 'gund"):
        meta_ocr().at_mode("huge")
    with pytest.raises(ValueError, match=r"mode=\['tiny'\]: must be one of"):
        meta_ocr().at_mode(["tiny"])
