"""Attention by the tensor memory accelerator against attention in plain torch, and tilings."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from encoders.accelerated.attention.candidates import KERNELS, flash4_tile
from encoders.accelerated.shapes import AttentionShape
from tests.support.accelerated.cases import (
    DEVICE,
    attended,
    drawn,
    needs_interpreter,
    needs_triton,
    relative,
)

BF16 = "torch.bfloat16"


def shape_of(size: int, longest: int, heads: int = 16, rows: int = 1000) -> AttentionShape:
    return AttentionShape(heads, size, rows, 4, longest, equal=False, dtype=BF16)


@needs_triton
@needs_interpreter
@pytest.mark.parametrize(("size", "apart"), [(72, 72), (72, 80), (80, 80)])
def test_attention_through_descriptors_matches_torch(size: int, apart: int) -> None:
    """Columns between heads hold NaN, rows beyond the last offset zeros; neither is written."""
    heads, shared, lengths = 2, 1, (33, 1, 0, 70)
    ends, dtype = [0, *accumulate(lengths)], torch.float32
    buffer = torch.full((ends[-1] + 64, heads + 2 * shared, apart), float("nan"), dtype=dtype)
    buffer[..., :size] = drawn(*buffer.shape[:2], size, dtype=dtype)
    buffer[ends[-1] :, :, :size] = 0.0
    q, k, v = buffer[..., :size].split((heads, shared, shared), 1)
    offsets = torch.tensor([*ends, ends[-1]], dtype=torch.int32, device=DEVICE)
    out = torch.full((len(buffer), heads, size), 7.0, dtype=dtype)
    KERNELS["tma"].attend(q, k, v, out, offsets, shape_of(size, 70, heads))
    wide = (part[: ends[-1]].repeat_interleave(heads // shared, 1) for part in (k, v))
    assert relative(out[: ends[-1]], attended(q[: ends[-1]], *wide, ends)) <= 1e-6
    assert (out[ends[-1] :] == 7.0).all()


@needs_triton
@needs_interpreter
def test_a_plan_has_every_tile_once_and_long_segments_first() -> None:
    from encoders.accelerated.triton_kernels.tma_attention import make_plan

    ends = [0, *accumulate((64, 1, 0, 130, 200, 130))]
    offsets = torch.tensor([*ends, ends[-1]], dtype=torch.int32, device=DEVICE)
    plan = make_plan(offsets, ends[-1] + 40, 64)[:, :3].tolist()
    longest_first = sorted(pairwise(ends), key=lambda pair: pair[0] - pair[1])
    tiles = [[at, a, b] for a, b in longest_first for at in range(a, b, 64)]
    assert plan[: len(tiles)] == tiles
    assert plan[len(tiles) :] == [[0, 0, 0]] * (len(plan) - len(tiles))


@needs_triton
@needs_interpreter
@pytest.mark.parametrize(("rows", "segments"), [(0, 3), (4, 0)])
def test_attention_through_descriptors_takes_no_rows(rows: int, segments: int) -> None:
    q = drawn(rows, 2, 80)
    offsets = torch.zeros(segments + 1, dtype=torch.int32, device=DEVICE)
    assert not KERNELS["tma"].attend(q, q, q, torch.zeros_like(q), offsets, shape_of(80, 70)).any()


@pytest.mark.parametrize(
    ("size", "longest", "capability", "taken"),
    [
        (72, 784, (9, 0), True),
        (80, 784, (10, 0), True),
        (72, 784, (8, 9), False),
        (64, 784, (9, 0), False),
        (88, 784, (9, 0), False),
        (80, 24, (9, 0), True),
    ],
)
def test_only_heads_of_72_and_80_columns_on_hopper_take_descriptors(
    size: int, longest: int, capability: tuple[int, int], taken: bool
) -> None:
    kernel = KERNELS["tma"]
    assert kernel.takes(shape_of(size, longest), torch.bfloat16, capability) is taken
    assert not kernel.takes(shape_of(size, longest), torch.float32, capability)


@pytest.mark.parametrize(
    ("size", "rows", "longest", "tile"),
    [
        (72, 824, 784, (128, 160, True)),
        (72, 6312, 784, (192, 112, True)),
        (72, 4136, 4096, (192, 112, True)),
        (80, 824, 784, (128, 128, True)),
        (80, 6312, 784, (192, 128, False)),
        (80, 5516, 5476, (192, 112, True)),
        (64, 824, 784, None),
    ],
)
def test_flash_attn_4_has_the_tiling_that_was_measured_to_be_the_fastest(
    size: int, rows: int, longest: int, tile: tuple[int, int, bool] | None
) -> None:
    assert flash4_tile(shape_of(size, longest, rows=rows)) == tile
