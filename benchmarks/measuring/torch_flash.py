"""Attention of transformers' towers by the kernels of flash-attention 2 that torch itself brings.

transformers' own ``"flash_attention_2"`` imports the package flash-attn, which has no wheel for
every torch. torch holds the same kernels. Attention registered here is called as transformers
calls that package: once per block for all segments, with their offsets. The only difference is the
function between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from encoders.layers.torch_internals import attend_flash

NAME = "torch_flash_attention_2"
"""The name of this attention in transformers, which looks for "flash" in it."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **ignored: object,
) -> tuple[Tensor, None]:
    """Return attention [B, T, H, K] of queries, keys and values [B, H, T, K], as transformers asks.

    Args:
        module: the module that attends; not read.
        query, key, value: the heads' rows. With offsets, B is 1 and the segments lie in T.
        attention_mask: None, since the segments come as offsets.
        scaling: the factor of the products of queries and keys.
        cu_seq_lens_q: the offsets of segments, int32; None if each of the B rows is one segment.
        max_length_q: rows of the longest segment.
    """
    batch, _, rows, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32).to(
            query.device
        )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    assert abs(scaling * query.shape[-1] ** 0.5 - 1) < 1e-6  # the only factor that it takes
    out = attend_flash(q, k, v, cu_seq_lens_q, max_length_q or rows)
    return out.unflatten(0, (batch, rows)), None


def attend_by_torch(tower: PreTrainedModel) -> None:
    """Let a tower of transformers attend by this function from now on."""
    AttentionInterface.register(NAME, attend)
    tower.config._attn_implementation = NAME  # set_attn_implementation would look for a package
