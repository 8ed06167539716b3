"""Small Step3 encoders of two paths with random weights, and the images that they encode."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from encoders import PathsEncoder, Step3Config, Step3Encoder, Step3VLConfig, Step3VLEncoder
from encoders.contract import EncoderOutput
from tests.oracles import draw_weights

SIZES: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
STEP3_VL = Step3VLConfig(**SIZES, out_hidden_size=48, image_size=112, tile_size=84)
STEP3 = Step3Config(**SIZES, downsampled_size=40, out_hidden_size=48, image_size=112, tile_size=84)
NAMES = ("step3_vl", "step3")


def fresh(name: str, dtype: torch.dtype = torch.float32) -> PathsEncoder:
    """Build a small Step3 encoder with random weights, which a test may change."""
    encoder = Step3VLEncoder(STEP3_VL) if name == "step3_vl" else Step3Encoder(STEP3)
    draw_weights(encoder.to(dtype), calm=0.5)
    return encoder.eval().requires_grad_(False)


@cache
def shared(name: str) -> PathsEncoder:
    """Return a small Step3 encoder with random weights, which tests must not change."""
    return fresh(name)


def image(width: int, height: int, seed: int = 0) -> Tensor:
    """Make an image of random pixels, uint8 [3, height, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (3, height, width), generator=generator, dtype=torch.uint8)


IMAGES = [image(300, 200, 1), image(80, 90, 2), image(150, 160, 3), image(60, 60, 4)]
"""Of 12, 0, 4 and 0 tiles of 84 pixels."""
COUNTS = [12, 0, 4, 0]


def tokens(output: EncoderOutput) -> Tensor:
    """Return the tokens (``pooler_output``) of an item, after a check that they are there."""
    assert output.pooler_output is not None
    return output.pooler_output
