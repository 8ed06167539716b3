"""Lets transformers' vision towers attend with the flash-attention 2 kernels that torch contains.

transformers' own ``"flash_attention_2"`` imports the package flash-attn, which has no wheel for
every version of torch; torch contains the same kernels. transformers calls the function registered
here like that package: once per block for all segments, with their offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from encoders.layers.torch_internals import attend_flash

NAME = "torch_flash_attention_2"
"""The name under which the function is registered; transformers tests whether it has "flash"."""


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
    """Return attention [B, T, H, K], with the signature of transformers' attention functions.

    Args:
        module: the attention module that calls this function; not used.
        query, key, value: [B, H, T, K]. With offsets, B is 1 and the segments are parts of T.
        attention_mask: None, because segments are given by offsets.
        scaling: the factor of the products of queries and keys.
        cu_seq_lens_q: the offsets of the segments, int32; None if each of the B rows is a segment.
        max_length_q: number of rows of the longest segment.
        ignored: other arguments that transformers passes.
    """
    batch, _, rows, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32).to(
            query.device
        )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    assert abs(scaling * query.shape[-1] ** 0.5 - 1) < 1e-6  # the factor of attend_flash
    out = attend_flash(q, k, v, cu_seq_lens_q, max_length_q or rows)
    return out.unflatten(0, (batch, rows)), None


def attend_by_torch(tower: PreTrainedModel) -> None:
    """Make a tower of transformers call :func:`attend` for its attention from now on."""
    AttentionInterface.register(NAME, attend)
    tower.config._attn_implementation = NAME  # set_attn_implementation would require flash-attn
