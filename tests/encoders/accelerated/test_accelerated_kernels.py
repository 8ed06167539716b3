"""Norms, rotary, activations and positions: each Triton kernel against the same steps in torch.

On the CPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.accelerated.cases import (
    ACTIVATIONS,
    DEVICE,
    DTYPES,
    activated,
    drawn,
    needs_triton,
    normed,
    relative,
    rotated,
    summed,
    with_table_rows,
)

pytestmark = [
    needs_triton,
    # exp(-x) may be infinite where one is divided by it; the interpreter's numpy says so.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]

WIDTHS = [64, 72, 1152, 1280, 3200, 12800]
ROUNDING = {torch.float32: 1e-6, torch.float16: 6e-4}
"""Largest relative L2 distance to float64: a few roundings to the dtype."""


def strided(rows: Tensor) -> Tensor:
    """The same rows inside wider ones, NaN beside them."""
    wide = rows.new_full((rows.shape[0], rows.shape[1] + 24), float("nan"))
    wide[:, 8:-16] = rows
    return wide[:, 8:-16]


# --- norms ----------------------------------------------------------------------------------------


def stream_of(rows: int, width: int, dtype: torch.dtype, kind: str) -> Any:
    from encoders.accelerated.triton_kernels.norms import Sum

    hidden, branch = (drawn(rows, width, dtype=dtype, seed=n) for n in range(2))
    scale, offset = drawn(width, dtype=dtype, seed=2), drawn(width, seed=3)
    stream = Sum(
        strided(hidden) if "strided" in kind else hidden,
        (strided(branch) if "strided" in kind else branch) if "branch" in kind else None,
        scale if "scale" in kind else None,
        offset if "offset" in kind else None,
        branch_norm=norm_of(width, dtype, "RMS norm") if "normed" in kind else None,
    )
    return stream.plus_bias(drawn(width, dtype=dtype, seed=6)) if "bias" in kind else stream


def norm_of(width: int, dtype: torch.dtype, kind: str) -> Any:
    from encoders.accelerated.triton_kernels.norms import Norm

    bias = drawn(width, dtype=dtype, seed=5) if kind == "layer norm" else None
    weight = None if "without weight" in kind else 1 + drawn(width, dtype=dtype, seed=4)
    return Norm(weight, bias, 1e-6, kind.startswith("RMS norm"))


KINDS = [
    "hidden",
    "branch",
    "branch, scale",
    "normed branch",
    "offset",
    "bias",
    "offset, bias",
    "normed strided branch, scale, offset, bias",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "norm_kind"),
    [
        *(pytest.param(kind, "layer norm", marks=pytest.mark.slow) for kind in KINDS[:-1]),
        *product(KINDS[-1:], ["layer norm", "layer norm without bias", "RMS norm"]),
    ],
)
def test_sums_and_norms_match_torch_at_every_width(
    kind: str, norm_kind: str, dtype: torch.dtype
) -> None:
    """Each kind of sum before a norm, and each kind of norm after the sum with all parts."""
    from encoders.accelerated.triton_kernels.norms import add, add_normalise, normalise

    for width, rows in zip(WIDTHS, (7, 3, 5, 1, 2, 3), strict=True):
        stream, norm = stream_of(rows, width, dtype, kind), norm_of(width, dtype, norm_kind)
        before = stream.hidden.clone()
        truth = summed(stream)
        total, both = add_normalise(stream, norm)
        for ours in (total, add(stream)):
            assert relative(ours, truth) <= ROUNDING[dtype]
            assert ours.data_ptr() != stream.hidden.data_ptr()
        for ours in (both, normalise(stream, norm)):
            assert ours.dtype == dtype
            assert relative(ours, normed(truth, norm)) <= ROUNDING[dtype]
        assert torch.equal(stream.hidden, before)


@pytest.mark.parametrize("kind", ["bias", "offset, bias"])
def test_a_bias_is_part_of_the_offset_once_read(kind: str) -> None:
    from encoders.accelerated.triton_kernels.norms import add

    stream = stream_of(3, 72, torch.float16, kind)
    truth = summed(stream)
    stream.shifted.fill_(float("nan"))
    add(stream)
    read = stream.as_read()
    assert read.pending is None
    assert relative(read.hidden + read.offset, truth) <= 1e-3
    assert not read.complete


def test_a_norm_may_write_over_strided_rows() -> None:
    """As the norm over queries does, inside the fused projection."""
    from encoders.accelerated.triton_kernels.norms import Sum, normalise

    fused, norm = drawn(5, 3, 192), norm_of(192, torch.float32, "RMS norm")
    before = fused.clone()
    normalise(Sum(fused[:, 1]), norm, out=fused[:, 1])
    assert relative(fused[:, 1], normed(before[:, 1].double(), norm)) <= 1e-6
    assert torch.equal(fused[:, ::2], before[:, ::2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kind", ["layer norm", "layer norm without bias", "RMS norm", "RMS norm without weight"]
)
@pytest.mark.parametrize(("heads", "size"), [(16, 64), (3, 72)])
def test_norms_of_heads_match_torch_inside_the_fused_projection(
    heads: int, size: int, kind: str, dtype: torch.dtype
) -> None:
    from encoders.accelerated.triton_kernels.norms import normalise_heads

    qkv, norm = drawn(5, 3 * heads, size, dtype=dtype), norm_of(size, dtype, kind)
    before = qkv.clone()
    normalise_heads(qkv[:, heads : 2 * heads], norm)
    truth = normed(before[:, heads : 2 * heads].double(), norm)
    assert relative(qkv[:, heads : 2 * heads], truth) <= ROUNDING[dtype]
    assert torch.equal(qkv[:, :heads], before[:, :heads])
    assert torch.equal(qkv[:, 2 * heads :], before[:, 2 * heads :])


def test_nan_in_one_row_stays_in_that_row() -> None:
    from encoders.accelerated.triton_kernels.norms import add_normalise

    stream = stream_of(5, 72, torch.float32, "branch, scale")
    norm = norm_of(72, torch.float32, "layer norm")
    clean = add_normalise(stream, norm)
    stream.hidden[3], stream.branch[4] = float("nan"), float("nan")
    for ours, truth in zip(add_normalise(stream, norm), clean, strict=True):
        assert torch.equal(ours[:3], truth[:3])
        assert ours[3:].isnan().all()


def test_a_large_mean_does_not_spoil_the_variance() -> None:
    from encoders.accelerated.triton_kernels.norms import Sum, normalise

    rows, norm = drawn(3, 1152) + 1000, norm_of(1152, torch.float32, "layer norm")
    assert relative(normalise(Sum(rows), norm), normed(rows.double(), norm)) <= 1e-4


# --- rotary ---------------------------------------------------------------------------------------


HEADS = [(3, 3, 72), (32, 8, 64)]
MORE_HEADS = [(16, 16, 16), (20, 20, 80), (1, 1, 128), (25, 25, 24), (6, 1, 16)]
HEADS_BY_TIER = [*HEADS, *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in MORE_HEADS)]
"""Heads of queries, heads of keys, and head size; most of them are tried in CI only."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(("heads", "shared", "size"), HEADS_BY_TIER)
def test_rotary_turns_queries_and_keys_and_clears_padding(
    heads: int, shared: int, size: int, wide: bool, dtype: torch.dtype
) -> None:
    from encoders.accelerated.triton_kernels.rotary import rotate_in_place

    rows, real = 7, 5
    flat = drawn(rows, (heads + 2 * shared) * size, dtype=dtype)
    qkv = (strided(flat) if wide else flat).unflatten(1, (-1, size))
    angles, turned = drawn(rows, size // 2, seed=1), heads + shared
    truth = rotated(qkv, angles.cos(), angles.sin(), turned)
    qkv[real:] = float("nan")
    offsets = torch.tensor([0, 3, real, real], dtype=torch.int32, device=DEVICE)
    rotate_in_place(qkv, angles.cos(), angles.sin(), offsets, turned)
    assert relative(qkv[:real], truth[:real]) <= ROUNDING[dtype]
    assert torch.equal(qkv[:real, turned:].double(), truth[:real, turned:])
    assert not qkv[real:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("apart", [None, 1, 6])
def test_tiles_share_the_angles_of_one(apart: int | None, dtype: torch.dtype) -> None:
    from encoders.accelerated.triton_kernels.rotary import rotate_in_place

    qkv, angles = drawn(12, 15, 24, dtype=dtype), drawn(4, 12, seed=1)
    truth = rotated(qkv, angles.cos(), angles.sin(), 10, apart, 5, 3.0)
    qkv[8:] = float("nan")
    offsets = torch.tensor([0, 4, 8, 8], dtype=torch.int32, device=DEVICE)
    rotate_in_place(qkv, angles.cos(), angles.sin(), offsets, 10, apart, 5, 3.0)
    assert relative(qkv[:8], truth[:8]) <= ROUNDING[dtype]
    assert not qkv[8:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "pairs"), [(80, 39), (32, 15), (16, 6), (80, 13)])
def test_columns_without_an_angle_pass(size: int, pairs: int, dtype: torch.dtype) -> None:
    from encoders.accelerated.triton_kernels.rotary import rotate_in_place

    qkv, angles = drawn(7, 9, size, dtype=dtype), drawn(7, pairs, seed=1)
    truth = rotated(qkv, angles.cos(), angles.sin(), 6)
    qkv[5:] = float("nan")
    offsets = torch.tensor([0, 3, 5, 5], dtype=torch.int32, device=DEVICE)
    rotate_in_place(qkv, angles.cos(), angles.sin(), offsets, 6)
    assert relative(qkv[:5], truth[:5]) <= ROUNDING[dtype]
    assert torch.equal(qkv[:5, :, 2 * pairs :].double(), truth[:5, :, 2 * pairs :])
    assert not qkv[5:].any()
    with pytest.raises(ValueError, match="a factor would need all"):
        rotate_in_place(qkv, angles.cos(), angles.sin(), offsets, 6, None, 3, 2.0)


@pytest.mark.parametrize("wide", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("columns", [64, 1030, 3072])
@pytest.mark.parametrize("real", [0, 1, 5, 6, 7])
def test_only_the_rows_after_the_last_offset_are_cleared(
    real: int, columns: int, wide: bool
) -> None:
    from encoders.accelerated.triton_kernels.rotary import clear_rows

    everything = drawn(9, columns)
    x = strided(everything)[:7] if wide else everything[:7]
    before, offsets = everything.clone(), torch.tensor([0, real, real], device=DEVICE).int()
    clear_rows(x, offsets, 2)
    assert not x[real : real + 2].any()
    others = [row for row in range(7) if row not in (real, real + 1)]
    assert torch.equal(x[others], before[others])
    assert torch.equal(everything[7:], before[7:])


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_activations_match_torch_at_every_width(kind: str, gated: bool, dtype: torch.dtype) -> None:
    from encoders.accelerated.triton_kernels.activations import activate

    for (rows, width), in_place, wide in product(
        ((3, 64), (2, 140), (1, 3420), (1, 12800)), (False, True), (False, True)
    ):
        x, up = 3 * drawn(rows, width, dtype=dtype), drawn(rows, width, dtype=dtype, seed=1)
        truth = ACTIVATIONS[kind](x.double()) * (up.double() if gated else 1.0)
        given = strided(x) if wide else x.clone()
        other = (strided(up) if wide else up) if gated else None
        out = activate(given, kind, other, in_place=in_place)
        assert (out.dtype, out.shape) == (dtype, x.shape)
        assert relative(out, truth) <= ROUNDING[dtype]
        assert (out.data_ptr() == given.data_ptr()) == in_place
        assert in_place or torch.equal(given, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_limit_holds_before_the_activation_and_on_both_sides_of_up(dtype: torch.dtype) -> None:
    from encoders.accelerated.triton_kernels.activations import activate

    x, up = (3 * drawn(3, 140, dtype=dtype, seed=seed) for seed in range(2))
    x[0, 0] = up[1, 1] = float("nan")
    out, truth = activate(x, "silu", up, limit=1.5), activated(x, "silu", up, 1.5)
    assert torch.equal(out.isnan(), truth.isnan())
    assert relative(out.nan_to_num(), truth.nan_to_num()) <= ROUNDING[dtype]


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_large_numbers_are_finite(kind: str) -> None:
    from encoders.accelerated.triton_kernels.activations import activate

    x = torch.tensor([[-60000.0, -100.0, -20.0, 0.0, 20.0, 100.0, 60000.0]], device=DEVICE)
    truth = ACTIVATIONS[kind](x.double())
    torch.testing.assert_close(activate(x, kind).double(), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_of_no_rows_has_none(kind: str) -> None:
    from encoders.accelerated.triton_kernels.activations import activate

    x = torch.empty(0, 64, device=DEVICE)
    assert activate(x, kind, x).shape == (0, 64)


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 72, 1152])
@pytest.mark.parametrize(("rows", "taps"), [(1, 4), (5, 4), (3, 1)])
def test_weighted_table_rows_are_added(
    rows: int, taps: int, width: int, dtype: torch.dtype
) -> None:
    from encoders.accelerated.triton_kernels.positions import add_table_rows

    hidden, table = drawn(rows, width, dtype=dtype), drawn(9, width, dtype=dtype, seed=1)
    index = torch.arange(rows * taps, device=DEVICE).view(rows, taps) % 9
    weight = drawn(rows, taps, seed=2)
    before, truth = hidden.clone(), with_table_rows(hidden, table, index, weight)
    assert relative(add_table_rows(hidden, table, index, weight), truth) <= ROUNDING[dtype]
    assert torch.equal(hidden, before)
