"""SAM, SigLIP and CLIP, the towers that families share: what their own tests do not see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from encoders.deepseek.sam import (
    Sam,
    SamAttention,
    SamSizes,
    in_windows,
    relative_columns,
    relative_rows,
    resize_relative,
)
from encoders.layers.blocks import activate, resize_table
from tests.oracles import distance, distances, draw_pixels, draw_weights
from tests.oracles.memory import LargestTensor
from tests.support.towers.deepseek import build


def test_relative_positions_make_no_tensor_of_patches_squared() -> None:
    attention = SamAttention(16, 2, 32).requires_grad_(False)
    x = torch.randn(1, 32, 32, 16)
    with LargestTensor() as largest:
        attention(x)
    patches, heads, size = 32 * 32, 2, 8
    assert largest.numel <= patches * heads * (size + 32 + 32)
    assert largest.numel < heads * patches**2 / 10


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (6, 2)])
def test_columns_of_queries_and_keys_make_the_bias(grid: tuple[int, int]) -> None:
    """The bias is summed by plain loops over queries and keys."""
    torch.manual_seed(0)
    h, w, size = *grid, 8
    q, k = torch.randn(2, 1, 1, h, w, size, dtype=torch.float64)
    table_h = torch.randn(2 * h - 1, size, dtype=torch.float64)
    table_w = torch.randn(2 * w - 1, size, dtype=torch.float64)
    wide_q, wide_k = relative_columns(q, k, relative_rows(table_h), relative_rows(table_w))
    scores = (wide_q @ wide_k.transpose(-1, -2))[0, 0].view(h, w, h, w)
    for y, x, v, u in torch.cartesian_prod(*map(torch.arange, (h, w, h, w))).tolist():
        query, key = q[0, 0, y, x], k[0, 0, v, u]
        bias = query @ table_h[y - v + h - 1] + query @ table_w[x - u + w - 1]
        assert torch.isclose(scores[y, x, v, u], query @ key / size**0.5 + bias)


def test_tables_of_another_size_are_interpolated_linearly() -> None:
    table = torch.arange(7.0)[:, None]
    rows = relative_rows(resize_relative(table, 3))  # 5 distances of a table of 7
    expected = F.interpolate(table.t()[None], size=5, mode="linear")[0, 0]
    for query in range(3):
        for key in range(3):
            assert rows[query, key, 0] == expected[query - key + 2]


def test_half_precision_tables_are_interpolated_in_float32() -> None:
    table = torch.randn(7, 4).bfloat16()
    assert torch.equal(resize_relative(table, 3), resize_relative(table.float(), 3).bfloat16())
    square = torch.randn(9, 4).bfloat16()
    wide = resize_table(square.float(), 2, 5, antialias=True)
    assert torch.equal(resize_table(square, 2, 5, antialias=True), wide.bfloat16())


@pytest.mark.parametrize("grid", [(2, 1), (8, 1), (1, 8), (3, 5), (1, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_positions_are_resized_as_pil_resizes(grid: tuple[int, int], transposed: bool) -> None:
    """torch 2.15 gets one column wrong in some layouts of memory, so the layout varies here."""
    generator = torch.Generator().manual_seed(0)
    planes = torch.randn(6, 4, 4, generator=generator)
    table = planes.flatten(1).t()
    h, w = grid
    expected = [
        np.array(Image.fromarray(plane.numpy()).resize((w, h), Image.Resampling.BICUBIC))
        for plane in planes
    ]
    ours = resize_table(table if transposed else table.contiguous(), h, w, antialias=True)
    assert distance(ours.t(), torch.from_numpy(np.stack(expected)).flatten(1)) <= 1e-6


def test_windows_at_the_edge_hold_rows_of_zeros() -> None:
    """They are not masked: a mean over a window counts them."""
    seen: list[Tensor] = []

    def mean(windows: Tensor) -> Tensor:
        seen.append(windows)
        return windows.mean((1, 2), keepdim=True).expand_as(windows)

    out = in_windows(mean, torch.ones(1, 5, 4, 1), 4)
    assert seen[0].shape == (2, 4, 4, 1)
    assert out[0, :4, :, 0].eq(1.0).all()
    assert out[0, 4, :, 0].eq(0.25).all()


@pytest.mark.parametrize("blocks", [(), (3,), (-1,)])
def test_global_blocks_that_do_not_exist_are_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"global_attn_indexes=.*the tower has blocks 0 to 2"):
        SamSizes(3, 16, 32, 2, blocks, 64)


def test_the_hybrid_takes_no_list_whose_first_global_block_is_not_the_lowest() -> None:
    """transformers also reads the features after the first of the list, DeepSeek's code others."""
    config = build("deepseek_vl_hybrid").config
    replace(config, high=replace(config.high, global_blocks=(0, 2, 1)))
    with pytest.raises(ValueError, match=r"global_attn_indexes=\[2, 0\] must begin"):
        replace(config, high=replace(config.high, global_blocks=(2, 0)))


def test_views_of_sam_do_not_touch_each_other() -> None:
    """A view of NaN, such as padding, leaves the others as they are."""
    sam = draw_weights(Sam(SamSizes(2, 16, 32, 2, (1,), 64, neck_channels=8, window_size=3)))
    pixels = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        clean = run(sam, pixels)
        pixels[1] = float("nan")
        dirty = run(sam, pixels)
    assert torch.equal(clean[[0, 2]], dirty[[0, 2]])


def run(sam: Any, pixels: Tensor) -> Tensor:
    hidden = sam.embed_patches(pixels)
    for block in sam.blocks:
        hidden = block(hidden)
    out: Tensor = sam.neck(hidden)
    return out


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu"])
def test_activations_are_those_of_their_names(kind: str) -> None:
    x = torch.linspace(-4, 4, 99, dtype=torch.float64)
    expected = {
        "gelu": 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "quick_gelu": x / (1 + torch.exp(-1.702 * x)),
    }[kind]
    assert distance(activate(x, kind), expected) <= 1e-12


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("name", "path", "called"),
    [
        ("deepseek_vl_hybrid", "high", 3),
        ("deepseek_vl_hybrid", "image", 0),
        ("deepseek_ocr", "tiles", 3),
    ],
)
@torch.no_grad()
def test_fused_paths_agree_and_blocks_of_sam_are_called_in_float32(
    name: str, path: str, called: int
) -> None:
    """The fused steps run in torch; no kernel has SAM's relative positions in float32."""
    encoder = build(name).paths[path]
    grid = [encoder.grid_for(1)]
    pixels = draw_pixels(encoder, [list(grid[0])])
    fast = encoder.accelerated()
    expected = encoder(pixels, grid)
    assert max(distances(fast(pixels, grid), expected).values()) <= 1e-5
    choices = fast.kernel_choices()
    assert (choices["reference_because"], choices["layers_called"]) == (None, called)
