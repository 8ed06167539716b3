"""The reference of Granite for Docling, which is a model of transformers with its connector."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from encoders.contract import EncoderOutput

from ..configs import Config, vision_of
from ..family import make_row
from .siglip import SIZES, siglip_keys

SMALL = {**SIZES, "out_hidden_size": 48, "deepstack_visual_indexes": [0, 2]}


def granite_docling_reference(config: Config) -> nn.Module:
    """Build transformers' GraniteDoclingVisionModel, which 5.19 and older lack."""
    package = "transformers.models.granite_docling"
    configuration: Any = pytest.importorskip(f"{package}.configuration_granite_docling")
    modeling: Any = pytest.importorskip(f"{package}.modeling_granite_docling")
    wrapped = configuration.GraniteDoclingVisionConfig(**vision_of(config))
    reference: nn.Module = modeling.GraniteDoclingVisionModel._from_config(
        wrapped, attn_implementation="sdpa"
    )
    return reference


def granite_docling_output(
    reference: Any, pixels: Tensor, grid_thw: Tensor, fine: bool = False
) -> EncoderOutput:
    """Run transformers' model; the last block's rows are those before the last norm.

    It takes tiles of one size. For others, its embeddings interpolate, as they can on request, and
    squares of patches are laid side by side by plain indexing.
    """
    h, w = grid_thw[0, 1:].tolist()
    connector = reference.connector
    path = connector.fine if fine else connector.coarse
    usual = h == w == reference.config.image_size // reference.config.patch_size
    rows: list[Tensor] = []
    hook = reference.encoder.layers[-1].register_forward_hook(lambda *args: rows.append(args[2]))
    with ExitStack() as patches:
        if not usual:
            embed = partial(reference.embeddings.forward, interpolate_pos_encoding=True)
            patches.enter_context(patch.object(reference.embeddings, "forward", embed))
            patches.enter_context(patch.object(path, "pixel_shuffle", partial(_squares, h, w)))
        if not usual or pixels.dtype == torch.float64:
            table = _positions(path, h, w).to(pixels)
            patches.enter_context(patch.object(path.pos_embed, "pos_embed", table))
        out = reference(pixels, fine=fine)
    hook.remove()
    return EncoderOutput(rows[0], out.pooler_output, tuple(out.deepstack_features))


def _squares(h: int, w: int, rows: Tensor, side: int) -> Tensor:
    maps = rows.unflatten(1, (h, w))
    tokens = [
        maps[:, r : r + side, c : c + side].flatten(1)
        for r in range(0, h, side)
        for c in range(0, w, side)
    ]
    return torch.stack(tokens, 1)


def _positions(path: Any, h: int, w: int) -> Tensor:
    width, side = path.pos_embed.embed_dim, path.scale_factor
    if h == w:
        table: Tensor = path.pos_embed.build(width, h // side)
        return table
    rates = [10000 ** (-4 * n / width) for n in range(width // 4)]
    rows = [
        [wave(place * rate) for place in (c, r) for wave in (math.sin, math.cos) for rate in rates]
        for r in range(h // side)
        for c in range(w // side)
    ]
    return torch.tensor(rows, dtype=torch.float64)


ROWS = [
    make_row(
        "granite_docling",
        "ibm-granite/granite-for-docling-500m",
        granite_docling_reference,
        siglip_keys,
        granite_docling_output,
        shallow={"num_hidden_layers": 1, "deepstack_visual_indexes": [0], "scale_factor": 2},
        narrow={**SIZES, "out_hidden_size": 48, "scale_factor": 2},
        tiny={**SMALL, "num_hidden_layers": 3, "image_size": 128, "scale_factor": 2},
        blocks=lambda reference: reference.encoder.layers,
        alone=lambda model, pixels, grid: model(pixels).pooler_output,
        variant=True,
        eager=True,
        unread=("connector.fine.",),
    ),
]
