"""Shared parts of the tests of accelerated encoders: skips, towers, and the kernels in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoders.base.tile_encoder import TileEncoder
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from tests.oracles import (
    BY_NAME,
    PATCH_TOWERS,
    TOWERS,
    Grids,
    build_encoder,
    distances,
    draw_pixels,
    fields_of,
    tiny,
)

OURS, QWEN = TOWERS, PATCH_TOWERS
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16]
"""In which each kernel is compared with torch."""

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed (it comes with torch on Linux)"
)
needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="kernels take CPU tensors in Triton's interpreter alone, which is off where there is "
    "a GPU (tests/gpu compares the towers there)",
)


def grids_for(name: str) -> Grids:
    """Return grids (t, h, w) of a small video and image; Triton's interpreter is slow."""
    return [[2, 2, 2], [1, 2, 2]] if BY_NAME[name].tiled else [[2, 2, 4], [1, 4, 6]]


def small(name: str) -> VisionEncoder:
    """Return a shared small encoder; an encoder of tiles takes the tiles of ``grids_for``."""
    encoder = tiny(name)
    if isinstance(encoder, TileEncoder):
        return encoder.at(2 * encoder.config.patch_size)
    return encoder


def fresh(name: str, dtype: torch.dtype = torch.float32) -> VisionEncoder:
    """Build a three-block tower that a test may change."""
    return build_encoder(BY_NAME[name], BY_NAME[name].tiny, dtype)


CLOSE = 2e-6


FEW_ROWS: Grids = [[2, 2, 2], [1, 2, 2]]
"""Grids for whole towers in Triton's interpreter, which runs a program for each row."""


@torch.no_grad()
def run(
    encoder: VisionEncoder, name: str, seed: int = 0, grids: Grids | None = None
) -> EncoderOutput:
    """Return an encoder's output for seeded random pixels of ``grids``, or of ``grids_for``."""
    grids = grids or grids_for(name)
    output: EncoderOutput = encoder(draw_pixels(encoder, grids, seed), grids)
    return output


def run_twice(encoder: VisionEncoder, name: str, grids: Grids | None = None) -> EncoderOutput:
    """Encode the same pixels twice, check that the outputs are equal, and return the second.

    What an accelerated encoder derives from weights in the first call is read in the second.
    """
    first = run(encoder, name, grids=grids)
    second = run(encoder, name, grids=grids)
    assert_close(second, first, 0.0)
    return second


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draw seeded normal numbers in a shape, on the device on which kernels are tested."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def attended(q: Tensor, k: Tensor, v: Tensor, ends: list[int]) -> Tensor:
    """Return softmax attention inside each segment, in float64; ``ends`` are the offsets."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    parts = [
        F.scaled_dot_product_attention(q[:, a:b], k[:, a:b], v[:, a:b])
        for a, b in pairwise(ends)
        if b > a
    ]
    return torch.cat(parts, 1).transpose(0, 1)


def relative(ours: Tensor, truth: Tensor) -> float:
    """Return the relative L2 distance of two tensors in float64; NaN if ``ours`` has a NaN."""
    assert ours.shape == truth.shape
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def assert_close(ours: EncoderOutput, truth: EncoderOutput, limit: float = CLOSE) -> None:
    """Assert that the fields of two outputs agree within a relative L2 distance; NaN never does."""
    for field, far in distances(ours, truth).items():
        assert far <= limit, field


def assert_fused(encoder: VisionEncoder, layers_called: int = 0) -> None:
    """Assert that the last forward was fused and called ``layers_called`` layers as modules."""
    choices = encoder.kernel_choices()
    assert choices["reference_because"] is None
    assert choices["layers_called"] == layers_called


def same_bits(ours: EncoderOutput, truth: EncoderOutput) -> bool:
    """Return whether every field of two outputs is equal bit for bit."""
    pairs = zip(fields_of(ours).values(), fields_of(truth).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# --- the steps of the kernels, in float64 ---------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}
NONE = (None, None, None)
"""The ranges of an activation that clamps nothing."""


def activated(
    x: Tensor, kind: str | None, up: Tensor | None, limit: float | None = None, ranges: Any = NONE
) -> Tensor:
    """Return an activation in float64, times ``up`` if it is given, both within ``limit``.

    ``x``, ``up`` and the result are clamped to ``ranges``.
    """
    most = float("inf") if limit is None else limit
    inner = clamped(x.double(), ranges[0]).clamp(max=most)
    out = inner if kind is None else ACTIVATIONS[kind](inner)
    out = out if up is None else out * clamped(up.double(), ranges[1]).clamp(-most, most)
    return clamped(out, ranges[2])


def clamped(x: Tensor, limits: Any) -> Tensor:
    """Return ``x`` clamped to a range, or ``x`` if there is none."""
    return x if limits is None else x.clamp(*limits)


def summed(stream: Any) -> Tensor:
    """Return the complete residual stream in float64, and store the sum of its biases."""
    hidden = stream.hidden.double()
    branch, scale, *biases = (None if x is None else x.double() for x in stream[1:5])
    given = [bias for bias in biases if bias is not None]
    if branch is not None:
        branch = clamped(branch, stream.branch_range)
    if branch is not None and stream.branch_norm is not None:
        branch = normed(branch, stream.branch_norm)
    if branch is not None:
        hidden = hidden + (branch if scale is None else branch * scale)
    if stream.shifted is not None:
        stream.shifted.copy_(sum(given))
    return sum(given, hidden)


def normed(rows: Tensor, norm: Any) -> Tensor:
    """Return the layer norm or RMS norm of float64 rows, or of each head [T, H, K]."""
    weight, bias = (None if x is None else x.double() for x in norm[:2])
    if norm.rms:
        return F.rms_norm(rows, rows.shape[-1:], weight, norm.eps)
    return F.layer_norm(rows, rows.shape[-1:], weight, bias, norm.eps)


def rotated(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    turned: int,
    apart: int | None = None,
    queries: int = 0,
    factor: float = 1.0,
) -> Tensor:
    """Return ``qkv`` [T, heads, K] with its first ``turned`` heads rotated, in float64.

    Pairs are (i, i + apart) in groups of 2 * apart columns, all angles of a row by default; all
    tiles share the angles of one tile, and columns without an angle pass. The first ``queries``
    heads are multiplied by ``factor``.
    """
    out, pairs = qkv.double(), cos.shape[-1]
    apart = apart or pairs
    tiles = len(qkv) // len(cos)
    c, s = (x.double().repeat(tiles, 1)[:, None].unflatten(-1, (-1, apart)) for x in (cos, sin))
    first, second = out[:, :turned, : 2 * pairs].unflatten(-1, (-1, 2, apart)).unbind(-2)
    both = torch.stack((first * c - second * s, second * c + first * s), -2).flatten(2)
    out = torch.cat((torch.cat((both, out[:, :turned, 2 * pairs :]), 2), out[:, turned:]), 1)
    out[:, :queries] *= factor
    return out


def with_table_rows(rows: Tensor, table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Return rows [T, D] plus the table rows at ``index`` [T, taps] times ``weight``, in
    float64.
    """
    return rows.double() + (table.double()[index] * weight.double()[:, :, None]).sum(1)


def rows8(rows: Tensor) -> Any:
    """Quantise rows [T, W] to e4m3, with a float32 scale per row."""
    from encoders.accelerated.triton_kernels.quantise import E4M3, Rows8

    scales = rows.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    return Rows8((rows.float() / scales).to(E4M3), scales)


def run_steps_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the Triton kernels by torch, which runs 100 times as fast as the interpreter."""
    from encoders.accelerated import fp8
    from encoders.accelerated.triton_kernels import activations, norms, positions, rotary

    def add(stream: Any) -> Tensor:
        return summed(stream).to(stream.hidden.dtype)

    def normalise(stream: Any, norm: Any, out: Tensor | None = None) -> Tensor:
        rows = normed(summed(stream), norm).to(stream.hidden.dtype)
        return rows if out is None else out.copy_(rows)

    def rotate(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        offsets: Tensor,
        turned: int,
        apart: int | None = None,
        queries: int = 0,
        factor: float = 1.0,
    ) -> None:
        qkv.copy_(rotated(qkv, cos, sin, turned, apart, queries, factor))
        qkv[int(offsets[-1]) :] = 0.0

    def clear_rows(x: Tensor, offsets: Tensor, count: int) -> None:
        x[int(offsets[-1]) :][:count] = 0.0

    def normalise_heads(rows: Tensor, norm: Any) -> None:
        rows.copy_(normed(rows.double(), norm))

    def activate(
        x: Tensor,
        kind: str | None,
        up: Tensor | None = None,
        *,
        limit: float | None = None,
        ranges: Any = NONE,
        in_place: bool = False,
    ) -> Tensor:
        out = activated(x, kind, up, limit, ranges)
        return x.copy_(out) if in_place else out.to(x.dtype)

    def add_table_rows(rows: Tensor, table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return with_table_rows(rows, table, index, weight).to(rows.dtype)

    def quantise(x: Tensor, kind: str | None = None, up: Any = None, *, limit: Any = None) -> Any:
        return rows8(x.double() if kind is None else activate(x.double(), kind, up, limit=limit))

    def normalise_quantised(stream: Any, norm: Any, keep: bool) -> Any:
        total = add(stream) if keep else None
        return total, rows8(normed(summed(stream), norm))

    monkeypatch.setattr(fp8, "quantise", quantise)
    monkeypatch.setattr(norms, "normalise_quantised", normalise_quantised)
    monkeypatch.setattr(norms, "add", add)
    monkeypatch.setattr(norms, "normalise", normalise)
    monkeypatch.setattr(norms, "normalise_heads", normalise_heads)
    monkeypatch.setattr(norms, "add_normalise", lambda s, norm: (add(s), normalise(s, norm)))
    monkeypatch.setattr(rotary, "rotate_in_place", rotate)
    monkeypatch.setattr(rotary, "clear_rows", clear_rows)
    monkeypatch.setattr(activations, "activate", activate)
    monkeypatch.setattr(positions, "add_table_rows", add_table_rows)


def copy_weights_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels that follow writes to weights by a copy of every source.

    ``test_accelerated_weights.py``, which is about such writes, runs the kernel, and tests of
    ``test_accelerated_fp8.py`` run the one that quantises.
    """
    from encoders.accelerated.triton_kernels import compare, quantise

    def view(at: int, shape: list[int], strides: tuple[int, int], size: int) -> Any:
        steps = [size * step for step in strides]
        last = sum(step * (count - 1) for step, count in zip(steps, shape, strict=True))
        memory = memoryview((ctypes.c_char * (last + size)).from_address(at))
        return np.ndarray(shape, f"i{size}", memory, 0, steps)

    def copy(table: Tensor, rows: int, size: int) -> None:
        for source, copy, *shape, stride, down, across, _ in table.tolist():
            if 0 not in shape:
                new = view(source, shape, (down, across), size)
                view(copy, shape, (stride, 1), size)[:] = new

    def quantise_all(table: Tensor, rows: int, dtype: torch.dtype, *, force: bool) -> None:
        for source, copy, *shape, stride, down, across, scales in table.tolist():
            bits = torch.from_numpy(view(source, shape, (down, across), 2).copy())
            quantised = rows8(bits.view(dtype))
            view(copy, shape, (stride, 1), 1)[:] = quantised.values.view(torch.int8).numpy()
            view(scales, [shape[0], 1], (1, 1), 4)[:] = quantised.scales.view(torch.int32).numpy()

    monkeypatch.setattr(compare, "copy_differences", copy)
    monkeypatch.setattr(quantise, "quantise_weights", quantise_all)
