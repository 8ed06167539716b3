"""Segment attention against the plainest softmax there is, in float64 with a mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encoders.layers.attention import _attend_masked, attention
from encoders.layers.segments import padding_rows

BOUNDS = {torch.float64: 1e-13, torch.float32: 5e-7, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def naive(q: Tensor, k: Tensor, v: Tensor, offsets: list[int]) -> Tensor:
    """Softmax over a [T, T] mask in float64; zeros beyond the last offset."""
    segment = torch.full((q.shape[0],), -1)
    for number, (start, end) in enumerate(itertools.pairwise(offsets)):
        segment[start:end] = number
    real = segment >= 0
    q, k, v = (torch.where(real[:, None, None], x.double(), 0.0) for x in (q, k, v))
    scores = torch.einsum("qhk,nhk->hqn", q, k) * q.shape[-1] ** -0.5
    mask = (segment[:, None] == segment[None, :]) & real[:, None]
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqn,nhk->qhk", weights, v)


def draw(rows: int, heads: int, head: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, heads, head, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(3)
    ]


def run(q: Tensor, k: Tensor, v: Tensor, offsets: list[int], **options: int) -> Tensor:
    longest = max((b - a for a, b in itertools.pairwise(offsets)), default=0)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    return attention(q, k, v, cu_seqlens, torch.tensor(longest, dtype=torch.int32), **options)


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth).norm() / truth.norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("head", [16, 36, 64, 72, 80, 128])
def test_every_head_size_and_dtype_matches_a_masked_softmax(head: int, dtype: torch.dtype) -> None:
    offsets = [0, 5, 5, 12, 30, 31]
    q, k, v = draw(31, 3, head, dtype)
    truth = naive(q, k, v, offsets)
    out = run(q, k, v, offsets)
    assert out.dtype == dtype
    assert out.shape == q.shape
    assert error(out, truth) <= BOUNDS[dtype]


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), tail=st.integers(0, 5))
@settings(max_examples=60)
def test_any_offsets_match_a_masked_softmax(lengths: list[int], tail: int) -> None:
    offsets = list(itertools.accumulate(lengths, initial=0))
    q, k, v = draw(offsets[-1] + tail, 2, 16, torch.float64, seed=sum(lengths))
    out = run(q, k, v, offsets)
    torch.testing.assert_close(out, naive(q, k, v, offsets), rtol=0, atol=1e-13)
    assert torch.equal(out[offsets[-1] :], torch.zeros(tail, 2, 16, dtype=torch.float64))


def test_nan_in_the_tail_changes_no_bit_and_the_tail_is_zero() -> None:
    offsets = [0, 4, 11, 11, 11]
    q, k, v = draw(17, 2, 16, torch.float32)
    clean = run(q, k, v, offsets)
    for x in (q, k, v):
        x[11:] = float("nan")
    poisoned = run(q, k, v, offsets)
    assert torch.equal(clean, poisoned)
    assert torch.equal(poisoned[11:], torch.zeros(6, 2, 16))


def test_offsets_padded_by_repeating_the_last_one_change_no_bit() -> None:
    q, k, v = draw(11, 2, 16, torch.float32)
    assert torch.equal(run(q, k, v, [0, 4, 11]), run(q, k, v, [0, 4, 11, 11, 11, 11]))


def test_segments_of_equal_rows_are_the_same_with_and_without_the_promise() -> None:
    q, k, v = draw(28, 2, 16, torch.float32)
    plain = run(q, k, v, [0, 7, 14, 21, 28])
    assert torch.equal(plain, run(q, k, v, [0, 7, 14, 21, 28], segment_rows=7))


def test_offsets_beyond_the_rows_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"make 11 rows, and cu_seqlens end at 12: .*grid_thw of these"
    ):
        run(*draw(11, 2, 16, torch.float32), [0, 4, 12, 12])


def test_a_broken_promise_of_equal_segments_is_refused_with_both_numbers() -> None:
    q, k, v = draw(28, 2, 16, torch.float32)
    with pytest.raises(ValueError, match=r"segment of 14 rows, .* segments of 7: pass"):
        run(q, k, v, [0, 7, 21, 28], segment_rows=7)
    kept = run(q, k, v, [0, 7, 14, 14, 14], segment_rows=7)
    assert torch.equal(kept[14:], torch.zeros(14, 2, 16))


def test_padding_made_beforehand_changes_no_bit() -> None:
    q, k, v = draw(17, 2, 16, torch.float32)
    offsets = torch.tensor([0, 4, 11], dtype=torch.int32)
    longest, padding = torch.tensor(7, dtype=torch.int32), padding_rows(offsets, 17)
    assert padding.flatten().tolist() == [False] * 11 + [True] * 6
    assert torch.equal(
        attention(q, k, v, offsets, longest), attention(q, k, v, offsets, longest, padding)
    )


def test_no_rows_give_no_rows() -> None:
    q, k, v = draw(0, 2, 16, torch.float32)
    assert run(q, k, v, [0]).shape == (0, 2, 16)
    assert run(q, k, v, [0, 0, 0]).shape == (0, 2, 16)


def test_only_empty_segments_give_zeros() -> None:
    q, k, v = draw(3, 2, 16, torch.float32)
    assert torch.equal(run(q, k, v, [0, 0, 0]), torch.zeros(3, 2, 16))


def test_views_into_a_fused_projection_are_taken_as_they_are() -> None:
    fused = draw(20, 3 * 2, 16, torch.float32)[0].view(20, 3, 2, 16)
    q, k, v = fused.unbind(1)
    offsets = [0, 8, 20]
    assert torch.equal(run(q, k, v, offsets), run(*(x.contiguous() for x in (q, k, v)), offsets))


def test_segments_do_not_see_each_other() -> None:
    q, k, v = draw(12, 2, 16, torch.float32)
    before = run(q, k, v, [0, 5, 12])
    k[5:], v[5:] = 100.0, -100.0
    after = run(q, k, v, [0, 5, 12])
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5:], after[5:])


def gradients(function, tensors: list[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    (function(*leaves) * weight).sum().backward()
    return [x.grad for x in leaves]


def test_gradients_match_the_masked_softmax() -> None:
    offsets = [0, 5, 5, 12]
    tensors = draw(15, 2, 16, torch.float64)
    weight = torch.randn(15, 2, 16, generator=torch.Generator().manual_seed(9)).double()
    ours = gradients(lambda q, k, v: run(q, k, v, offsets), tensors, weight)
    theirs = gradients(lambda q, k, v: naive(q, k, v, offsets), tensors, weight)
    for mine, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)
        assert torch.equal(mine[12:], torch.zeros_like(mine[12:]))


def causal_halves(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Softmax by a mask in float64, a view of ``rows`` rows at a time."""
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    mask[:, : rows // 2] = True
    views = (x.double().unflatten(0, (-1, rows)).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*views, attn_mask=mask)
    return out.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_causal_halves_match_a_masked_softmax(dtype: torch.dtype) -> None:
    q, k, v = draw(36, 3, 16, dtype)
    out = run(q, k, v, [0, 12, 24, 24], segment_rows=12, causal_half=True)
    assert error(out[:24], causal_halves(q[:24], k[:24], v[:24], 12)) <= BOUNDS[dtype]
    assert torch.equal(out[24:], torch.zeros_like(out[24:]))


def test_gradients_of_causal_halves_match_the_masked_softmax() -> None:
    tensors, offsets = draw(24, 2, 16, torch.float64), torch.tensor([0, 12, 24], dtype=torch.int32)
    weight = torch.randn(24, 2, 16, generator=torch.Generator().manual_seed(9)).double()
    node, longest = torch.ops.vitgraph.segment_attention, torch.tensor(12, dtype=torch.int32)
    theirs = gradients(lambda *qkv: causal_halves(*qkv, 12), tensors, weight)
    for ours in (
        gradients(
            lambda *qkv: run(*qkv, [0, 12, 24], segment_rows=12, causal_half=True), tensors, weight
        ),
        gradients(lambda *qkv: node(*qkv, offsets, longest, None, 12, True), tensors, weight),
    ):
        for mine, truth in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)


def node_arguments(requires_grad: bool) -> tuple:
    tensors = [x.requires_grad_(requires_grad) for x in draw(15, 2, 16, torch.float32)]
    offsets = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    return (*tensors, offsets, torch.tensor(7, dtype=torch.int32), padding_rows(offsets, 15), 0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_compiled_node_passes_opcheck(requires_grad: bool) -> None:
    torch.library.opcheck(
        torch.ops.vitgraph.segment_attention.default, node_arguments(requires_grad)
    )


def test_the_compiled_node_has_the_same_values_and_gradients() -> None:
    *tensors, offsets, longest, padding, rows = node_arguments(False)
    weight = torch.randn(15, 2, 16, generator=torch.Generator().manual_seed(9))
    node = torch.ops.vitgraph.segment_attention
    assert torch.equal(
        node(*tensors, offsets, longest, padding, rows), attention(*tensors, offsets, longest)
    )
    eager = gradients(lambda *qkv: attention(*qkv, offsets, longest), tensors, weight)
    traced = gradients(lambda *qkv: node(*qkv, offsets, longest, padding, rows), tensors, weight)
    for mine, truth in zip(traced, eager, strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-6)


def test_the_masked_fallback_reads_no_offset_on_the_host() -> None:
    """A meta tensor has no values: any read of one raises."""
    q, k, v = (x.to("meta") for x in draw(12, 2, 16, torch.float32))
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device="meta")
    out = attention(q, k, v, offsets, torch.tensor(7, dtype=torch.int32))
    assert out.shape == (12, 2, 16)


def test_the_masked_fallback_is_exact() -> None:
    """The float64 path of CUDA, run on the CPU: its mask is built from device offsets."""
    offsets = [0, 5, 5, 12, 12]
    q, k, v = draw(15, 2, 16, torch.float64)
    for x in (q, k, v):
        x[12:] = float("nan")
    out = _attend_masked(q, k, v, torch.tensor(offsets, dtype=torch.int32))
    torch.testing.assert_close(out[:12], naive(q, k, v, offsets)[:12], rtol=0, atol=1e-13)
