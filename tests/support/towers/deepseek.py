"""Tiny DeepSeek encoders with random weights, beside their references with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from encoders import Encoder, PathsEncoder, VisionInputs
from encoders.contract import PathInputs
from encoders.deepseek.deepseek_ocr_pixels import OcrPreprocessor
from tests.oracles import NO_LIFT, draw_weights
from tests.oracles.configs import Config
from tests.oracles.references.deepseek import (
    STACK_NARROW,
    hybrid_keys,
    hybrid_reference,
    ocr2_keys,
    ocr2_reference,
    ocr_keys,
    ocr_reference,
    vl_keys,
    vl_reference,
)
from tests.oracles.references.deepseek_vl2 import VL2Reference
from weights import FAMILIES as RECORDS

_SAM = {
    "heads": 3,
    "layers": 3,
    "width": 48,
    "global_attn_indexes": [1],
    "neck_channels": 24,
    "window_size": 5,
}
_SIGLIP = {"heads": 4, "layers": 3, "width": 64, "image_size": 96}


def _vl(config: Config) -> None:
    config["vision_config"]["params"].update(_SIGLIP)
    config["aligner_config"]["params"]["n_embed"] = 48


def _hybrid(config: Config) -> None:
    params = config["vision_config"]["params"]
    params["low_res_cfg"].update(_SIGLIP)
    params["high_res_cfg"].update(_SAM, image_size=128, downsample_channels=[48, 96])
    config["aligner_config"]["params"]["n_embed"] = 48


def _vl2(config: Config) -> None:
    config["vision_config"].update(layers=2, width=64, heads=4, image_size=75)
    config["projector_config"]["n_embed"] = 48
    config["candidate_resolutions"] = [[75, 75], [75, 150], [150, 75], [225, 75], [150, 150]]


def _ocr(config: Config) -> None:
    towers = config["vision_config"]["width"]
    towers["clip-l-14-224"].update(layers=3, width=64, heads=4)
    towers["sam_vit_b"].update(_SAM, downsample_channels=[40, 64])
    config["vision_config"]["image_size"] = 128
    config["projector_config"]["n_embed"] = 48


def _ocr2(config: Config) -> None:
    towers = config["vision_config"]["width"]
    towers["qwen2-0-5b"].update(STACK_NARROW, layers=3)
    towers["sam_vit_b"].update(_SAM, downsample_channels=[40, 64])
    config["vision_config"]["image_size"] = 256
    config["projector_config"]["n_embed"] = 48


_SHRINK: dict[str, Callable[[Config], None]] = {
    "deepseek_vl": _vl,
    "deepseek_vl_hybrid": _hybrid,
    "deepseek_vl2": _vl2,
    "deepseek_ocr": _ocr,
    "deepseek_ocr2": _ocr2,
}
_REFERENCES: dict[str, tuple[Callable[[Config], nn.Module], Callable[[Any], Any]]] = {
    "deepseek_vl": (vl_reference, vl_keys),
    "deepseek_vl_hybrid": (hybrid_reference, hybrid_keys),
    "deepseek_vl2": (VL2Reference, lambda state: state),
    "deepseek_ocr": (ocr_reference, ocr_keys),
    "deepseek_ocr2": (ocr2_reference, ocr2_keys),
}
SIDES = {"image": 128, "tiles": 64}
"""Sides of the views of the tiny DeepSeek-OCR in pixels, in place of 1024 and 640."""
OCR_TILES = [(1, 1, False), (2, 1, True), (2, 3, True), (1, 1, False)]
VL2_TILES = [(1, 1, True), (2, 1, True), (1, 2, True)]
TILES: dict[str, list[tuple[int, int, bool]]] = {
    "deepseek_vl_hybrid": [(1, 1, False)] * 3,
    "deepseek_vl2": VL2_TILES,
    "deepseek_ocr": OCR_TILES,
    "deepseek_ocr2": OCR_TILES,
}
"""Tiles of the images that the families of several views are tested with."""
FAMILIES = list(TILES)


def tiny_config(name: str) -> Config:
    """Return the published config of a DeepSeek family, with small sizes."""
    config = deepcopy(dict(RECORDS[name].facts.published[0].config))
    _SHRINK[name](config)
    return config


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build a tiny DeepSeek encoder with random weights, in eval mode."""
    family = RECORDS[name]
    with no_init_weights():
        encoder: Encoder = family.encoder(family.config.from_hf(tiny_config(name))).to(dtype)
    draw_weights(encoder)
    if name == "deepseek_ocr":
        make_views_small(encoder)
    return encoder.eval().requires_grad_(False)


def make_views_small(encoder: Any) -> None:
    """Make the image and tile sizes of a tiny DeepSeek-OCR small, in a mode with tiles."""
    tower = encoder.paths["image"]
    encoder.paths = {path: tower.at(side) for path, side in SIDES.items()}
    assert isinstance(encoder.preprocessor, OcrPreprocessor)
    encoder.preprocessor = replace(
        encoder.preprocessor, base_size=SIDES["image"], tile_size=SIDES["tiles"]
    )


def build_reference(
    name: str,
    encoder: nn.Module,
    dtype: torch.dtype = torch.float32,
    lift: AbstractContextManager[object] = NO_LIFT,
) -> Any:
    """Build the reference of a tiny encoder, with its weights; it is made inside ``lift``."""
    make, keys = _REFERENCES[name]
    with no_init_weights(), lift:
        reference = make(tiny_config(name))
    for weight in reference.parameters():
        weight.data = weight.data.to(dtype)
    reference.load_state_dict(keys(encoder.state_dict()), strict=True)
    return reference.eval().requires_grad_(False)


def draw_inputs(
    encoder: PathsEncoder, tiles: list[tuple[int, int, bool]], dtype: torch.dtype = torch.float32
) -> VisionInputs:
    """Draw the views of images with these tiles: (columns, rows, whether the path has any)."""
    generator = torch.Generator().manual_seed(len(tiles))
    paths = {}
    for name, path in encoder.paths.items():
        counts = [_views(name, tiling, len(encoder.paths)) for tiling in tiles]
        shape = (sum(counts), *path.row_shape)
        pixels = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        _, h, w = path.grid_for(1)
        grids = [(count, h, w) for count in counts if count]
        users = tuple(item for item, count in enumerate(counts) if count)
        paths[name] = PathInputs(pixels, torch.tensor(grids).view(-1, 3), users)
    return VisionInputs(*paths.pop("image")[:2], tiles, paths)


def _views(path: str, tiling: tuple[int, int, bool], paths: int) -> int:
    columns, rows, has_tiles = tiling
    tiles = columns * rows if has_tiles else 0
    if path == "tiles":
        return tiles
    return 1 + tiles if paths == 1 else 1


def tokens_of(outputs: list[Any]) -> Tensor:
    """Join the tokens (``pooler_output``) of all items to one tensor."""
    return torch.cat([output.pooler_output for output in outputs])
