"""Graphs of every kind of tower, at published widths, have the bits of padded eager runs."""

from __future__ import annotations

import pytest
import torch

from graphwrap import GraphedEncoder
from tests.gpu.gpu_towers import NEEDS_CUDA, on_gpu, replaying
from tests.oracles import BY_NAME, EVERY_KIND, build_encoder
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, copy_of

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("name", EVERY_KIND)
def test_graphs_of_every_kind_give_padded_eagers_bits(name: str) -> None:
    family = BY_NAME[name]
    encoder = build_encoder(family, family.shallow).to("cuda", torch.bfloat16).accelerated()
    least = encoder.budget_range[0]
    small, large = encoder.grid_for(least), encoder.grid_for(3 * least)
    calls = [[small], [small, large, small], [large, small]]
    tokens = [sum(spec.output_tokens for spec in encoder.item_specs(grids)) for grids in calls]
    budgets, items = [max(tokens)], max(map(len, calls))
    graphed = replaying(encoder, budgets, max_batch_size=items)
    static = GraphedEncoder(
        graphed.encoder, budgets, max_batch_size=items, outputs=EVERY_FIELD, backend="static"
    )
    for seed, grids in enumerate(calls):
        pixels = on_gpu(encoder, grids, seed)
        expected = copy_of(static(pixels, grids))
        assert_same_bits(graphed(pixels, grids), expected)
        graphed._poison()
        assert_same_bits(graphed(pixels, grids), expected)
    assert graphed.stats().eager_items == static.stats().eager_items == 0
    graphed.release()
