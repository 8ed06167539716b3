"""Attention of transformers' towers by torch's own flash-attention 2, which the benchmarks use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.measuring import torch_flash
from encoders.layers.attention import attention
from tests.oracles import BY_NAME
from tests.oracles.drawn import build_pair

GRIDS = {
    "qwen2_5_vl": [[1, 4, 8], [1, 12, 8], [2, 4, 4]],
    "qwen3_vl": [[1, 4, 8], [2, 4, 4]],
    "intern_vit_300m": [[1, 2, 2], [2, 2, 2]],
}


@pytest.mark.parametrize("name", GRIDS)
def test_segments_in_one_call_give_what_sdpa_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        calls.append(cu_seqlens.tolist())
        return attention(q, k, v, cu_seqlens, torch.tensor(longest, dtype=torch.int32))

    monkeypatch.setattr(torch_flash, "attend_flash", attend)  # torch's kernel needs CUDA
    family = BY_NAME[name]
    encoder, reference = build_pair(family, family.tiny)
    assert isinstance(reference, PreTrainedModel)
    grids = GRIDS[name]
    rows = sum(spec.input_size for spec in encoder.item_specs(grids))
    pixels, grid = torch.randn(rows, *encoder.row_shape), torch.tensor(grids)
    with torch.no_grad():
        expected = family.output(reference, pixels, grid)
        torch_flash.attend_by_torch(reference)
        found = family.output(reference, pixels, grid)
    assert len(calls) >= 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
