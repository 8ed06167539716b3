"""On a GPU: every attention kernel against a masked softmax, every tower against its reference.

Half precision is held to the reference's own: the error against a float64 run, pooled over grids of
a thousand tokens and more, is at most 1.1 times that of transformers' sdpa run in the same dtype,
and on no single grid over 1.3 times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from encoders import VisionEncoder
from encoders.base.patch_encoder import PatchEncoder
from encoders.layers.attention import _flash_takes, attention
from encoders.layers.segments import padding_rows
from graphwrap.encoder_forms import FormKernels
from tests.gpu.gpu_towers import NEEDS_CUDA, any_sync_is_an_error, kernels_for
from tests.oracles import (
    BY_NAME,
    EVERY_KIND,
    TOWERS,
    Family,
    Grids,
    LiftFloat32,
    build_encoder,
    build_pair,
    distances,
    draw_pixels,
    edited,
    fields_of,
    in_tokens_of,
)
from tests.oracles.halves import half_errors, six_blocks

pytestmark = NEEDS_CUDA

FLOAT16 = ["intern_vit_300m", "qwen2_5_vl", "qwen3_vl", "deepseek_ocr"]
"""Towers that use, together, every kernel of a dtype: norms, activations, positions, attention."""
COMPILED = ["intern_vit_300m", "qwen2_5_vl", "qwen3_vl", "gemma4", "dinov2"]
"""Tiles; windows; outputs of inner blocks; bounded products; rows before the patches. On the CPU,
all towers are compiled."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
OFFSETS = [0, 1, 1, 130, 386, 386, 900, 1156]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """float32 means float32: TF32 keeps 10 bits of each factor."""
    matmul = torch.backends.cuda.matmul
    kept, matmul.allow_tf32 = matmul.allow_tf32, False
    yield
    matmul.allow_tf32 = kept


def test_the_guard_does_catch_a_read() -> None:
    value = torch.zeros(1, device="cuda")
    with any_sync_is_an_error(), pytest.raises(RuntimeError, match="synchronizing"):
        value.item()


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


# --- attention ------------------------------------------------------------------------------------


def naive(q: Tensor, k: Tensor, v: Tensor, offsets: list[int]) -> Tensor:
    """Softmax a segment at a time in float64; zeros beyond the last offset."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for start, end in itertools.pairwise(offsets):
        rows = slice(start, end)
        scores = torch.einsum("qhk,nhk->hqn", q[rows].double(), k[rows].double())
        weights = (scores * q.shape[-1] ** -0.5).softmax(-1)
        out[rows] = torch.einsum("hqn,nhk->qhk", weights, v[rows].double())
    return out


def draw(rows: int, head: int, dtype: torch.dtype, tail: int = 0) -> Heads:
    """q, k and v as views into one fused projection; the tail is NaN."""
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(rows + tail, 3, 4, head, generator=generator, device="cuda").to(dtype)
    fused[rows:] = float("nan")
    q, k, v = fused.unbind(1)
    return q, k, v


def run(tensors: Heads, offsets: list[int], segment_rows: int = 0) -> Tensor:
    longest = max(end - start for start, end in itertools.pairwise(offsets))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    with any_sync_is_an_error():
        return attention(*tensors, cu_seqlens, torch.tensor(longest), segment_rows=segment_rows)


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("head", [16, 36, 64, 72, 80, 128])
def test_every_kernel_matches_a_masked_softmax_beside_a_tail_of_nan(
    head: int, dtype: torch.dtype
) -> None:
    tensors = draw(OFFSETS[-1], head, dtype, tail=77)
    out = run(tensors, [*OFFSETS, OFFSETS[-1], OFFSETS[-1]])
    assert error(out, naive(*tensors, OFFSETS)) <= BOUNDS[dtype]
    assert torch.equal(out[OFFSETS[-1] :], torch.zeros_like(out[OFFSETS[-1] :]))


def test_head_sizes_cover_flash_and_what_flash_refuses() -> None:
    heads = (16, 36, 64, 72, 80, 128)
    taken = [head for head in heads if _flash_takes(draw(1, head, torch.bfloat16)[0])]
    assert taken == [16, 64, 72, 80, 128]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_equal_segments_match_a_masked_softmax_beside_whole_segments_of_nan(
    dtype: torch.dtype,
) -> None:
    tensors = draw(3 * 257, 64, dtype, tail=2 * 257)
    offsets = [0, 257, 514, 771]
    out = run(tensors, [*offsets, 771, 771], segment_rows=257)
    assert error(out, naive(*tensors, offsets)) <= BOUNDS[dtype]
    assert torch.equal(out[771:], torch.zeros_like(out[771:]))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_causal_halves_match_those_of_the_cpu_in_float64(dtype: torch.dtype) -> None:
    """Flash's rule, memory-efficient attention's and a mask are one."""
    tensors = draw(3 * 288, 64, dtype, tail=2 * 288)
    offsets = torch.tensor([0, 288, 576, 864, 864, 864], dtype=torch.int32, device="cuda")
    with any_sync_is_an_error():
        out = attention(*tensors, offsets, torch.tensor(288), segment_rows=288, causal_half=True)
    q, k, v = (x[:864].double().cpu() for x in tensors)
    truth = attention(
        q, k, v, offsets[:4].cpu(), torch.tensor(288), segment_rows=288, causal_half=True
    )
    assert error(out[:864], truth.cuda()) <= BOUNDS[dtype]
    assert torch.equal(out[864:], torch.zeros_like(out[864:]))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_longer_longest_segment_and_padding_made_beforehand_change_no_bit(
    dtype: torch.dtype,
) -> None:
    tensors = draw(OFFSETS[-1], 64, dtype, tail=51)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device="cuda")
    padding = padding_rows(offsets, OFFSETS[-1] + 51)
    plain = attention(*tensors, offsets, torch.tensor(514))
    assert torch.equal(plain, attention(*tensors, offsets, torch.tensor(514), padding))
    longer = attention(*tensors, offsets, torch.tensor(4096), padding)
    assert error(longer, plain.double()) <= BOUNDS[dtype]


def gradients(function: Callable[[Heads], Tensor], tensors: Heads) -> list[Tensor]:
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
    wave = torch.arange(q.numel(), device="cuda", dtype=torch.float64).sin()
    (function((q, k, v)).double() * wave.view_as(q)).sum().backward()
    return [leaf.grad for leaf in (q, k, v) if leaf.grad is not None]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("head", [36, 64, 72])
def test_gradients_match_the_masked_softmax(head: int, dtype: torch.dtype) -> None:
    tensors = draw(OFFSETS[-1], head, dtype)
    q, k, v = tensors
    ours = gradients(lambda qkv: run(qkv, OFFSETS), tensors)
    truth = gradients(lambda qkv: naive(*qkv, OFFSETS), (q.double(), k.double(), v.double()))
    assert len(ours) == len(truth) == 3
    for mine, exact in zip(ours, truth, strict=True):
        assert error(mine, exact) <= 4 * BOUNDS[dtype]


def test_the_compiled_node_gives_the_kernels_values() -> None:
    tensors = draw(OFFSETS[-1], 72, torch.bfloat16, tail=77)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device="cuda")
    node = torch.ops.vitgraph.segment_attention
    traced = node(*tensors, offsets, torch.tensor(514), None, 0)
    assert torch.equal(traced, attention(*tensors, offsets, torch.tensor(514)))


# --- towers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in EVERY_KIND] + [(name, torch.float16) for name in FLOAT16],
    ids=str,
)
def test_half_precision_is_as_exact_as_the_references_own(name: str, dtype: torch.dtype) -> None:
    wrong, family = [], BY_NAME[name]
    for kernels, fields in half_errors(family, dtype, forms_of(family)).items():
        for field, errors in fields.items():
            ours, theirs = errors.pooled
            if errors.ratio > 1.1 or errors.worst_ratio > 1.3:
                figures = f"{ours:.3e} against {theirs:.3e}, worst {errors.worst_ratio:.3f}"
                wrong.append(f"{kernels} {field}: {figures}")
    assert not wrong, "\n".join(wrong)


def forms_of(family: Family) -> list[FormKernels]:
    """The reference and every attention kernel that is installed and takes this family's shapes."""
    config = family.config_class.from_hf(edited(family.config, **six_blocks(family)))
    with torch.device("meta"):
        return kernels_for(family.build(config))


def small_grids(family: Family, encoder: VisionEncoder) -> list[Grids]:
    if family.tiled:
        return [[[2, 32, 32]], [[3, 8, 8]]]
    lists = [[[1, 10, 14]], [[2, 4, 6], [1, 2, 2], [1, 18, 26]]]
    return [in_tokens_of(encoder, grids) for grids in lists]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_float64_on_the_gpu_matches_the_lifted_reference(name: str) -> None:
    """The truth above is the reference's, and ours is the same one."""
    family, lift = BY_NAME[name], LiftFloat32()
    encoder, reference = build_pair(family, family.tiny, torch.float64, lift)
    encoder.cuda(), reference.cuda()
    for grids in small_grids(family, encoder):
        pixels = draw_pixels(encoder, grids, dtype=torch.float64).cuda()
        with lift:
            theirs = family.output(reference, pixels, torch.tensor(grids, device="cuda"))
        worst = distances(encoder(pixels, grids), theirs)
        assert max(worst.values()) <= 1e-10, worst


@pytest.mark.parametrize("name", TOWERS)
def test_float32_on_the_gpu_is_within_1e_5_of_float64(name: str) -> None:
    """Published widths, one or two blocks and what follows them, TF32 off."""
    family = BY_NAME[name]
    encoder = build_encoder(family, family.shallow).cuda()
    exact = build_encoder(family, family.shallow, torch.float64).cuda()
    for grids in small_grids(family, encoder):
        pixels = draw_pixels(encoder, grids).cuda()
        worst = distances(encoder(pixels, grids), exact(pixels.double(), grids))
        assert max(worst.values()) <= 1e-5, worst


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in TOWERS]
    + [("qwen2_5_vl", dtype) for dtype in (torch.float16, torch.float32, torch.float64)],
    ids=str,
)
def test_forward_with_metadata_never_waits_for_the_gpu(name: str, dtype: torch.dtype) -> None:
    family = BY_NAME[name]
    encoder = build_encoder(family, family.tiny, dtype).cuda()
    grids = small_grids(family, encoder)[1]
    pixels = draw_pixels(encoder, grids).cuda()
    metadata = encoder.prepare_encoder_metadata(grids, max_frames_per_batch=8)
    plain = encoder(pixels, grids)
    with any_sync_is_an_error():
        output = encoder(pixels, encoder_metadata=metadata)
    worst = distances(output, plain)
    assert max(worst.values()) <= BOUNDS[dtype]


@pytest.mark.parametrize("name", TOWERS)
def test_nan_in_pad_rows_changes_no_bit_of_the_real_rows(name: str) -> None:
    family = BY_NAME[name]
    encoder = build_encoder(family, family.tiny, torch.bfloat16).cuda()
    grids = [[2, 8, 8]] if family.tiled else in_tokens_of(encoder, [[1, 10, 14], [2, 4, 6]])
    pixels = draw_pixels(encoder, grids).cuda()
    padding = 2
    if isinstance(encoder, PatchEncoder):
        padding = 15 * encoder.config.spatial_merge_size**2
    rows = pixels.shape[0] + padding
    metadata = encoder.prepare_encoder_metadata(
        grids, max_frames_per_batch=6, max_input_size=rows, max_windows_per_batch=32
    )
    outputs = []
    for fill in (0.0, float("nan")):
        padded = torch.full((rows, *pixels.shape[1:]), fill, device="cuda")
        padded[: pixels.shape[0]] = pixels
        outputs.append(encoder.split(encoder(padded, encoder_metadata=metadata), grids))
    for clean, poisoned in zip(*outputs, strict=True):
        for key, value in fields_of(clean).items():
            assert bool(value.isfinite().all()), key
            assert torch.equal(value, fields_of(poisoned)[key]), key


@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_forward_matches_eager(name: str) -> None:
    torch.compiler.reset()
    family = BY_NAME[name]
    encoder = build_encoder(family, family.tiny).cuda()
    grids = small_grids(family, encoder)[1]
    pixels = draw_pixels(encoder, grids).cuda()
    metadata = encoder.prepare_encoder_metadata(grids)
    compiled = torch.compile(encoder.forward, fullgraph=True)
    output = compiled(pixels, encoder_metadata=metadata)
    assert max(distances(output, encoder(pixels, grids)).values()) <= 1e-5


@pytest.mark.parametrize("name", TOWERS)
def test_pixels_on_the_host_are_moved(name: str) -> None:
    family = BY_NAME[name]
    encoder = build_encoder(family, family.tiny, torch.bfloat16).cuda()
    grids = small_grids(family, encoder)[1]
    pixels = draw_pixels(encoder, grids)
    moved, given = encoder(pixels, grids), encoder(pixels.cuda(), grids)
    assert moved.pooler_output.device.type == "cuda"
    assert torch.equal(moved.pooler_output, given.pooler_output)
