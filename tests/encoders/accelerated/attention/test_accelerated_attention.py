"""Triton's attention kernel against attention in plain torch; on the CPU in the interpreter."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from encoders.accelerated.attention.candidates import KERNELS, REFERENCE
from encoders.accelerated.shapes import AttentionShape
from tests.support.accelerated.cases import DEVICE, DTYPES, attended, drawn, needs_triton, relative

pytestmark = needs_triton

HALF = "torch.float16"
ATTENTION_DTYPES = DTYPES if DEVICE.type == "cpu" else [torch.float16]
"""On a GPU a float32 product is one of TensorFloat-32, and no tower takes the kernel there."""

LENGTHS = ((33, 1, 70, 0, 7), (1,))
SIZES = [16, 24, 32, 40, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128]
FAST_SIZES = (64, 72, 80)
"""Sizes of the published towers; the others are slow tests."""
LONG_TILES = [(size, 2048) for size in (16, 64, 72, 112)]


@pytest.mark.parametrize("dtype", ATTENTION_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "longest"),
    [
        pytest.param(size, longest, marks=() if size in FAST_SIZES else pytest.mark.slow)
        for size, longest in [*((size, 70) for size in SIZES), *LONG_TILES]
    ],
)
def test_triton_attention_matches_torch_for_every_head_size(
    size: int, longest: int, dtype: torch.dtype
) -> None:
    """Rows beyond the last offset hold NaN and are neither read nor written."""
    heads = 2
    for lengths in LENGTHS:
        ends = [0, *accumulate(lengths)]
        rows = ends[-1]
        qkv = drawn(rows + 5, 3, heads, size, dtype=dtype)
        qkv[rows:] = float("nan")
        shape = AttentionShape(
            heads, size, len(qkv), len(lengths) + 1, longest, equal=False, dtype=HALF
        )
        offsets = torch.tensor([*ends, rows], dtype=torch.int32, device=DEVICE)
        q, k, v = qkv.unbind(1)
        buffer = torch.full(q.shape, 7.0, dtype=dtype, device=DEVICE)
        out = KERNELS["triton"].attend(q, k, v, buffer, offsets, shape)
        truth = attended(q[:rows], k[:rows], v[:rows], ends)
        assert relative(out[:rows], truth) <= (1e-6 if dtype == torch.float32 else 1e-3)
        assert (out[rows:] == 7.0).all()


@pytest.mark.parametrize("empty", [4, 130])
def test_triton_attention_finds_every_segment_wherever_it_begins(empty: int) -> None:
    """Programs search for their segment unless the capacity allows for more than 128."""
    heads, size = 1, 16
    lengths = (64, 1, 0, 128, 63, 65, 0, 0, 7, 192, 64)
    ends = [0, *accumulate(lengths)]
    dtype = torch.float16 if DEVICE.type == "cuda" else torch.float32
    q, k, v = drawn(ends[-1] + 3, 3, heads, size, dtype=dtype).unbind(1)
    offsets = torch.tensor([*ends, *ends[-1:] * empty], dtype=torch.int32, device=DEVICE)
    shape = AttentionShape(heads, size, len(q), len(offsets) - 1, 192, equal=False, dtype=HALF)
    out = KERNELS["triton"].attend(q, k, v, torch.zeros_like(v), offsets, shape)
    limit = 1e-3 if dtype == torch.float16 else 1e-6
    for a, b in pairwise(ends):
        if b > a:
            assert relative(out[a:b], attended(q[a:b], k[a:b], v[a:b], [0, b - a])) <= limit


@pytest.mark.parametrize("name", ["triton", "reference"])
@pytest.mark.parametrize("shared", [1, 2])
def test_attention_kernels_share_keys_and_values_in_a_group(name: str, shared: int) -> None:
    heads, size, ends = 4, 64, [0, 33, 40]
    dtype = torch.float16 if DEVICE.type == "cuda" else torch.float32
    qkv = drawn(ends[-1], heads + 2 * shared, size, dtype=dtype)
    q, k, v = qkv.split((heads, shared, shared), 1)
    shape = AttentionShape(heads, size, ends[-1], 2, 33, False, HALF, group=heads // shared)
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    kernel = KERNELS.get(name, REFERENCE)
    out = kernel.attend(q, k, v, torch.zeros_like(q), offsets, shape)
    wide = [part.repeat_interleave(heads // shared, 1) for part in (k, v)]
    limit = 1e-3 if dtype == torch.float16 else 1e-6
    assert relative(out, attended(q, *wide, ends)) <= limit


@pytest.mark.parametrize("segments", [0, 3])
def test_triton_attention_takes_no_rows(segments: int) -> None:
    q = drawn(4, 2, 64, dtype=torch.float16)
    shape = AttentionShape(2, 64, 4, segments, 0, equal=False, dtype=HALF)
    offsets = torch.zeros(segments + 1, dtype=torch.int32, device=DEVICE)
    out = KERNELS["triton"].attend(q, q, q, torch.zeros_like(q), offsets, shape)
    assert not out.any()


def test_large_scores_do_not_overflow() -> None:
    q, v = 30 * drawn(40, 2, 64), drawn(40, 2, 64, seed=1)
    if DEVICE.type == "cuda":
        q, v = q.half(), v.half()
    shape = AttentionShape(2, 64, 40, 1, 40, equal=False, dtype=HALF)
    offsets = torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)
    out = KERNELS["triton"].attend(q, q, v, torch.zeros_like(v), offsets, shape)
    assert relative(out, attended(q, q, v, [0, 40])) <= 1e-3
