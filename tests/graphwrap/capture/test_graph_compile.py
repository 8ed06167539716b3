"""``compile=True``: every budget compiled before capture, eager runs left as they are."""

from __future__ import annotations

import pytest
import torch

from tests.support.graphs.cases import mixes, pixels_for, static, tower
from tests.support.graphs.outputs import EVERY_FIELD, worst_distance
from tests.support.towers.toy_encoder import ToyEncoder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["intern_vit_300m", "qwen2_5_vl"])
def test_compiled_graphs_answer_as_the_encoder_does(name: str) -> None:
    torch.compiler.reset()
    encoder = tower(name)
    graphed = static(encoder, [16, 96], max_frames_per_batch=8, compile=True, outputs=EVERY_FIELD)
    for grids in mixes(name).values():
        pixels = pixels_for(encoder, grids)
        assert worst_distance(graphed(pixels, grids), encoder(pixels, grids)) <= 2e-6
    assert not graphed.stats().dropped


@pytest.mark.slow
def test_more_budgets_than_torch_compiles_by_default_are_all_compiled() -> None:
    torch.compiler.reset()
    budgets = [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    settings = {"compile": True, "max_frames_per_batch": 4}
    graphed = static(ToyEncoder(), budgets, **settings).capture(progress=False)
    assert len(graphed.stats().budgets) == len(budgets)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= len(budgets)
