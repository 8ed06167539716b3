"""Costs, default budgets and checks of groups, for the tests of packing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderItemSpec
from graphwrap.budgets import Batch, Budget, choose_budgets
from graphwrap.costs import Costs
from graphwrap.packing import Group, Packer
from tests.oracles import BY_NAME


@cache
def default_budgets_of(name: str) -> tuple[Budget, ...]:
    family = BY_NAME[name]
    with torch.device("meta"):
        encoder = family.encoder_class(family.config_class.from_hf(family.config))
    assert isinstance(encoder, VisionEncoder)
    return choose_budgets(encoder).budgets


def line(ms: float, row_ms: float) -> list[tuple[float, float]]:
    """Eager runs of so many milliseconds plus so many per row."""
    return [(0, ms), (1000, ms + 1000 * row_ms)]


def measured(budgets: Sequence[Budget], host_ms: float = 13.5) -> Costs:
    """Costs of the order measured on one H200 for a Qwen tower at true size."""
    times = {b: max(1.9, 0.6 + b.rows * 0.0048) + 2e-4 * b.rows**0.5 for b in budgets}
    return Costs(times, line(host_ms, 0.0046))


def check_groups(packer: Packer, specs: Sequence[EncoderItemSpec], groups: list[Group]) -> None:
    """Each item once, in order inside its group, every capacity kept, eager items with why."""
    assert sorted(item for group in groups for item in group.items) == list(range(len(specs)))
    assert [group.items[0] for group in groups] == sorted(group.items[0] for group in groups)
    for items, budget, _, reasons in groups:
        assert list(items) == sorted(items)
        batch = Batch.of([specs[item] for item in items])
        if budget is None:
            assert reasons == tuple(packer.why_eager(specs[item]) for item in items)
            assert batch.tokens <= packer.eager_tokens or batch.items == 1
            continue
        assert reasons == ()
        assert budget in packer.budgets
        assert batch.items <= packer.max_batch_size
        assert batch.tokens <= budget.tokens
        assert batch.rows <= budget.rows
        assert batch.segments <= budget.segments
        assert batch.longest_segment <= budget.longest_segment
        assert batch.windows <= budget.windows
