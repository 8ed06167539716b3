"""The cheapest of all ways to divide a few items into runs: an oracle for packing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from encoders.contract import EncoderItemSpec
from graphwrap.packing import WORTH_A_SPLIT, Group, Packer

COLUMNS = [1, 0, 2, 3, 4]
"""The fields of an item's spec in the order of a budget's fields."""


def cost_of(packer: Packer, specs: Sequence[EncoderItemSpec], groups: Sequence[Group]) -> float:
    """Return the sum of the costs of groups, by the costs of ``packer``."""
    total = 0.0
    for items, budget, _, _ in groups:
        rows = sum(specs[item].input_size for item in items)
        total += packer.costs.eager(rows) if budget is None else packer.replay_costs[budget]
    return total


def least_cost(packer: Packer, specs: Sequence[EncoderItemSpec]) -> float:
    """Return the cost of the cheapest division, over every way to divide the items into runs.

    Several runs count 10 % more than the sum of their costs, as packing counts them.
    """
    costs = run_costs(packer, specs)
    least, several = costs.copy(), np.inf
    for subset in range(1, len(costs)):
        one, other = splits(subset)
        if len(one):
            several = float((costs[one] + least[other]).min())
            least[subset] = min(costs[subset], several)
    return min(float(costs[-1]), WORTH_A_SPLIT * several)


def run_costs(packer: Packer, specs: Sequence[EncoderItemSpec]) -> Any:
    """Return the cost of each subset of items as one run, [2**items]; infinite if it cannot run."""
    members = np.arange(1 << len(specs))[:, None] >> np.arange(len(specs)) & 1
    items = np.array(specs)[:, COLUMNS]
    sums, counts = members @ items, members.sum(axis=1)
    sums[:, 3] = (members * items[:, 3]).max(axis=1)  # the longest segment
    costs = np.array([packer.costs.eager(int(rows)) for rows in sums[:, 1]])
    costs[(sums[:, 0] > packer.eager_tokens) & (counts > 1)] = np.inf
    for budget, ms in packer.replay_costs.items():
        fits = (sums <= budget).all(axis=1) & (counts <= packer.max_batch_size)
        costs[fits] = np.minimum(costs[fits], ms)
    costs[0] = 0.0
    return costs


@cache
def splits(subset: int) -> tuple[Any, Any]:
    """Return each way to split a subset of items in two; the first part has the last item."""
    last = 1 << subset.bit_length() - 1
    others = subset ^ last
    parts = np.arange(others + 1)
    parts = parts[parts & others == parts]
    parts = parts[parts != others]
    return parts | last, others ^ parts
