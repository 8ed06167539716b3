"""Pixels, metadata and grids in any memory and of any type give the same features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from encoders import VisionEncoder
from graphwrap import GraphedEncoder
from tests.oracles import FEW_FAST, draw_pixels
from tests.support.accelerated.cases import (
    FEW_ROWS,
    OURS,
    assert_close,
    fresh,
    grids_for,
    needs_interpreter,
    needs_triton,
    small,
)
from tests.support.graphs.outputs import EVERY_FIELD

pytestmark = [
    needs_triton,
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second entry": lambda x: torch.stack((x, x + 1), -1)[..., 0],
    "every second row": lambda x: torch.stack((x, x + 1), 1)[:, 0],
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x.clone(),
}
STRIDED = [
    pytest.param(name, view, marks=() if n == m == 0 else pytest.mark.slow)
    for n, name in enumerate(("qwen3_vl", "dinov3", "gemma4", "qwen2_5_vl", "pixtral"))
    for m, view in enumerate(VIEWS)
    if n == 0 or m == n % len(VIEWS)
]
"""Every view of one tower, one of towers with other metadata; one pair runs in a plain pytest."""
GRIDS: dict[str, Callable[[Any], Any]] = {
    "array": np.array,
    "array of bytes": lambda grids: np.array(grids, dtype=np.uint8),
    "array of floats": lambda grids: np.array(grids, dtype=np.float64),
    "array of columns": lambda grids: np.asfortranarray(grids),
    "tuples of numpy's integers": lambda grids: tuple(tuple(map(np.int64, x)) for x in grids),
    "tensor of bytes": lambda grids: torch.tensor(grids, dtype=torch.uint8),
    "tensor of columns": lambda grids: torch.tensor(grids).T.contiguous().T,
    "tensors": lambda grids: [torch.tensor(x) for x in grids],
}
BAD: list[Any] = [
    [[-1, 4, 4]],
    [[1, -4, -4]],
    [[0, 4, 4]],
    [[1.5, 4, 4]],
    [[1, 4]],
    [[1, 4, 4, 1]],
    [["1", "4", "4"]],
    [[None] * 3],
    [[10**20, 4, 4]],
    np.array([[-1, 4, 4]]),
    torch.full((1, 3), float("nan")),
    torch.full((1, 3), float("inf")),
    "144",
    {},
]


def forms_of(encoder: VisionEncoder) -> list[Any]:
    """The encoder, its accelerated form, and graphs without a graph and without padding."""
    tokens = [64 * encoder.item_specs([encoder.grid_for(1)])[0].output_tokens]
    graphs = [
        GraphedEncoder(encoder, budgets, backend=backend, outputs=EVERY_FIELD)
        for backend, budgets in (("static", tokens), ("eager", None))
    ]
    return [encoder, encoder.accelerated(), *graphs]


@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize(("name", "view"), STRIDED)
def test_metadata_may_have_any_strides(name: str, view: str) -> None:
    """Kernels read rows of angles, offsets and taps at their addresses."""
    encoder, grids = small(name), FEW_ROWS
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    truth, metadata = encoder(pixels, grids), encoder.prepare_encoder_metadata(grids)
    changed = {key: VIEWS[view](x) if x.ndim else x for key, x in metadata.items()}
    for one in (encoder, fast):
        assert_close(one(pixels, encoder_metadata=changed), truth)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_pixels_may_have_any_strides(name: str) -> None:
    encoder, grids = small(name), grids_for(name)
    pixels, forms = draw_pixels(encoder, grids), forms_of(encoder)
    truth = encoder(pixels, grids)
    for view in VIEWS.values():
        for form in forms:
            assert_close(form(view(pixels), grids), truth)
    truth = encoder(pixels[:1].repeat(len(pixels), *[1] * (pixels.ndim - 1)), grids)
    for form in forms:
        assert_close(form(pixels[:1].expand_as(pixels), grids), truth)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_a_grid_may_be_of_any_kind_of_whole_numbers(name: str) -> None:
    encoder, grids = small(name), grids_for(name)
    pixels, truth = draw_pixels(encoder, grids), None
    for form in forms_of(encoder):
        truth = encoder(pixels, grids) if truth is None else truth
        for kind in GRIDS.values():
            assert_close(form(pixels, kind(grids)), truth)


@pytest.mark.parametrize("name", FEW_FAST)
def test_a_grid_that_is_none_is_a_value_error_in_every_form(name: str) -> None:
    encoder = fresh(name)
    pixels, forms = draw_pixels(encoder, [[1, 4, 4]]), forms_of(encoder)
    for grid in BAD:
        for form in forms:
            with pytest.raises(ValueError, match=r"grid|rows"):
                form(pixels, grid)
