"""The attention kernels that an accelerated tower chooses from, as one table.

Every kernel computes softmax attention inside packed segments, scaled by ``K ** -0.5``. They differ
in which shapes they accept and on which they are fast; ``choices.py`` times them.

Sources: PyTorch 2.11 (flash-attention 2 and cuDNN inside it), flash-attn-4 4.0.0b36,
``triton_attention.py`` and ``tma_attention.py`` of ``encoders/accelerated/triton_kernels``.

Shapes: T packed rows, H heads, K head size, S segments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...layers.attention import attention
from ...layers.torch_internals import attend_flash
from ..shapes import HALF_DTYPES, AttentionShape
from .flash_attn_4 import flash4_forward

SHORT = 64
"""Segments of at most this many rows are one tile each in the Triton attention kernel."""
SEARCHED = 128
"""With at most this many segments, a Triton program finds the segment it works on by comparing all
offsets at once: each of its 128 or 256 threads compares at most one."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionShape], Tensor]


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel: the package it needs, the shapes it takes, and the function to call."""

    name: str
    package: str
    """The Python package that the kernel needs."""
    takes: Callable[[AttentionShape, torch.dtype, tuple[int, int]], bool]
    """Returns whether the kernel runs for a shape, a dtype and a CUDA compute capability."""
    attend: Attend
    """Takes q, k, v and a buffer [T, H, K] (k and v with H / group heads), offsets int32 [S+1] and
    the shape; returns the result in the buffer or in a new tensor. Rows at or beyond the last
    offset are not written."""
    reads_beyond: int = 0
    """The number of rows beyond the last offset that the last tile of keys may contain. NaN in them
    would spread to other rows, so they are cleared before every call."""


def _flash2(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape
) -> Tensor:
    return attend_flash(q, k, v, offsets, max(shape.longest, 1))


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape
) -> Tensor:
    dense = (x.unflatten(0, (-1, shape.longest)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*dense).transpose(1, 2).flatten(0, 1)


def _triton(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape
) -> Tensor:
    # Imported here, because the table of kernels is read without Triton, too.
    from ..triton_kernels.triton_attention import attend, tile_for

    tile = tile_for(shape.size, shape.longest)
    attend(q, k, v, out, offsets, shape.longest, tile, SEARCHED)
    return out


def _tma(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape
) -> Tensor:
    from ..triton_kernels.tma_attention import attend, tile_for  # needs Triton

    attend(q, k, v, out, offsets, tile_for(shape.size))
    return out


def _takes_tma(shape: AttentionShape, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return whether the TMA kernel runs: half precision, 72 or 80 columns, Hopper or newer."""
    sizes = _takes_half(shape, dtype, 80) and shape.size > 64
    return sizes and capability[0] >= 9


def flash4_tile(shape: AttentionShape) -> tuple[int, int, bool] | None:
    """Return the tile sizes for flash-attn-4's kernel, or None for the package's own choice.

    Measured on an H200: with the package's own tile of 192 x 144, one image of 784 rows takes 1.25
    and 1.42 times as long as with the tile returned here (heads of 72 and 80 columns), and 32 such
    images 1.07 and 1.06 times.

    Returns:
        Query rows, keys, and whether probabilities stay in registers for the product with values.
    """
    if shape.size not in (72, 80):
        return None
    if shape.heads * shape.rows < PROCESSORS * 192:  # some processors would have no tile
        return (128, 160, True) if shape.size == 72 else (128, 128, True)
    short = shape.size == 80 and shape.longest < 2048
    return (192, 128, False) if short else (192, 112, True)


PROCESSORS = 132
"""The multiprocessors of an H100 and an H200."""


def _flash4(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape
) -> Tensor:
    longest, tile = max(shape.longest, 1), None
    if torch.cuda.get_device_capability(q.device)[0] == 9:  # the tiles were measured on Hopper
        tile = flash4_tile(shape)
    options = {} if tile is None else {"tile_mn": tile[:2], "mma_pv_is_rs": tile[2]}
    flash4_forward()(
        q,
        k,
        v,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        out=out,
        **options,
    )
    return out


def _reference(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape
) -> Tensor:
    longest = torch.tensor(shape.longest, dtype=torch.int32, device="cpu")
    rows = shape.longest if shape.equal else 0
    if shape.group > 1:
        k, v = (x.repeat_interleave(shape.group, 1) for x in (k, v))
    return attention(q, k, v, offsets, longest, segment_rows=rows, causal_half=shape.causal_half)


def _takes_half(shape: AttentionShape, dtype: torch.dtype, max_size: int) -> bool:
    return dtype in HALF_DTYPES and shape.size % 8 == 0 and 16 <= shape.size <= max_size


def _takes_triton(shape: AttentionShape, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return whether the Triton kernel runs: half precision, and head sizes from 2^n to 2^n + 16.

    Other head sizes are rejected: heads of 96 columns gave wrong results on an H200.
    """
    return _takes_half(shape, dtype, 128) and shape.size - (1 << shape.size.bit_length() - 1) <= 16


REFERENCE = AttentionKernel("reference", "torch", lambda *_: True, _reference)
KERNELS = {
    kernel.name: kernel
    for kernel in (
        AttentionKernel("triton", "triton", _takes_triton, _triton),
        AttentionKernel("flash2", "torch", lambda s, d, _: _takes_half(s, d, 256), _flash2),
        AttentionKernel(
            "cudnn",
            "torch",
            lambda s, d, _: s.equal and s.group == 1 and _takes_half(s, d, 128),
            _cudnn,
        ),
        AttentionKernel(
            "flash4",
            "flash_attn.cute",
            lambda s, d, capability: _takes_half(s, d, 128) and capability[0] in (9, 10),
            _flash4,
            reads_beyond=256,  # more than the 160 keys of the largest tile
        ),
        AttentionKernel("tma", "triton", _takes_tma, _tma, reads_beyond=64),
    )
}
"""The attention kernels by name, in the order of preference where nothing could be timed."""
TORCH_KERNELS = ("triton", "flash2", "cudnn", "tma")
"""The names of the attention kernels that need only torch, which installs Triton on Linux."""


@cache
def is_installed(package: str) -> bool:
    """Return whether ``package`` can be imported; only its parents are imported for this."""
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that mean that an attention kernel cannot run.

    They are Triton's own, Python's, and those of flash-attn-4's compiler once it is imported.
    """
    errors: tuple[type[Exception], ...] = (
        RuntimeError,
        ImportError,
        AssertionError,
        TypeError,
        ValueError,
    )
    if is_installed("triton"):
        from triton import TritonError

        errors = (*errors, TritonError)
    compiler = sys.modules.get("cutlass.base_dsl.common")  # flash-attn-4 4.0.0b36 is built on it
    return errors if compiler is None else (*errors, compiler.DSLBaseError)
